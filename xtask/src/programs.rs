//! Our programs, as they are shipped: static, optimised.

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;

use crate::workspace;

/// What static programs are built for.
const TARGET: &str = "x86_64-unknown-linux-musl";
/// The packages that become programs of images and people.
const PACKAGES: [&str; 4] = ["imp-operator", "imp-agent", "imp-runtime", "imp-cli"];
/// What runs in every VM, built smaller.
const GUEST: &str = "imp-guest";

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
    compile("dist", &PACKAGES)?;
    compile("guest", &[GUEST])?;
    let built = workspace::target().join(TARGET);
    // All programs in one place, this one from another profile's.
    let (from, to) = (built.join("guest").join(GUEST), built.join("dist").join(GUEST));
    let new = to.with_extension("new");
    std::fs::copy(&from, &new).with_context(|| format!("copy {from} to {new}"))?;
    std::fs::rename(&new, &to).with_context(|| format!("rename {new} to {to}"))?;
    Ok(Programs { dir: built.join("dist") })
}

/// Builds an example of a crate as programs are built.
///
/// # Errors
/// When the build fails.
pub(crate) fn example(package: &str, name: &str) -> Result<Utf8PathBuf> {
    ensure_target()?;
    let mut command = cargo();
    command.args(["build", "--profile", "dist", "--target", TARGET, "-p", package, "--example", name]);
    if !command.status().context("run cargo")?.success() {
        bail!("example {name} of {package} can't be built; the compiler's messages are above");
    }
    Ok(workspace::target().join(TARGET).join("dist/examples").join(name))
}

fn compile(profile: &str, packages: &[&str]) -> Result<()> {
    let mut command = cargo();
    command.args(["build", "--profile", profile, "--target", TARGET]);
    command.args(packages.iter().flat_map(|p| ["-p", p]));
    let status = command.status().context("run cargo")?;
    if !status.success() {
        bail!("the programs can't be built; the compiler's messages are above");
    }
    Ok(())
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
