//! Named network namespaces (as ip-netns(8) keeps them), links, routes.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;

/// A named network namespace. Dropping the value leaves the namespace; [`NetNs::delete`] removes it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NetNs {
    name: String,
}

impl NetNs {
    /// The namespace of that name, which may or may not exist yet.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that keeps it.
    #[must_use]
    pub fn path(&self) -> Utf8PathBuf {
        Utf8PathBuf::from("/run/netns").join(&self.name)
    }

    /// Whether it exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.path().exists()
    }

    /// Makes it, with its loopback up.
    ///
    /// # Errors
    /// When it exists already, or the caller may not make namespaces.
    pub fn create(&self) -> Result<()> {
        run(Command::new("ip").args(["netns", "add", &self.name]))?;
        self.ip(&["link set lo up"])
    }

    /// Removes it; one that does not exist is no error. Its links go with it once no process is left inside.
    ///
    /// # Errors
    /// When it can't be unmounted.
    pub fn delete(&self) -> Result<()> {
        if self.exists() {
            run(Command::new("ip").args(["netns", "del", &self.name]))?;
        }
        Ok(())
    }

    /// Runs ip(8) commands in it, in one process, stopping at the first that fails.
    ///
    /// # Errors
    /// With what ip says.
    pub fn ip(&self, commands: &[&str]) -> Result<()> {
        let mut child = Command::new("ip")
            .args(["-n", &self.name, "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("run ip (Debian package iproute2)")?;
        let mut input = child.stdin.take().context("ip has no standard input")?;
        // A broken pipe means that ip gave up early; its exit status below says why.
        let _ = input.write_all((commands.join("\n") + "\n").as_bytes());
        drop(input);
        let output = child.wait_with_output().context("wait for ip")?;
        if !output.status.success() {
            bail!(
                "ip in network namespace {}: {} (commands: {})",
                self.name,
                String::from_utf8_lossy(&output.stderr).trim(),
                commands.join("; ")
            );
        }
        Ok(())
    }

    /// A command that runs `program` inside.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path())).arg(program);
        command
    }

    /// Sets a network sysctl inside, as `net.ipv4.ip_forward`.
    ///
    /// # Errors
    /// When there is no such sysctl.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        run(self.command("sysctl").args(["-qw", &format!("{key}={value}")]))
    }
}

/// Runs a command to its end.
///
/// # Errors
/// When it can't be started or fails, with its own words.
pub fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a command to its end and returns what it printed.
///
/// # Errors
/// When it can't be started or fails, with its own words.
pub fn output(command: &mut Command) -> Result<String> {
    let line = || {
        std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|a| a.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" ")
    };
    let shown = line();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("can't run `{shown}`"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("`{shown}` failed ({}): {}", output.status, words.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
