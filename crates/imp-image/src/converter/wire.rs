//! Messages between store and converter: JSON, each with at most one file.

use crate::digest::Digest;
use crate::error::InvalidImage;
use crate::layer::BuildError;
use crate::limits::Limits;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Longest message in bytes. An outcome may quote an entry's path.
const MAX_MESSAGE: usize = 64 << 10;

/// First of all; the file is the disk.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) limits: Limits,
    /// Layers to come.
    pub(super) count: usize,
    /// Whom to become, if root.
    pub(super) user: u32,
}

/// A layer; it is the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Next {
    pub(super) digest: Digest,
    pub(super) diff_id: Digest,
}

/// How it ended.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Outcome {
    Made(u64),
    Invalid(InvalidImage),
    /// What was being done, and the error's number; without one its text.
    Io(String, Option<i32>, String),
    Cancelled,
}

impl From<Result<u64, BuildError>> for Outcome {
    fn from(result: Result<u64, BuildError>) -> Self {
        match result {
            Ok(size) => Self::Made(size),
            Err(BuildError::Invalid(invalid)) => Self::Invalid(invalid),
            Err(BuildError::Io(doing, error)) => Self::Io(doing, error.raw_os_error(), error.to_string()),
            Err(BuildError::Cancelled | BuildError::Broke(_)) => Self::Cancelled,
        }
    }
}

impl From<Outcome> for Result<u64, BuildError> {
    fn from(outcome: Outcome) -> Self {
        Err(match outcome {
            Outcome::Made(size) => return Ok(size),
            Outcome::Invalid(invalid) => BuildError::Invalid(invalid),
            Outcome::Io(doing, Some(number), _) => {
                BuildError::Io(doing, io::Error::from_raw_os_error(number))
            }
            Outcome::Io(doing, None, text) => BuildError::Io(doing, io::Error::other(text)),
            Outcome::Cancelled => BuildError::Cancelled,
        })
    }
}

/// Sends a message, with a file if there is one.
pub(super) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message that is too long"));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for a message; none at the end.
pub(super) fn receive<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(M, Option<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        match recvmsg(&socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result?,
        }
    };
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Ok(Some((serde_json::from_slice(&bytes[..received.bytes])?, file)))
}
