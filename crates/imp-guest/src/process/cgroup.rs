//! The control group of everything that is not the agent.

use std::fs;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;

use anyhow::{Context as _, Result};

const DIR: &str = "/sys/fs/cgroup/workload";

/// The workload's group, with the controllers that account for it.
#[derive(Debug)]
pub(crate) struct Cgroup(());

impl Cgroup {
    /// Makes the group.
    pub(crate) fn create() -> Result<Self> {
        // Which controllers exist depends on the kernel; each is useful alone.
        for controller in ["cpu", "memory", "pids", "io"] {
            if let Err(e) = fs::write("/sys/fs/cgroup/cgroup.subtree_control", format!("+{controller}")) {
                eprintln!("imp-guest: no cgroup controller {controller}: {e}");
            }
        }
        match fs::create_dir(DIR) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                Err(e).with_context(|| format!("make {DIR}"))
            }
            _ => Ok(Self(())),
        }
    }

    /// A descriptor through which a child enters the group, by writing `0`.
    pub(crate) fn procs(&self) -> io::Result<OwnedFd> {
        fs::File::options().write(true).open(format!("{DIR}/cgroup.procs")).map(Into::into)
    }

    /// Kills every process of the group at once (cgroup v2, `cgroup.kill`).
    pub(crate) fn kill(&self) -> io::Result<()> {
        fs::File::options().write(true).open(format!("{DIR}/cgroup.kill"))?.write_all(b"1")
    }

    /// How many of its processes the out-of-memory killer has ended, whosever memory was short.
    pub(crate) fn oom_kills(&self) -> u64 {
        fs::read_to_string(format!("{DIR}/memory.events")).map(|t| field(&t, "oom_kill")).unwrap_or_default()
    }

    /// The file by which the kernel tells when the last process is gone.
    pub(crate) fn events(&self) -> io::Result<fs::File> {
        fs::File::open(format!("{DIR}/cgroup.events"))
    }

    /// Whether a process is left, by [`Cgroup::events`]; reading also makes the file wait for the next change.
    pub(crate) fn populated(events: &mut fs::File) -> io::Result<bool> {
        let mut text = String::new();
        events.rewind()?;
        events.read_to_string(&mut text)?;
        Ok(field(&text, "populated") != 0)
    }

    /// CPU time used, in nanoseconds.
    pub(crate) fn cpu_nanoseconds(&self) -> u64 {
        fs::read_to_string(format!("{DIR}/cpu.stat"))
            .map(|t| field(&t, "usage_usec") * 1000)
            .unwrap_or_default()
    }
}

/// A value of a flat keyed file (Linux, Documentation/admin-guide/cgroup-v2.rst); 0 when absent.
fn field(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|l| l.split_once(' '))
        .find(|(k, _)| *k == key)
        .and_then(|(_, v)| v.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keyed_files_are_read_by_whole_keys() {
        let text = "low 0\noom 5\noom_kill 2\noom_group_kill 7\n";
        assert_eq!(field(text, "oom_kill"), 2);
        assert_eq!(field(text, "max"), 0);
    }
}
