//! The end of the machine.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::system::{RebootCommand, reboot};

use crate::agent::Machine;
use crate::process::cgroup::Cgroup;

/// How long killed processes may take to be gone; one in uninterruptible sleep may never be.
const KILL_DEADLINE: Duration = Duration::from_secs(5);
/// Time for the answer to reach the host; the disk is safe by then.
const ANSWER: Duration = Duration::from_millis(20);

/// Ends every process and makes the disks clean. Blocks.
pub(crate) fn settle(machine: Option<&Machine>) {
    let Some(machine) = machine else { return };
    if let Err(e) = machine.launcher.cgroup.kill() {
        eprintln!("imp-guest: end every process: {e}");
    }
    match wait_until_empty(&machine.launcher.cgroup) {
        Ok(true) => {}
        Ok(false) => eprintln!("imp-guest: processes remain {KILL_DEADLINE:?} after SIGKILL"),
        Err(e) => eprintln!("imp-guest: {e:#}"),
    }
    machine.launcher.root.close();
}

/// Waits for the group's last process; `false` at the deadline. The kernel tells of changes by POLLPRI.
fn wait_until_empty(cgroup: &Cgroup) -> Result<bool> {
    let mut events: File = cgroup.events().context("open cgroup.events")?;
    let end = Instant::now() + KILL_DEADLINE;
    loop {
        if !Cgroup::populated(&mut events).context("read cgroup.events")? {
            return Ok(true);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let mut fds = [PollFd::new(&events, PollFlags::PRI)];
        poll(&mut fds, Some(&left.try_into().context("a timeout out of range")?))
            .context("watch cgroup.events")?;
    }
}

/// Powers the machine off, once the answer had time to leave.
pub(crate) fn off_soon() {
    let power_off = || {
        std::thread::sleep(ANSWER);
        let refused = reboot(RebootCommand::PowerOff);
        eprintln!("imp-guest: the kernel does not power off: {refused:?}");
    };
    if let Err(e) = std::thread::Builder::new().name("power-off".into()).spawn(power_off) {
        eprintln!("imp-guest: start a thread: {e}");
        power_off();
    }
}
