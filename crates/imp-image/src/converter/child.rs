//! The converter's side.

use super::sandbox;
use super::wire::{self, Hello, Next, Outcome};
use crate::cancel::Cancel;
use crate::layer::{self, Layer};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// First argument of a program that is started as a converter.
pub(super) const ARGUMENT: &str = "convert-image";

/// Does a converter's work if this process was started as one; else none. A program that opens a store with [`super::Converter::Process`] begins
/// its `main` with it.
#[must_use]
pub fn run_if_asked() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != ARGUMENT {
        return None;
    }
    Some(match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    })
}

/// The layers of the socket, once the gate is open.
struct Incoming {
    socket: BorrowedFd<'static>,
    closed_in: Receiver<()>,
    open: bool,
}

impl Iterator for Incoming {
    type Item = Layer;

    fn next(&mut self) -> Option<Layer> {
        // Nothing of a stranger is looked at before the process is closed in.
        if !self.open {
            self.closed_in.recv().ok()?;
            self.open = true;
        }
        let (Next { digest, diff_id }, file) = wire::receive(self.socket).ok()??;
        Some(Layer { file: File::from(file?), digest, diff_id })
    }
}

fn run() -> io::Result<()> {
    sandbox::die_with_parent()?;
    let socket = rustix::stdio::stdin();
    let (hello, disk) = wire::receive::<Hello>(socket)?
        .ok_or_else(|| io::Error::other("this is for imp's image store to start, not for people"))?;
    let disk = File::from(disk.ok_or_else(|| io::Error::other("there came no disk"))?);
    sandbox::limit_resources(&hello.limits)?;
    sandbox::drop_privileges(hello.user)?;
    let (open, closed_in) = channel();
    let incoming = Incoming { socket, closed_in, open: false };
    let limits = hello.limits;
    let prepared = layer::prepare(incoming, &limits, &Arc::<Cancel>::default())
        .map_err(|error| io::Error::other(format!("{error:?}")))?;
    // The decompressing thread is there by now, and gets the filter too.
    sandbox::close_in()?;
    open.send(()).map_err(io::Error::other)?;
    let outcome: Outcome = prepared.build(hello.count, &disk, &limits).into();
    wire::send(socket.as_fd(), &outcome, None)
}
