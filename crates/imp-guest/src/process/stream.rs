//! Our ends of pipes and terminals, without blocking.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use imp_proto::v1::TerminalSize;
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use super::launch::{Ends, set_size};
use crate::sys;

/// How much is read at once.
const CHUNK: usize = 32 << 10;

/// One end of a pipe or terminal. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Stream(Arc<AsyncFd<OwnedFd>>);

impl Stream {
    fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(Arc::new(sys::watch_fd(fd)?)))
    }

    /// The next bytes; `None` at the end.
    pub(crate) async fn read(&self) -> io::Result<Option<Bytes>> {
        loop {
            let mut guard = self.0.readable().await?;
            match self.read_now()? {
                Some(data) if data.is_empty() => return Ok(None),
                Some(data) => return Ok(Some(data)),
                None => guard.clear_ready(),
            }
        }
    }

    /// What is there now: empty at the end, `None` when there is nothing yet.
    pub(crate) fn read_now(&self) -> io::Result<Option<Bytes>> {
        let mut buffer = vec![0; CHUNK];
        loop {
            match rustix::io::read(self.0.get_ref(), &mut buffer) {
                Ok(n) => {
                    buffer.truncate(n);
                    return Ok(Some(buffer.into()));
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                // A terminal whose other side is closed.
                Err(Errno::IO) => return Ok(Some(Bytes::new())),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Writes all of `data`; waits while the other side is full.
    pub(crate) async fn write(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut guard = self.0.writable().await?;
            match rustix::io::write(self.0.get_ref(), data) {
                Ok(n) => data = &data[n..],
                Err(Errno::AGAIN) => guard.clear_ready(),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Sets the size of a terminal.
    pub(crate) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        set_size(self.0.get_ref(), size)
    }
}

/// The streams of a process.
#[derive(Debug)]
pub(crate) struct ProcessStreams {
    pub(crate) stdin: Option<Stream>,
    pub(crate) stdout: Stream,
    /// A terminal has one stream for both.
    pub(crate) stderr: Option<Stream>,
    pub(crate) terminal: bool,
}

impl ProcessStreams {
    /// Takes our ends into the runtime.
    ///
    /// # Errors
    /// When a descriptor can't be watched.
    pub(crate) fn new(ends: Ends) -> io::Result<Self> {
        match ends {
            Ends::Terminal(master) => {
                let stream = Stream::new(master)?;
                Ok(Self { stdin: Some(stream.clone()), stdout: stream, stderr: None, terminal: true })
            }
            Ends::Pipes { stdin, stdout, stderr } => Ok(Self {
                stdin: stdin.map(Stream::new).transpose()?,
                stdout: Stream::new(stdout)?,
                stderr: Some(Stream::new(stderr)?),
                terminal: false,
            }),
        }
    }
}
