//! Telling work on other threads, and in another process, that nobody wants its result.

use rustix::net::{Shutdown, shutdown};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Asked for once, for good.
#[derive(Debug, Default)]
pub(crate) struct Cancel {
    asked: AtomicBool,
    /// A socket on which somebody waits for what will not come any more.
    waiting: Mutex<Option<OwnedFd>>,
}

impl Cancel {
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
        if let Some(socket) = self.waiting().take() {
            // It fails only where the other side is gone, which wakes as well.
            let _ = shutdown(&socket, Shutdown::Both);
        }
    }

    /// `socket` is shut down when the work is cancelled, or now if it was.
    pub(crate) fn wake(&self, socket: OwnedFd) {
        *self.waiting() = Some(socket);
        if self.is_asked() {
            self.ask();
        }
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Option<OwnedFd>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cancels when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct CancelOnDrop(pub(crate) Arc<Cancel>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.ask();
    }
}
