//! Every child of PID 1 is reaped here, ours and the orphans that the kernel gives us.

use std::collections::HashMap;
use std::io;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imp_proto::v1::ExitStatus;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::signal as signals;
use crate::sys;

/// How a process ended, by the kernel's word.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ended {
    Code(i32),
    Signal(i32),
}

impl Ended {
    fn from_wait(status: WaitStatus) -> Option<Self> {
        status.exit_status().map(Self::Code).or_else(|| status.terminating_signal().map(Self::Signal))
    }

    /// For the wire; a process that a signal ended reports 128 + signal, as shells do.
    pub(crate) fn status(self, oom_killed: bool) -> ExitStatus {
        match self {
            Self::Code(code) => ExitStatus { code, signal: 0, oom_killed: false, message: String::new() },
            Self::Signal(signal) => ExitStatus {
                code: 128 + signal,
                signal,
                oom_killed,
                message: if oom_killed {
                    "killed by the kernel: the VM ran out of memory".to_owned()
                } else {
                    format!("ended by {}", signals::name(signal))
                },
            },
        }
    }
}

/// A child that we started and want to hear of.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    pub(crate) pid: Pid,
    ended: watch::Receiver<Option<Ended>>,
    reaper: Arc<Reaper>,
}

impl Child {
    /// Waits for its end.
    pub(crate) async fn wait(&mut self) -> Ended {
        let ended = self.ended.wait_for(Option::is_some).await.map(|ended| *ended);
        match ended {
            Ok(Some(ended)) => ended,
            // The reaper lives as long as the machine, and sends nothing else.
            _ => std::future::pending().await,
        }
    }

    /// Sends a signal to it, or to its process group. Its end is no error.
    ///
    /// # Errors
    /// For a number that is no signal.
    pub(crate) fn kill(&self, signal: i32, group: bool) -> io::Result<()> {
        // Under the lock no PID that is still registered can have been reaped and given to another process.
        let children = self.reaper.lock();
        if !children.contains_key(&self.pid) {
            return Ok(());
        }
        match sys::kill(self.pid, signal, group) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            result => result.map_err(Into::into),
        }
    }
}

type Children = HashMap<Pid, watch::Sender<Option<Ended>>>;

/// The one place that waits for processes.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    children: Mutex<Children>,
}

impl Reaper {
    /// Starts reaping, for as long as the runtime lives.
    ///
    /// # Errors
    /// When SIGCHLD can't be listened to.
    pub(crate) fn start() -> io::Result<Arc<Self>> {
        let reaper = Arc::new(Self::default());
        let mut signals = signal(SignalKind::child())?;
        let task = Arc::clone(&reaper);
        tokio::spawn(async move {
            loop {
                let pass = Arc::clone(&task);
                // The lock is held while a program is being started; that must not hold up the runtime.
                if tokio::task::spawn_blocking(move || pass.reap()).await.is_err() {
                    eprintln!("imp-guest: a pass of the reaper panicked");
                }
                if signals.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(reaper)
    }

    /// Nothing in here is left half done by a panic.
    fn lock(&self) -> MutexGuard<'_, Children> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap(&self) {
        let mut children = self.lock();
        // ECHILD, no children at all, ends a pass as "none has ended" does.
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if let Some(ended) = Ended::from_wait(status)
                && let Some(sender) = children.remove(&pid)
            {
                // Nobody listens when a call that started the process has been given up.
                let _ = sender.send(Some(ended));
            }
        }
    }

    /// Starts `command`. Blocks until its exec succeeded or could not.
    ///
    /// # Errors
    /// What exec or the preparation said.
    pub(crate) fn spawn(self: &Arc<Self>, command: &mut Command) -> io::Result<Child> {
        // std waits itself for a child whose exec failed; it must find it, and a child that ends at once must find
        // itself registered. So no reaping in here.
        let mut children = self.lock();
        let child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        let (sender, ended) = watch::channel(None);
        children.insert(pid, sender);
        Ok(Child { pid, ended, reaper: Arc::clone(self) })
    }
}
