//! Processes that outlive the one that starts them, recorded so that a later run finds and ends exactly them.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use camino::{Utf8Path, Utf8PathBuf};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// One started process. A PID alone proves nothing after it was reused, so the start time goes with it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Daemon {
    /// What it is, for people: `kube-apiserver`, `node n1`.
    pub name: String,
    /// Its PID in the namespace of whoever started it.
    pub pid: u32,
    /// Start time in clock ticks since boot: field 22 of `/proc/PID/stat` (proc_pid_stat(5)).
    pub start_time: u64,
    /// Where its output goes.
    pub log: Utf8PathBuf,
}

/// Start time of a process in clock ticks since boot; `None` when there is no such process or it is a zombie.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses and may hold spaces and parentheses itself.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

impl Daemon {
    /// Starts `command` in a session of its own with its output appended to `log`.
    ///
    /// # Errors
    /// When the log can't be opened or the program can't be started.
    pub fn start(name: &str, mut command: Command, log: &Utf8Path) -> Result<Self> {
        if let Some(dir) = log.parent() {
            std::fs::create_dir_all(dir).with_context(|| format!("create {dir}"))?;
        }
        let output =
            OpenOptions::new().create(true).append(true).open(log).with_context(|| format!("open {log}"))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let child = command.spawn().with_context(|| {
            format!("start {name}: can't run {}", command.get_program().to_string_lossy())
        })?;
        let pid = child.id();
        let start_time = start_time(pid).with_context(|| format!("{name} ended at once; see {log}"))?;
        Ok(Self { name: name.to_owned(), pid, start_time, log: log.to_owned() })
    }

    /// Whether this very process still runs.
    #[must_use]
    pub fn alive(&self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }

    /// A handle that can't be confused with another process; `None` when the process is gone.
    fn pidfd(&self) -> Option<OwnedFd> {
        let fd = pidfd_open(Pid::from_raw(i32::try_from(self.pid).ok()?)?, PidfdFlags::empty()).ok()?;
        self.alive().then_some(fd)
    }

    /// Sends `signal`; a process that is gone is no error.
    pub fn signal(&self, signal: Signal) {
        if let Some(fd) = self.pidfd() {
            // It may end between the look and the signal; there is nothing left to tell it then.
            let _ = pidfd_send_signal(fd, signal);
        }
    }

    /// Asks the process to end (SIGTERM), and after `grace` ends it (SIGKILL). Returns when it is gone.
    ///
    /// # Errors
    /// When it is still there ten seconds after SIGKILL (a process in uninterruptible sleep).
    pub fn stop(&self, grace: Duration) -> Result<()> {
        let Some(fd) = self.pidfd() else { return Ok(()) };
        if !grace.is_zero() {
            let _ = pidfd_send_signal(&fd, Signal::TERM);
            if wait_ended(&fd, grace)? {
                return Ok(());
            }
        }
        let _ = pidfd_send_signal(&fd, Signal::KILL);
        if !wait_ended(&fd, Duration::from_secs(10))? {
            bail!("{} (pid {}) did not end after SIGKILL", self.name, self.pid);
        }
        Ok(())
    }

    /// The last lines of its log, for error messages.
    #[must_use]
    pub fn log_tail(&self, lines: usize) -> String {
        tail(&self.log, lines)
    }
}

/// The last `lines` lines of a file; empty when it can't be read.
#[must_use]
pub fn tail(path: &Utf8Path, lines: usize) -> String {
    let text = std::fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Waits until the process of a pidfd has ended; `false` when `timeout` passed first.
fn wait_ended(fd: &OwnedFd, timeout: Duration) -> Result<bool> {
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&left.try_into().context("a timeout out of range")?)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("wait for a process to end"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_daemon_is_found_and_ended_and_its_output_kept() {
        let dir = tempfile::tempdir().unwrap();
        let log = Utf8PathBuf::from_path_buf(dir.path().join("log")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo hello; exec sleep 1000"]);
        let daemon = Daemon::start("sleeper", command, &log).unwrap();
        assert!(daemon.alive());
        crate::wait::wait_for(Duration::from_secs(10), "the daemon's first words", async || {
            let text = daemon.log_tail(5);
            if text == "hello" { Ok(()) } else { Err(text) }
        })
        .await
        .unwrap();
        let other = Daemon { start_time: daemon.start_time + 1, ..daemon.clone() };
        assert!(!other.alive(), "a PID that was reused is not ours");
        other.stop(Duration::ZERO).unwrap();
        assert!(daemon.alive(), "and is left alone");
        daemon.stop(Duration::from_secs(5)).unwrap();
        assert!(!daemon.alive());
        assert_eq!(daemon.log_tail(5), "hello");
    }
}
