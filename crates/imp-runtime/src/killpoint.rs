//! Places where a test makes the process die, to see that what it was doing is continued or undone.

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, Ordering},
};

/// `NAME` or `NAME:N` (the Nth time that it is reached, from 1).
const VARIABLE: &str = "IMP_KILL_AT";

/// Names of all points, in the order in which a VM that is made and deleted reaches them.
pub const POINTS: &[&str] = &[
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

/// Dies here, by SIGKILL as from outside, if the environment says so.
pub(crate) fn killpoint(name: &'static str) {
    static WANTED: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static REACHED: AtomicU32 = AtomicU32::new(0);
    debug_assert!(POINTS.contains(&name), "{name} is not listed");
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (name, count) = text.split_once(':').unwrap_or((&text, "1"));
        Some((name.to_owned(), count.parse().unwrap_or(1)))
    });
    let Some((wanted, count)) = wanted else { return };
    if wanted == name && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *count {
        // Nothing to be done about a failure: then the test sees that we live.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
