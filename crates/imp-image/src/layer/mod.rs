//! Layers become one disk: each is decompressed, checked, merged into the tree, and its files' data streamed to the disk.
//!
//! Layers are taken from the lowest up, each read once, as they come: while one is laid out, what follows it is decompressed on another thread
//! (`feed`) and those above are still fetched. Data that an upper layer replaces is given back to the host's file
//! system, so the disk takes no more room than what is visible. In memory are the tree and one window of data.

mod decompress;
mod feed;
pub(crate) mod tar;
pub(crate) mod tree;

use crate::cancel::Cancel;
use crate::digest::Digest;
use crate::erofs::{self, DataWriter};
use crate::error::InvalidImage;
use crate::limits::Limits;
use decompress::StreamError;
use feed::{Begun, Feed, LayerStream};
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use tar::{Entry, EntryKind, Fragment, Skip, TarError, TarReader};
use tree::{Extent, Refusal, Tree};

/// A layer to be laid out.
#[derive(Debug)]
pub(crate) struct Layer {
    /// The layer as it was sent, verified.
    pub(crate) file: File,
    /// Digest of that.
    pub(crate) digest: Digest,
    /// Digest of the tar stream in it, as the configuration says.
    pub(crate) diff_id: Digest,
}

/// Why no disk was made.
#[derive(Debug)]
pub(crate) enum BuildError {
    Invalid(InvalidImage),
    Io(String, io::Error),
    Cancelled,
    /// The process that was to do it ended without an answer.
    Broke(String),
}

/// Lays `count` layers, lowest first, out in `disk`, an empty file. Returns its size in bytes. Layers are taken as they come; if fewer come, the
/// work was cancelled.
///
/// The result depends on the layers alone. `cancel` is looked at often.
pub(crate) fn build(
    layers: impl Iterator<Item = Layer> + Send + 'static,
    count: usize,
    disk: &File,
    limits: &Limits,
    cancel: &Arc<Cancel>,
) -> Result<u64, BuildError> {
    prepare(layers, limits, cancel)?.build(count, disk, limits)
}

/// Starts what [`build`] needs before it looks at anything: a thread.
pub(crate) fn prepare(
    layers: impl Iterator<Item = Layer> + Send + 'static,
    limits: &Limits,
    cancel: &Arc<Cancel>,
) -> Result<Prepared, BuildError> {
    let feed = Feed::start(layers, limits, cancel)
        .map_err(|error| BuildError::Io("cannot start a thread to decompress layers".into(), error))?;
    Ok(Prepared { feed, cancel: Arc::clone(cancel) })
}

/// See [`prepare`].
pub(crate) struct Prepared {
    feed: Feed,
    cancel: Arc<Cancel>,
}

impl Prepared {
    /// See [`build`].
    pub(crate) fn build(self, count: usize, disk: &File, limits: &Limits) -> Result<u64, BuildError> {
        let Self { mut feed, cancel } = self;
        lay_out(&mut feed, count, disk, limits, &cancel)
    }
}

fn lay_out(
    feed: &mut Feed,
    count: usize,
    disk: &File,
    limits: &Limits,
    cancel: &Cancel,
) -> Result<u64, BuildError> {
    let mut tree = Tree::new();
    let mut writer = DataWriter::new(disk, limits.disk_bytes);
    let mut diff_ids = Vec::with_capacity(count);
    for index in 1..=count {
        // Before it has begun, a layer has no name.
        let begun =
            feed.next_layer().map_err(|error| stream_error(&format!("layer {index} of {count}"), &error))?;
        let Some((Begun { digest, diff_id }, stream)) = begun else { return Err(BuildError::Cancelled) };
        let label = format!("layer {index} of {count} ({digest})");
        diff_ids.push(diff_id);
        Merge { label: &label, limits, tree: &mut tree, writer: &mut writer }.layer(stream, diff_id)?;
        tree.next_layer();
    }
    if cancel.is_asked() {
        return Err(BuildError::Cancelled);
    }
    erofs::finish(&mut writer, &tree, uuid(&diff_ids))
        .map_err(|error| BuildError::Io("cannot write the root disk".into(), error))
}

/// The disk's UUID, from what is in it (RFC 9562, version 8).
fn uuid(diff_ids: &[Digest]) -> [u8; 16] {
    let text: String = diff_ids.iter().map(|diff_id| format!("{diff_id}\n")).collect();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&Digest::of(text.as_bytes()).bytes()[..16]);
    uuid[6] = (uuid[6] & 0x0f) | 0x80;
    uuid[8] = (uuid[8] & 0x3f) | 0x80;
    uuid
}

/// One layer's way into the tree.
struct Merge<'a, 'f> {
    label: &'a str,
    limits: &'a Limits,
    tree: &'a mut Tree,
    writer: &'a mut DataWriter<'f>,
}

