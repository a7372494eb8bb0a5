//! Programs of a light cluster, found, killed and started again by a test.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::Dev;
use crate::cluster::MARKER;
use crate::cluster::layout::Layout;
use crate::daemon::Daemon;

/// A program of the control plane that was killed: how to start it again.
#[derive(Debug)]
pub struct Killed {
    name: String,
    command: Vec<Vec<u8>>,
    environment: Vec<Vec<u8>>,
}

impl Dev {
    /// PIDs, as this machine counts them, of the cluster's processes that run `program`.
    ///
    /// # Errors
    /// When `/proc` can't be read.
    pub fn pids(&self, program: &str) -> Result<Vec<Pid>> {
        let marker = format!("{MARKER}={}", self.dir);
        let mut pids = Vec::new();
        for entry in fs::read_dir("/proc").context("read /proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| Pid::from_raw(n.parse().ok()?)) else {
                continue;
            };
            let program_of = fs::read_link(entry.path().join("exe")).unwrap_or_default();
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            if program_of.file_name() == Some(OsStr::new(program))
                && environment.split(|b| *b == 0).any(|v| v == marker.as_bytes())
            {
                pids.push(pid);
            }
        }
        Ok(pids)
    }

    /// SIGKILL for every process of the cluster that runs `program`. Imp's own are started again a second later;
    /// whether one was there to be killed is the answer.
    ///
    /// # Errors
    /// When the signal can't be sent.
    pub fn kill(&self, program: &str) -> Result<bool> {
        let pids = self.pids(program)?;
        for pid in &pids {
            match kill_process(*pid, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(e) => return Err(e).with_context(|| format!("kill {program} {pid:?}")),
            }
        }
        Ok(!pids.is_empty())
    }

    /// Kills a program that runs beside the API server (`etcd`, `kube-apiserver`), and says how to start it again.
    ///
    /// # Errors
    /// When it does not run.
    pub fn take_down(&self, name: &str) -> Result<Killed> {
        let state = self.state()?;
        let daemon =
            state.daemons.iter().find(|d| d.name == name).with_context(|| format!("there is no {name}"))?;
        let read = |file: &str| -> Result<Vec<Vec<u8>>> {
            let path = format!("/proc/{}/{file}", daemon.pid);
            let bytes = fs::read(&path).with_context(|| format!("read {path}: does {name} run?"))?;
            Ok(bytes.split(|b| *b == 0).filter(|v| !v.is_empty()).map(<[u8]>::to_vec).collect())
        };
        let killed =
            Killed { name: name.to_owned(), command: read("cmdline")?, environment: read("environ")? };
        if killed.command.is_empty() {
            bail!("{name} has ended");
        }
        daemon.stop(std::time::Duration::ZERO)?;
        Ok(killed)
    }

    /// Starts it again, as it was.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn put_up(&self, killed: &Killed) -> Result<()> {
        let layout = Layout { name: self.name.clone(), dir: self.dir.clone() };
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", layout.hub().path()));
        command.args(killed.command.iter().map(|a| OsStr::from_bytes(a))).env_clear();
        for variable in &killed.environment {
            let at = variable.iter().position(|b| *b == b'=').context("a variable without =")?;
            command.env(OsStr::from_bytes(&variable[..at]), OsStr::from_bytes(&variable[at + 1..]));
        }
        let daemon =
            Daemon::start(&killed.name, command, &layout.logs().join(format!("{}.log", killed.name)))?;
        let mut state = self.state()?;
        let known =
            state.daemons.iter_mut().find(|d| d.name == killed.name).context("it is no longer recorded")?;
        *known = daemon;
        state.save(&self.dir)
    }
}
