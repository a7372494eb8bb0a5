//! Places where a test makes a program die, to see that what it was doing is continued or undone.
//!
//! Each journal step and each remote step of a program is followed by a named point; some also stand between a decision and its
//! step. With `IMP_KILL_DIR` set, the program looks at each point for a file of the point's name in that directory, which holds how
//! many times to die there. If it is there, the program takes one off and ends itself by SIGKILL, as if killed from outside. Without the
//! variable a point costs one look at a flag.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{env, fs, io};

use rustix::process::{Signal, getpid, kill_process};

/// Environment variable that names the directory.
pub const VARIABLE: &str = "IMP_KILL_DIR";

/// Points of imp-runtime, in the order in which a VM that is made and deleted reaches them.
pub const RUNTIME: &[&str] = &[
    "wish-journaled",
    "attempt-journaled",
    "image-ready",
    "disk-made",
    "network-journaled",
    "network-made",
    "cgroup-made",
    "launch-journaled",
    "launched",
    "process-journaled",
    "guest-connected",
    "configured",
    "running-journaled",
    "delete-journaled",
    "stopped",
    "exit-journaled",
    "vmm-gone",
    "network-freed",
    "cgroup-freed",
    "ended-journaled",
    "disk-freed",
    "record-removed",
];

/// Points of imp-operator: at its start, in the life of a VM, and where something out of the ordinary is asked.
pub const OPERATOR: &[&str] = &[
    "ca-made",
    "lease-taken",
    "ca-published",
    "api-service-told",
    "certificate-signed",
    "finalizer-added",
    "status-decided",
    "status-written",
    "event-recorded",
    "secrets-answered",
    "finalizer-removed",
    "reset-taken",
    "expired-deleted",
];

/// Points of imp-agent: at its start, in the life of a VM, and where something out of the ordinary is asked.
pub const AGENT: &[&str] = &[
    "certificate-got",
    "heartbeat-written",
    "profile-made",
    "profile-written",
    "secrets-got",
    "vm-put",
    "status-decided",
    "status-written",
    "event-recorded",
    "delete-asked",
    "orphan-deleted",
];

/// A point of imp-runtime, one of [`RUNTIME`].
pub fn runtime(name: &'static str) {
    reached(RUNTIME, name);
}

/// A point of imp-operator, one of [`OPERATOR`].
pub fn operator(name: &'static str) {
    reached(OPERATOR, name);
}

/// A point of imp-agent, one of [`AGENT`].
pub fn agent(name: &'static str) {
    reached(AGENT, name);
}

fn reached(points: &[&str], name: &'static str) {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    // Two tasks at the same point must not take the same death.
    static TAKING: Mutex<()> = Mutex::new(());
    debug_assert!(points.contains(&name), "{name} is not listed");
    let Some(dir) = DIR.get_or_init(|| env::var_os(VARIABLE).map(PathBuf::from)) else { return };
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    // A file that is not there asks for nothing. Where it cannot be written the program would die for ever, so it lives, and the test
    // sees that nothing was taken.
    if take(&dir.join(name)).unwrap_or(false) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

/// Arms a point in `dir`, which must be there: the program dies at it `times` times.
///
/// # Errors
/// When the file cannot be written.
pub fn arm(dir: &Path, name: &str, times: u32) -> io::Result<()> {
    // Whole or not at all: the program may be at the point right now.
    let new = dir.join(format!("{name}.new"));
    fs::write(&new, times.to_string())?;
    fs::rename(new, dir.join(name))
}

/// How many deaths at a point in `dir` have not been taken yet.
///
/// # Errors
/// When the file is there and cannot be read.
pub fn armed(dir: &Path, name: &str) -> io::Result<u32> {
    match fs::read_to_string(dir.join(name)) {
        Ok(text) => text.parse().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Takes one off the number in `file`; the last takes the file with it. Whether there was one.
fn take(file: &Path) -> io::Result<bool> {
    let (Some(dir), Some(name)) = (file.parent(), file.file_name().and_then(|n| n.to_str())) else {
        return Ok(false);
    };
    match armed(dir, name)? {
        0 => return Ok(false),
        1 => fs::remove_file(file)?,
        more => arm(dir, name, more - 1)?,
    }
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_death_is_taken_as_often_as_it_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        arm(dir.path(), "a", 2).unwrap();
        let taken: Vec<bool> =
            ["a", "b", "a", "a"].iter().map(|name| take(&dir.path().join(name)).unwrap()).collect();
        assert_eq!(taken, [true, false, true, false]);
        assert_eq!(armed(dir.path(), "a").unwrap(), 0);
    }

    #[test]
    fn no_name_is_listed_twice() {
        for points in [RUNTIME, OPERATOR, AGENT] {
            let unique: std::collections::BTreeSet<_> = points.iter().collect();
            assert_eq!(unique.len(), points.len());
        }
    }
}
