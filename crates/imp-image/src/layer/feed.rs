//! Tar streams of layers, decompressed on a thread of their own while what came before is laid out.

use super::Layer;
use super::decompress::{Checked, StreamError};
use super::tar::Skip;
use crate::cancel::Cancel;
use crate::digest::Digest;
use crate::limits::Limits;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

/// Bytes that go from one thread to the other at once.
const CHUNK: usize = 256 << 10;
/// Chunks that are decompressed ahead: this, and not a layer's size, is what memory holds.
const AHEAD: usize = 16;

/// From the thread that decompresses.
enum Message {
    Begin(Digest, Digest),
    Data(Vec<u8>),
    /// The digest of the whole stream.
    End(Digest),
    Failed(io::Error),
}

/// Layers as they come, lowest first.
pub(super) struct Feed {
    messages: Receiver<Message>,
    /// Buffers to be filled again.
    spare: Sender<Vec<u8>>,
}

/// What is known of a layer before it is read.
pub(super) struct Begun {
    pub(super) digest: Digest,
    pub(super) diff_id: Digest,
}

impl Feed {
    /// Begins to read `layers`. The thread ends when they do, when one fails, or when this is dropped and the next layer comes.
    pub(super) fn start(
        layers: impl Iterator<Item = Layer> + Send + 'static,
        limits: &Limits,
        cancel: &Arc<Cancel>,
    ) -> io::Result<Self> {
        let (to, messages) = sync_channel(AHEAD);
        let (spare, spares) = channel();
        let (limits, cancel) = (limits.clone(), Arc::clone(cancel));
        thread::Builder::new().name("decompress".into()).spawn(move || {
            for layer in layers {
                match decompress(layer, &limits, &cancel, &to, &spares) {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => {
                        // Whoever does not listen any more does not want to know.
                        let _ = to.send(Message::Failed(error));
                        return;
                    }
                }
            }
        })?;
        Ok(Self { messages, spare })
    }

    /// The next layer; none if there is no further one.
    pub(super) fn next_layer(&mut self) -> io::Result<Option<(Begun, LayerStream<'_>)>> {
        match self.messages.recv() {
            Ok(Message::Begin(digest, diff_id)) => {
                let stream = LayerStream { feed: self, chunk: Vec::new(), at: 0, end: None };
                Ok(Some((Begun { digest, diff_id }, stream)))
            }
            Ok(Message::Failed(error)) => Err(error),
            Ok(Message::Data(_) | Message::End(_)) => {
                Err(io::Error::other("a layer was not read to its end"))
            }
            Err(_) => Ok(None),
        }
    }
}

/// Decompresses one layer; false if nobody listens.
fn decompress(
    layer: Layer,
    limits: &Limits,
    cancel: &Cancel,
    to: &SyncSender<Message>,
    spares: &Receiver<Vec<u8>>,
) -> io::Result<bool> {
    if to.send(Message::Begin(layer.digest, layer.diff_id)).is_err() {
        return Ok(false);
    }
    let mut stream = Checked::new(layer.file, limits, cancel)?;
    loop {
        let mut buffer = spares.try_recv().unwrap_or_default();
        buffer.resize(CHUNK, 0);
        let mut filled = 0;
        while filled < CHUNK {
            match stream.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if filled == 0 {
            return Ok(to.send(Message::End(stream.digest())).is_ok());
        }
        buffer.truncate(filled);
        if to.send(Message::Data(buffer)).is_err() {
            return Ok(false);
        }
    }
}

/// One layer's tar stream.
pub(super) struct LayerStream<'f> {
    feed: &'f mut Feed,
    chunk: Vec<u8>,
    at: usize,
    end: Option<Digest>,
}

impl LayerStream<'_> {
    /// Digest of the whole stream, once it was read to its end.
    pub(super) const fn digest(&self) -> Option<Digest> {
        self.end
    }

    /// Bytes that can be had without waiting for more; none at the end.
    fn ready(&mut self) -> io::Result<&[u8]> {
        while self.at == self.chunk.len() && self.end.is_none() {
            match self.feed.messages.recv() {
                Ok(Message::Data(chunk)) => {
                    // Nobody to fill it again: then it is freed.
                    let _ = self.feed.spare.send(std::mem::replace(&mut self.chunk, chunk));
                    self.at = 0;
                }
                Ok(Message::End(digest)) => self.end = Some(digest),
                Ok(Message::Failed(error)) => return Err(error),
                Ok(Message::Begin(..)) => return Err(io::Error::other("a layer began within another")),
                Err(_) => return Err(io::Error::other(StreamError::Cancelled)),
            }
        }
        Ok(&self.chunk[self.at..])
    }
}

impl Read for LayerStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut ready = self.ready()?;
        let count = ready.read(buffer)?;
        self.at += count;
        Ok(count)
    }
}

impl Skip for LayerStream<'_> {
    fn skip(&mut self, count: u64) -> io::Result<u64> {
        let mut left = count;
        while left > 0 {
            let ready = self.ready()?.len();
            if ready == 0 {
                break;
            }
            let passed = ready.min(usize::try_from(left).unwrap_or(usize::MAX));
            self.at += passed;
            left -= passed as u64;
        }
        Ok(count - left)
    }
}
