//! Our programs, as they are shipped: static, optimised.

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;

use crate::workspace;

/// What static programs are built for.
const TARGET: &str = "x86_64-unknown-linux-musl";
/// The packages that become programs of images, VMs and people.
const PACKAGES: [&str; 5] = ["imp-operator", "imp-agent", "imp-runtime", "imp-cli", "imp-guest"];

/// Where the built programs are.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    dir: Utf8PathBuf,
}

impl Programs {
    /// A program.
    pub(crate) fn path(&self, name: &str) -> Utf8PathBuf {
        self.dir.join(name)
    }
}

/// Builds what is not built; cargo shows its own progress. `IMP_PROGRAMS` names a directory with programs that were built
/// before, for suites that start several clusters.
///
/// # Errors
/// When the build fails.
pub(crate) fn build() -> Result<Programs> {
    if let Ok(dir) = std::env::var("IMP_PROGRAMS") {
        return Ok(Programs { dir: dir.into() });
    }
    ensure_target()?;
    let mut command = cargo();
    command.args(["build", "--profile=dist", "--target", TARGET]);
    command.args(PACKAGES.iter().flat_map(|p| ["-p", p]));
    let status = command.status().context("run cargo")?;
    if !status.success() {
        bail!("the programs can't be built; the compiler's messages are above");
    }
    Ok(Programs { dir: workspace::target().join(TARGET).join("dist") })
}

/// Cargo for this checkout.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    command.current_dir(workspace::root());
    command
}

/// Adds the standard library of the static target where rustup has not put it yet.
fn ensure_target() -> Result<()> {
    let sysroot = imp_testkit::netns::output(
        Command::new("rustc").args(["--print", "sysroot"]).current_dir(workspace::root()),
    )?;
    if Utf8PathBuf::from(sysroot.trim()).join("lib/rustlib").join(TARGET).exists() {
        return Ok(());
    }
    imp_testkit::netns::run(
        Command::new("rustup").args(["target", "add", TARGET]).current_dir(workspace::root()),
    )
    .with_context(|| format!("add the Rust target {TARGET}"))
}
