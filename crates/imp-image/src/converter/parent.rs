//! The store's side: starts a converter, hands it what it needs, and makes of its end an answer.

use super::child::ARGUMENT;
use super::wire::{self, Hello, Next, Outcome};
use crate::cancel::Cancel;
use crate::layer::{BuildError, Layer};
use crate::limits::Limits;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;

/// Bytes of a broken converter's last words that are told.
const MAX_WORDS: u64 = 1024;

/// The process, which does not outlive this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn build(
    user: u32,
    layers: Receiver<Layer>,
    count: usize,
    disk: &File,
    limits: &Limits,
    cancel: &Arc<Cancel>,
) -> Result<u64, BuildError> {
    let failed = |error: io::Error| BuildError::Io("cannot start the converter of images".into(), error);
    let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|errno| failed(errno.into()))?;
    let words =
        memfd_create("converter", MemfdFlags::CLOEXEC).map(File::from).map_err(|e| failed(e.into()))?;
    // From this thread, which waits for its end: a converter dies with the thread that started it.
    let child = Command::new("/proc/self/exe")
        .arg(ARGUMENT)
        .env_clear()
        .stdin(theirs)
        .stdout(Stdio::null())
        .stderr(words.try_clone().map_err(failed)?)
        .spawn()
        .map_err(failed)?;
    let mut running = Running(child);
    let hello = Hello { limits: limits.clone(), count, user };
    wire::send(&socket, &hello, Some(disk.as_fd())).map_err(failed)?;
    cancel.wake(socket.try_clone().map_err(failed)?);
    feed(socket.try_clone().map_err(failed)?, layers).map_err(failed)?;
    match wire::receive::<Outcome>(&socket) {
        Ok(Some((outcome, _))) => outcome.into(),
        _ if cancel.is_asked() => Err(BuildError::Cancelled),
        Ok(None) => Err(broke(running.0.wait().map_err(failed)?, words)),
        // It has ended with messages unread.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            Err(broke(running.0.wait().map_err(failed)?, words))
        }
        Err(error) => Err(BuildError::Io("cannot hear the converter of images".into(), error)),
    }
}

/// Hands layers on as they come. The thread ends when there are no more, or nobody takes them.
fn feed(socket: OwnedFd, layers: Receiver<Layer>) -> io::Result<()> {
    thread::Builder::new().name("feed converter".into()).spawn(move || {
        for layer in layers {
            let next = Next { digest: layer.digest, diff_id: layer.diff_id };
            if wire::send(&socket, &next, Some(layer.file.as_fd())).is_err() {
                // The other side has ended, and its end is told elsewhere.
                return;
            }
        }
        let _ = shutdown(&socket, Shutdown::Write);
    })?;
    Ok(())
}

fn broke(status: ExitStatus, mut words: File) -> BuildError {
    let mut last = Vec::new();
    let _ = words.rewind().and_then(|()| words.take(MAX_WORDS).read_to_end(&mut last));
    let text: String =
        String::from_utf8_lossy(&last).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let text = text.trim();
    let colon = if text.is_empty() { "" } else { ": " };
    BuildError::Broke(format!("the process that lays it out ended with {status}{colon}{text}"))
}
