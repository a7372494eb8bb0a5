//! Which process is a VM's VMM: proven by more than a PID.

use crate::{ProcessRecord, VmmError, VmmExit};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};
use tokio::io::unix::AsyncFd;

/// The argument of a VMM's command line that names its VM.
#[must_use]
pub fn marker(uid: &str) -> String {
    format!("imp:{uid}")
}

/// The host's boot id: a PID of another boot is nobody's.
///
/// # Errors
/// When it cannot be read.
pub fn boot_id() -> Result<String, VmmError> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path)
        .map_err(|source| VmmError::Io { doing: format!("cannot read {path}"), source })?;
    Ok(text.trim().to_owned())
}

/// Start time of a live process in clock ticks since boot: field 22 of /proc/PID/stat (proc_pid_stat(5)).
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in parentheses that may hold spaces and parentheses itself.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

pub(crate) fn executable(pid: i32) -> Option<String> {
    let path = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let path = path.to_string_lossy().into_owned();
    // An upgrade of the package unlinks the program; it is still the same process.
    Some(path.trim_end_matches(" (deleted)").to_owned())
}

fn carries_marker(pid: i32, uid: &str) -> bool {
    let wanted = marker(uid);
    std::fs::read(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| line.split(|b| *b == 0).any(|argument| argument == wanted.as_bytes()))
}

/// A handle to the process of `record`, if it is that very process.
///
/// # Errors
/// When the kernel gives no handle to a process that is there.
pub(crate) fn open(record: &ProcessRecord) -> Result<Option<OwnedFd>, VmmError> {
    if boot_id()? != record.boot_id {
        return Ok(None);
    }
    let Some(pid) = Pid::from_raw(record.pid) else { return Ok(None) };
    // The handle first: what is checked after it cannot be another process by the time it is used.
    let fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        Err(e) => {
            return Err(VmmError::Io {
                doing: format!("cannot open process {}", record.pid),
                source: e.into(),
            });
        }
    };
    let same = start_time(record.pid) == Some(record.start_time)
        && executable(record.pid).as_deref() == Some(record.exe.as_str())
        && carries_marker(record.pid, &record.uid);
    Ok(same.then_some(fd))
}

/// PIDs whose command line carries the marker of `uid` and whose program is called `program`.
pub(crate) fn find(uid: &str, program: &str) -> Result<Option<i32>, VmmError> {
    let entries = std::fs::read_dir("/proc")
        .map_err(|source| VmmError::Io { doing: "cannot read /proc".to_owned(), source })?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok()).find(|pid| {
        carries_marker(*pid, uid)
            && executable(*pid).is_some_and(|exe| {
                Path::new(&exe).file_name().is_some_and(|name| name.to_string_lossy().starts_with(program))
            })
    }))
}

/// A process that we hold a handle to, whoever's child it is.
#[derive(Debug)]
pub(crate) struct Process {
    fd: AsyncFd<OwnedFd>,
}

impl Process {
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self { fd: crate::sys::watch(fd)? })
    }

    /// Waits until the process is gone (a pidfd becomes readable then, pidfd_open(2)).
    pub(crate) async fn wait(&self) -> VmmExit {
        // The readiness is not cleared: it stays readable for ever, and others that wait must see it too.
        let _ = self.fd.readable().await;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(self.fd.get_ref().as_fd()), options).ok().flatten();
        let exit = VmmExit {
            code: status.as_ref().and_then(rustix::process::WaitIdStatus::exit_status),
            signal: status.as_ref().and_then(rustix::process::WaitIdStatus::terminating_signal),
        };
        // Reaps it where it is our child; where it is not, whoever adopted it does.
        let _ =
            waitid(WaitId::PidFd(self.fd.get_ref().as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        exit
    }

    pub(crate) fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(self.fd.get_ref(), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Accelerator;

    fn sleeper(uid: &str) -> (std::process::Child, ProcessRecord) {
        let child = std::process::Command::new("sleep").args(["1000"]).arg0_marker(uid).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        // The program has replaced itself once its command line is the new one.
        while !carries_marker(pid, uid) {
            std::thread::yield_now();
        }
        let record = ProcessRecord {
            driver: "test".into(),
            version: String::new(),
            accelerator: Accelerator::Tcg,
            boot_id: boot_id().unwrap(),
            pid,
            start_time: start_time(pid).unwrap(),
            exe: executable(pid).unwrap(),
            uid: uid.into(),
        };
        (child, record)
    }

    trait Arg0 {
        fn arg0_marker(&mut self, uid: &str) -> &mut Self;
    }
    impl Arg0 for std::process::Command {
        fn arg0_marker(&mut self, uid: &str) -> &mut Self {
            use std::os::unix::process::CommandExt as _;
            self.arg0(marker(uid))
        }
    }

    #[tokio::test]
    async fn fr48_only_the_very_process_is_taken_up_again() {
        let (mut child, record) = sleeper("u-48");
        assert!(open(&record).unwrap().is_some(), "positive control");
        for other in [
            ProcessRecord { start_time: record.start_time + 1, ..record.clone() },
            ProcessRecord { boot_id: "another boot".into(), ..record.clone() },
            ProcessRecord { exe: "/usr/bin/other".into(), ..record.clone() },
            ProcessRecord { uid: "u-4".into(), ..record.clone() },
        ] {
            assert!(open(&other).unwrap().is_none(), "{other:?}");
        }
        assert_eq!(find("u-48", "sleep").unwrap(), Some(record.pid));
        assert_eq!(find("u-4", "sleep").unwrap(), None, "no substring match");
        let process = Process::new(open(&record).unwrap().unwrap()).unwrap();
        process.kill().unwrap();
        assert_eq!(process.wait().await.signal, Some(9));
        assert!(open(&record).unwrap().is_none());
        let _ = child.wait();
    }
}
