//! A layer's tar stream: decompressed, hashed, bounded, and cut short when nobody wants it any more.

use crate::cancel::Cancel;
use crate::digest::{Digest, Hasher};
use crate::limits::Limits;
use flate2::bufread::MultiGzDecoder;
use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

const INPUT_BUFFER: usize = 256 << 10;
/// Largest window that a zstd frame may ask for, as a power of two: what `zstd --ultra -22` uses.
const ZSTD_WINDOW_LOG: u32 = 27;

/// What travels inside an [`io::Error`] out of [`Checked`].
#[derive(Debug)]
pub(super) enum StreamError {
    Cancelled,
    Limit(u64, &'static str),
    /// The file under it could not be read: the error's number.
    File(i32),
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled => f.write_str("cancelled"),
            Self::Limit(limit, what) => write!(f, "more than {limit} {what}"),
            Self::File(number) => write!(f, "cannot be read: {}", io::Error::from_raw_os_error(*number)),
        }
    }
}

impl std::error::Error for StreamError {}

/// Counts what is taken from the file and tells its errors from the decompressor's.
struct Source {
    file: File,
    taken: Rc<Cell<u64>>,
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer).map_err(|error| match error.raw_os_error() {
            Some(number) if error.kind() != io::ErrorKind::Interrupted => {
                io::Error::other(StreamError::File(number))
            }
            _ => error,
        })?;
        self.taken.set(self.taken.get() + count as u64);
        Ok(count)
    }
}

/// The tar stream of a layer.
pub(super) struct Checked<'a> {
    inner: Box<dyn Read>,
    hasher: Hasher,
    limits: &'a Limits,
    cancel: &'a Cancel,
    taken: Rc<Cell<u64>>,
    given: u64,
}

impl<'a> Checked<'a> {
    /// The compression is told by its first bytes, not by the media type: Docker's types do not tell, and builders get it wrong.
    pub(super) fn new(file: File, limits: &'a Limits, cancel: &'a Cancel) -> io::Result<Self> {
        let taken = Rc::new(Cell::new(0));
        let mut input = BufReader::with_capacity(INPUT_BUFFER, Source { file, taken: Rc::clone(&taken) });
        let start = input.fill_buf()?;
        let inner: Box<dyn Read> = if start.starts_with(&[0x1f, 0x8b]) {
            Box::new(MultiGzDecoder::new(input))
        } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) || is_skippable_frame(start) {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Box::new(decoder)
        } else {
            Box::new(input)
        };
        Ok(Self { inner, hasher: Hasher::new(), limits, cancel, taken, given: 0 })
    }

    /// Digest of everything that was read.
    pub(super) fn digest(self) -> Digest {
        self.hasher.finish()
    }
}

/// zstd:chunked and others begin with a frame that decoders skip (RFC 8878, 3.1.2).
fn is_skippable_frame(start: &[u8]) -> bool {
    matches!(start, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

impl Read for Checked<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_asked() {
            return Err(io::Error::other(StreamError::Cancelled));
        }
        let count = self.inner.read(buffer)?;
        self.given += count as u64;
        let over = |limit, what| Err(io::Error::other(StreamError::Limit(limit, what)));
        if self.given > self.limits.layer_bytes {
            return over(self.limits.layer_bytes, "bytes uncompressed");
        }
        let ratio = self.limits.compression_ratio;
        if self.given > self.limits.ratio_free_bytes && self.given / ratio > self.taken.get() {
            return over(ratio, "bytes for each compressed byte");
        }
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}

impl fmt::Debug for Checked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").field("given", &self.given).finish_non_exhaustive()
    }
}
