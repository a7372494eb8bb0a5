//! Blobs come into the store: fetched once, resumed after a cut, verified byte by byte.

use super::Inner;
use crate::digest::Hasher;
use crate::error::{ImageError, InvalidImage};
use crate::manifest::Blob;
use crate::registry::{FetchError, Repository};
use crate::store::Progress;
use bytes::Bytes;
use futures::StreamExt;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;
use tempfile::NamedTempFile;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Tries that bring nothing, one after another, at the last of those who may have a blob.
const MAX_BARREN_TRIES: u32 = 5;
/// Tries in all, for a registry that sends a little each time.
const MAX_TRIES: u32 = 100;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// Chunks between the network and the file.
const QUEUE: usize = 16;

/// Adds to the pull's figures.
pub(super) fn advance(progress: &watch::Sender<Progress>, bytes: u64) {
    progress.send_modify(|progress| progress.pulled_bytes += bytes);
}

/// Takes back what a download that came to nothing added.
fn retract(progress: &watch::Sender<Progress>, bytes: u64) {
    progress.send_modify(|progress| progress.pulled_bytes = progress.pulled_bytes.saturating_sub(bytes));
}

/// Takes bytes on a thread of its own, where hashing and writing block nobody.
struct Sink {
    chunks: mpsc::Sender<Bytes>,
    task: JoinHandle<io::Result<(NamedTempFile, Hasher)>>,
}

impl Sink {
    fn new(mut file: NamedTempFile) -> Self {
        let (chunks, mut incoming) = mpsc::channel::<Bytes>(QUEUE);
        let task = tokio::task::spawn_blocking(move || {
            let mut hasher = Hasher::new();
            while let Some(chunk) = incoming.blocking_recv() {
                hasher.update(&chunk);
                file.write_all(&chunk)?;
            }
            // When nobody waits for this any more, the file is dropped and with that removed.
            Ok((file, hasher))
        });
        Self { chunks, task }
    }

    /// False when writing failed; [`Sink::finish`] tells why.
    async fn push(&self, chunk: Bytes) -> bool {
        self.chunks.send(chunk).await.is_ok()
    }

    async fn finish(self) -> io::Result<(NamedTempFile, Hasher)> {
        drop(self.chunks);
        self.task.await.map_err(io::Error::other)?
    }
}

impl Inner {
    /// Fetches a blob unless it is there.
    pub(super) async fn fetch_blob(
        self: Arc<Self>,
        image: String,
        what: String,
        places: &[Repository],
        blob: Blob,
        progress: watch::Sender<Progress>,
    ) -> Result<(), ImageError> {
        let mut earlier = Vec::new();
        for (index, repository) in places.iter().enumerate() {
            let last = index + 1 == places.len();
            let tries = if last { MAX_BARREN_TRIES } else { 1 };
            let download = Download { image: &image, what: &what, repository, blob: &blob, tries };
            match Arc::clone(&self).fetch_from(download, &progress).await {
                Ok(()) => return Ok(()),
                // Our own disk: nobody else makes it larger.
                Err(error @ ImageError::Io { .. }) => return Err(error),
                Err(error) if last => return Err(error.after(&earlier)),
                Err(error) => {
                    tracing::info!(
                        image,
                        error = &error as &dyn std::error::Error,
                        "a mirror failed; asking the next"
                    );
                    earlier.push(error.to_string());
                }
            }
        }
        Err(ImageError::NotFound { image, detail: "there is nobody to ask".to_owned() })
    }

    async fn fetch_from(
        self: Arc<Self>,
        download: Download<'_>,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), ImageError> {
        let Download { image, what, blob, .. } = download;
        let path = self.files.blob(&blob.digest);
        let sink = Sink::new(self.files.temporary()?);
        let complete = download.run(&sink, progress).await;
        // A full disk ends the download too, and is the better reason.
        let stored =
            sink.finish().await.map_err(ImageError::io(format!("cannot store {what} of {image} in {path}")));
        let (file, hasher) = stored?;
        complete?;
        let actual = hasher.finish();
        if actual != blob.digest {
            let what = format!("the digest of {what}");
            let source = InvalidImage::Mismatch {
                what,
                expected: blob.digest.to_string(),
                actual: actual.to_string(),
            };
            return Err(ImageError::invalid(image, source));
        }
        let inner = Arc::clone(&self);
        let keep = tokio::task::spawn_blocking(move || inner.files.keep(file, &path));
        keep.await.map_err(|error| ImageError::io("storing a blob broke off")(io::Error::other(error)))?
    }

