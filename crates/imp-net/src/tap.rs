//! Taps: the node's end of a VM's network card.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use tokio::time::Instant;

use crate::names::Device;
use crate::{NetError, sys};

/// Between two attempts to get a held tap. The kernel tells nobody that a tap was closed while it is down.
const RETRY: Duration = Duration::from_millis(50);

/// Makes the persistent tap `device` of the VM `vm`, for the user `owner`; one that exists is taken as it is.
///
/// The VMM that had it may still be closing down, so a held tap is waited for, up to `limit`.
///
/// # Errors
/// [`NetError::TapBusy`] when it is still held then, [`NetError::NameTaken`] when the device is no tap.
pub(crate) async fn ensure(device: &Device, vm: &str, owner: u32, limit: Duration) -> Result<(), NetError> {
    let tap = &device.name;
    let give_up = Instant::now() + limit;
    let file = loop {
        let error = match sys::open_tap(tap) {
            Ok(file) => break file,
            Err(error) => error,
        };
        match Errno::from_io_error(&error) {
            Some(Errno::BUSY) if Instant::now() < give_up => tokio::time::sleep(RETRY).await,
            Some(Errno::BUSY) => {
                return Err(NetError::TapBusy { tap: tap.clone(), vm: vm.to_owned(), holder: holder(tap) });
            }
            Some(Errno::INVAL) => {
                return Err(NetError::NameTaken {
                    device: tap.clone(),
                    wanted: device.alias.clone(),
                    owner: "a device that is no tap, or one with several queues".to_owned(),
                });
            }
            _ => return Err(NetError::io(format!("make tap {tap} of VM {vm} by /dev/net/tun"), error)),
        }
    };
    sys::keep_tap(&file, owner)
        .map_err(|error| NetError::io(format!("keep tap {tap} of VM {vm} for user {owner}"), error))
}

/// Who has the tap open, for people.
fn holder(tap: &str) -> String {
    let found: Vec<String> = processes()
        .filter(|pid| holds(&pid.1, tap))
        .map(|(pid, directory)| {
            let name = fs::read_to_string(directory.join("comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim())
        })
        .collect();
    if found.is_empty() { "a process that /proc does not show".to_owned() } else { found.join(" and ") }
}

fn processes() -> impl Iterator<Item = (u32, std::path::PathBuf)> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, entry.path()))
    })
}

/// Whether a descriptor of that process is attached to `tap`: the kernel says `iff:` and the name in its fdinfo.
fn holds(process: &Path, tap: &str) -> bool {
    fs::read_dir(process.join("fd")).into_iter().flatten().flatten().any(|entry| {
        fs::read_link(entry.path()).is_ok_and(|target| target.ends_with("net/tun"))
            && fs::read_to_string(process.join("fdinfo").join(entry.file_name())).is_ok_and(|info| {
                info.lines().any(|line| line.strip_prefix("iff:").map(str::trim) == Some(tap))
            })
    })
}