impl Merge<'_, '_> {
    fn layer(&mut self, stream: LayerStream<'_>, diff_id: Digest) -> Result<(), BuildError> {
        let mut tar = TarReader::new(stream, self.limits);
        loop {
            match tar.next_entry() {
                Ok(Some(entry)) => self.entry(&mut tar, entry)?,
                Ok(None) => break,
                Err(TarError::Io(error)) => return Err(self.stream_error(&error)),
                Err(TarError::Malformed(path, problem)) if path.is_empty() => {
                    return Err(BuildError::Invalid(InvalidImage::Layer {
                        layer: self.label.into(),
                        problem,
                    }));
                }
                Err(TarError::Malformed(path, problem)) => return Err(self.refuse(&path, problem)),
            }
        }
        tar.drain().map_err(|error| self.stream_error(&error))?;
        let Some(actual) = tar.into_inner().digest() else { return Err(BuildError::Cancelled) };
        if actual != diff_id {
            return Err(BuildError::Invalid(InvalidImage::Mismatch {
                what: format!("the uncompressed digest of {}", self.label),
                expected: diff_id.to_string(),
                actual: actual.to_string(),
            }));
        }
        Ok(())
    }

    fn entry<R: Skip>(&mut self, tar: &mut TarReader<'_, R>, entry: Entry) -> Result<(), BuildError> {
        let data = if entry.kind == EntryKind::File && !is_whiteout(&entry.path) {
            self.copy_data(tar, &entry)?
        } else {
            Extent::default()
        };
        let path = entry.path.clone();
        self.tree.apply(entry, data, self.limits).map_err(|refusal| match refusal {
            Refusal::Bad(problem) => self.refuse(&path, problem),
            Refusal::Limit(limit, what) => self.limit(&path, limit, what),
        })?;
        for extent in std::mem::take(&mut self.tree.freed) {
            self.writer.release(extent).map_err(disk_error)?;
        }
        Ok(())
    }

    fn copy_data<R: Skip>(
        &mut self,
        tar: &mut TarReader<'_, R>,
        entry: &Entry,
    ) -> Result<Extent, BuildError> {
        let extent = self
            .writer
            .reserve(entry.size)
            .ok_or_else(|| self.limit(&entry.path, self.limits.disk_bytes, "bytes of disk"))?;
        let whole = [Fragment { offset: 0, len: entry.size }];
        for fragment in entry.sparse.as_deref().unwrap_or(&whole) {
            let mut source = Tagged { inner: &mut *tar, failed: false };
            if let Err(error) = self.writer.copy(&mut source, extent, fragment.offset, fragment.len) {
                return Err(if source.failed { self.stream_error(&error) } else { disk_error(error) });
            }
        }
        Ok(extent)
    }

    fn stream_error(&self, error: &io::Error) -> BuildError {
        stream_error(self.label, error)
    }

    fn refuse(&self, path: &[u8], problem: String) -> BuildError {
        let entry = String::from_utf8_lossy(path).into_owned();
        BuildError::Invalid(InvalidImage::Entry { layer: self.label.into(), entry, problem })
    }

    fn limit(&self, path: &[u8], limit: u64, what: &'static str) -> BuildError {
        let shown: String = String::from_utf8_lossy(path).chars().take(200).collect();
        BuildError::Invalid(InvalidImage::Limit {
            at: format!("{}: entry \"{shown}\"", self.label),
            limit,
            what: what.into(),
        })
    }
}

fn stream_error(layer: &str, error: &io::Error) -> BuildError {
    let layer = layer.to_owned();
    match error.get_ref().and_then(|inner| inner.downcast_ref::<StreamError>()) {
        Some(StreamError::Cancelled) => BuildError::Cancelled,
        Some(StreamError::Limit(limit, what)) => {
            BuildError::Invalid(InvalidImage::Limit { at: layer, limit: *limit, what: (*what).into() })
        }
        Some(StreamError::File(raw)) => {
            BuildError::Io(format!("cannot read {layer} from the store"), io::Error::from_raw_os_error(*raw))
        }
        None if error.kind() == io::ErrorKind::UnexpectedEof => BuildError::Invalid(InvalidImage::Layer {
            layer,
            problem: "it ends in the middle of an entry".into(),
        }),
        None => BuildError::Invalid(InvalidImage::Layer {
            layer,
            problem: format!("cannot be decompressed: {error}"),
        }),
    }
}

fn disk_error(error: io::Error) -> BuildError {
    BuildError::Io("cannot write the root disk".into(), error)
}

fn is_whiteout(path: &[u8]) -> bool {
    let base = path.rsplit(|&b| b == b'/').find(|c| !c.is_empty()).unwrap_or_default();
    base.starts_with(b".wh.")
}

/// Remembers that reading failed, so that it is not taken for a failure to write.
struct Tagged<'r, R> {
    inner: &'r mut R,
    failed: bool,
}

impl<R: Read> Read for Tagged<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let result = self.inner.read(buffer);
        // The end in the middle of an entry is an error of the stream too.
        self.failed |= !matches!(result, Ok(count) if count > 0);
        result
    }
}