    /// Copies a blob from a file. Blocking.
    pub(super) fn import_blob(
        &self,
        image: &str,
        what: &str,
        mut from: impl Read,
        blob: &Blob,
    ) -> Result<(), ImageError> {
        let path = self.files.blob(&blob.digest);
        let doing = || format!("cannot store {what} of {image} in {path}");
        let mut file = self.files.temporary()?;
        let mut hasher = Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        let mut size = 0;
        loop {
            let count =
                from.read(&mut buffer).map_err(ImageError::io(format!("cannot read {what} of {image}")))?;
            if count == 0 {
                break;
            }
            size += count as u64;
            if size > blob.size {
                break;
            }
            hasher.update(&buffer[..count]);
            file.write_all(&buffer[..count]).map_err(ImageError::io(doing()))?;
        }
        let actual = hasher.finish();
        if size != blob.size || actual != blob.digest {
            let source = InvalidImage::Mismatch {
                what: format!("size or digest of {what}"),
                expected: format!("{} bytes, {}", blob.size, blob.digest),
                actual: format!("{size} bytes, {actual}"),
            };
            return Err(ImageError::invalid(image, source));
        }
        self.files.keep(file, &path)
    }
}

struct Download<'d> {
    image: &'d str,
    what: &'d str,
    repository: &'d Repository,
    blob: &'d Blob,
    /// Tries that bring nothing, one after another, before we give up.
    tries: u32,
}

impl Download<'_> {
    async fn run(&self, sink: &Sink, progress: &watch::Sender<Progress>) -> Result<(), ImageError> {
        let (mut offset, mut barren, mut tries) = (0_u64, 0, 0);
        let mut pause = FIRST_PAUSE;
        loop {
            let before = offset;
            let passing = match self.once(sink, progress, &mut offset).await {
                Ok(()) => return Ok(()),
                Err(FetchError::Image(error)) => {
                    retract(progress, offset);
                    return Err(error);
                }
                Err(FetchError::Passing(passing)) => passing,
            };
            tries += 1;
            if offset > before {
                (barren, pause) = (0, FIRST_PAUSE);
            } else {
                barren += 1;
            }
            let wait = passing.pause(pause).filter(|_| barren < self.tries && tries < MAX_TRIES);
            let problem = passing.problem;
            let Some(wait) = wait else {
                let detail =
                    format!("{} broke off after {offset} of {} bytes: {problem}", self.what, self.blob.size);
                retract(progress, offset);
                return Err(ImageError::Failed { image: self.image.to_owned(), detail });
            };
            tracing::info!(image = self.image, blob = %self.blob.digest, offset, problem, "resuming a download");
            tokio::time::sleep(wait).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One connection's worth of bytes.
    async fn once(
        &self,
        sink: &Sink,
        progress: &watch::Sender<Progress>,
        offset: &mut u64,
    ) -> Result<(), FetchError> {
        if *offset == self.blob.size {
            return Ok(());
        }
        let (start, mut stream) = self.repository.blob(self.blob, *offset).await?;
        // A registry without ranges begins at the beginning; what we have is passed over.
        let mut skip = offset.checked_sub(start).ok_or_else(|| {
            FetchError::passing(format!(
                "the registry answers from byte {start} where {offset} was asked for"
            ))
        })?;
        while let Some(chunk) = stream.next().await {
            let mut chunk = chunk.map_err(FetchError::passing)?;
            let passed = usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.len());
            skip -= passed as u64;
            let chunk = chunk.split_off(passed);
            if chunk.is_empty() {
                continue;
            }
            let length = chunk.len() as u64;
            if *offset + length > self.blob.size {
                let source = InvalidImage::Mismatch {
                    what: format!("the size of {}", self.what),
                    expected: format!("{} bytes", self.blob.size),
                    actual: "more".into(),
                };
                return Err(ImageError::invalid(self.image, source).into());
            }
            if !sink.push(chunk).await {
                // The sink tells why.
                return Err(ImageError::Cancelled { image: self.image.to_owned() }.into());
            }
            *offset += length;
            advance(progress, length);
        }
        if *offset == self.blob.size {
            return Ok(());
        }
        Err(FetchError::passing(format!("the registry sent {offset} bytes of {} and ended", self.blob.size)))
    }
}
