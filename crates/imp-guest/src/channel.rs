//! The byte channel to the host: a virtio-serial port, opened, watched and opened again as the host comes and goes.
//!
//! Traits of the device (Linux, `drivers/char/virtio_console.c`): the port can be open once; while no host is
//! connected poll(2) reports `POLLHUP` and read(2) returns 0 at once; every change wakes the pollers. tokio takes a
//! hang-up as final, so the port is watched through edge-triggered epoll instances of its own, of which tokio only sees
//! that they became readable.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use anyhow::{Context as _, Result, bail};
use bytes::{Buf as _, BytesMut};
use futures::Stream;
use imp_proto::channel;
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::fs::{Mode, OFlags};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tonic::transport::server::Connected;

use crate::sys;

/// Name of the port, as the host's VMM gives it.
const PORT_NAME: &str = "imp.guest.0";

/// Device file of the port.
fn find_port() -> Result<PathBuf> {
    let dir = "/sys/class/virtio-ports";
    let ports = std::fs::read_dir(dir)
        .with_context(|| format!("read {dir}: is the module virtio_console loaded?"))?;
    let mut seen = Vec::new();
    for port in ports.flatten() {
        let name = std::fs::read_to_string(port.path().join("name")).unwrap_or_default();
        if name.trim_end() == PORT_NAME {
            return Ok(PathBuf::from("/dev").join(port.file_name()));
        }
        seen.push(name.trim_end().to_owned());
    }
    bail!("no virtio port is named {PORT_NAME}; there are {seen:?}");
}

/// One epoll instance that watches the port for one direction.
struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    fn new(port: &File, interest: epoll::EventFlags) -> io::Result<Self> {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&instance, port, epoll::EventData::new_u64(0), interest | epoll::EventFlags::ET)?;
        Ok(Self(sys::watch_fd(instance)?))
    }

    /// Waits for the next change of the port; one that came since the last wait counts.
    fn poll_change(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut guard = ready!(self.0.poll_read_ready(cx))?;
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        // Consuming the event is what makes the next one visible.
        epoll::wait(self.0.get_ref(), &mut events[..], Some(&rustix::time::Timespec::default()))?;
        guard.clear_ready();
        Poll::Ready(Ok(()))
    }
}

/// The open port.
struct Port {
    file: File,
    reads: Watch,
    writes: Watch,
}

impl Port {
    fn open() -> Result<Self> {
        let path = find_port()?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(
            rustix::fs::open(&path, flags, Mode::empty())
                .with_context(|| format!("open {}", path.display()))?,
        );
        let reads = Watch::new(&file, epoll::EventFlags::IN).context("watch the port")?;
        let writes = Watch::new(&file, epoll::EventFlags::OUT).context("watch the port")?;
        Ok(Self { file, reads, writes })
    }

    /// Waits until a host is connected.
    async fn connected(&self) -> io::Result<()> {
        loop {
            let mut fds = [PollFd::new(&self.file, PollFlags::OUT)];
            poll(&mut fds, Some(&rustix::time::Timespec::default()))?;
            if !fds[0].revents().contains(PollFlags::HUP) {
                return Ok(());
            }
            std::future::poll_fn(|cx| self.reads.poll_change(cx)).await?;
        }
    }
}

/// One connection of a host, from its hello to its end. Dropped, it hands the port back.
pub(crate) struct Connection {
    port: Option<Port>,
    /// Bytes read from the port and not yet taken.
    unread: BytesMut,
    /// The host came back before we noticed that it had gone: what follows belongs to the next connection.
    superseded: bool,
    /// The hello that was answered.
    greeted: Option<[u8; channel::HELLO_LEN]>,
    /// Nothing but hellos has come yet.
    fresh: bool,
    back: Option<oneshot::Sender<(Port, BytesMut)>>,
}

impl Connection {
    fn port(&self) -> io::Result<&Port> {
        self.port.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Takes away what the host repeated of its hello before it had our answer. True: more must be read to know what comes.
    fn repeated(&mut self) -> bool {
        let Some(hello) = self.greeted.filter(|_| self.fresh) else { return false };
        while self.unread.starts_with(&hello) {
            self.unread.advance(hello.len());
        }
        hello.starts_with(&self.unread)
    }

    /// Fills `unread`; 0 at the end of the connection.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let port = self.port.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let mut buffer = [0u8; 32 << 10];
        loop {
            match (&port.file).read(&mut buffer) {
                Ok(n) => {
                    self.unread.extend_from_slice(&buffer[..n]);
                    return Poll::Ready(Ok(n));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready!(port.reads.poll_change(cx))?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let (Some(back), Some(port)) = (self.back.take(), self.port.take()) {
            let unread = if self.superseded { std::mem::take(&mut self.unread) } else { BytesMut::new() };
            // Nobody waits for the port when the server is being torn down; then it closes here.
            let _ = back.send((port, unread));
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.superseded {
            return Poll::Ready(Ok(()));
        }
        let mut filled = false;
        while self.unread.is_empty() || self.repeated() {
            if ready!(self.poll_fill(cx))? == 0 {
                return Poll::Ready(Ok(()));
            }
            filled = true;
        }
        // No HTTP/2 frame begins with these bytes (its length would be 4.8 MB), and the host writes a hello whole.
        if (filled || self.fresh) && self.greeted.is_some() && self.unread.starts_with(channel::MAGIC) {
            self.superseded = true;
            return Poll::Ready(Ok(()));
        }
        if self.greeted.is_some() {
            self.fresh = false;
        }
        let n = out.remaining().min(self.unread.len());
        out.put_slice(&self.unread[..n]);
        self.unread.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        if self.superseded {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let port = self.port()?;
        loop {
            match (&port.file).write(data) {
                Ok(n) => return Poll::Ready(Ok(n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready!(port.writes.poll_change(cx))?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

/// Where the next connection starts.
enum Next {
    /// Open the port afresh: whatever was queued is discarded by the kernel.
    Open,
    /// The previous connection was superseded in mid-stream; its last bytes begin the new one.
    Continue(Port, BytesMut),
    /// The previous connection is still in use.
    Busy(oneshot::Receiver<(Port, BytesMut)>),
}

/// Every connection of a host, one after another, each after a hello of its own. Never ends.
pub(crate) fn connections() -> impl Stream<Item = io::Result<Connection>> {
    futures::stream::unfold(Next::Open, |mut next| async move {
        loop {
            next = match next {
                Next::Busy(back) => match back.await {
                    Ok((port, unread)) if !unread.is_empty() => Next::Continue(port, unread),
                    _ => Next::Open,
                },
                Next::Open => match Port::open() {
                    Ok(port) => Next::Continue(port, BytesMut::new()),
                    // Without its channel the guest is of no use; the console log is all that can tell why.
                    Err(e) => return Some((Err(io::Error::other(format!("{e:#}"))), Next::Open)),
                },
                Next::Continue(port, unread) => match greet(port, unread).await {
                    Ok((connection, back)) => return Some((Ok(connection), Next::Busy(back))),
                    // The host went away before its hello was whole; wait for the next one.
                    Err(_) => Next::Open,
                },
            };
        }
    })
}

async fn greet(port: Port, unread: BytesMut) -> Result<(Connection, oneshot::Receiver<(Port, BytesMut)>)> {
    port.connected().await?;
    let mut connection =
        Connection { port: Some(port), unread, superseded: false, greeted: None, fresh: true, back: None };
    let nonce = channel::server_hello(&mut connection).await?;
    let (sender, receiver) = oneshot::channel();
    connection.back = Some(sender);
    connection.greeted = Some(channel::hello(nonce));
    Ok((connection, receiver))
}
