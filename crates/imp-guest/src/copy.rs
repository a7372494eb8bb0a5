//! Files in and out, as tar streams. The tar is read and written by threads whose root is the workload's.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Buf as _, Bytes};
use imp_proto::v1::{CopyChunk, CopyToRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::agent::Machine;
use crate::process::launch::root_path;

/// Chunks on their way.
const QUEUE: usize = 4;
const CHUNK: usize = 32 << 10;

/// What arrives by a channel, as a file. An error of the stream is an error of the reader, not its end.
struct ChannelReader {
    chunks: mpsc::Receiver<Result<Bytes, Status>>,
    current: Bytes,
}

impl Read for ChannelReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.chunks.blocking_recv() {
                None => return Ok(0),
                Some(Ok(data)) => self.current = data,
                Some(Err(status)) => return Err(io::Error::other(status.message().to_owned())),
            }
        }
        let n = out.len().min(self.current.len());
        out[..n].copy_from_slice(&self.current[..n]);
        self.current.advance(n);
        Ok(n)
    }
}

/// Sends what is written by a channel.
struct ChannelWriter(mpsc::Sender<Result<CopyChunk, Status>>);

impl Write for ChannelWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let part = &data[..data.len().min(CHUNK)];
        let chunk = CopyChunk { data: Bytes::copy_from_slice(part) };
        self.0.blocking_send(Ok(chunk)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Unpacks a tar stream into a directory.
pub(crate) async fn copy_to(
    machine: Arc<Machine>,
    mut requests: Streaming<CopyToRequest>,
) -> Result<(), Status> {
    let first = requests.message().await?.ok_or_else(|| Status::invalid_argument("the stream is empty"))?;
    if first.directory.is_empty() {
        return Err(Status::invalid_argument("the first message has to name the directory"));
    }
    let directory = root_path(&first.directory);
    let (sender, chunks) = mpsc::channel(QUEUE);
    let feed = tokio::spawn(async move {
        let mut next = Ok(Some(first));
        loop {
            let message = match next {
                Ok(Some(request)) => Ok(request.data),
                Ok(None) => return,
                Err(status) => Err(status),
            };
            let last = message.is_err();
            // The unpacking side may have given up; it tells why.
            if sender.send(message).await.is_err() || last {
                return;
            }
            next = requests.message().await;
        }
    });
    let unpack = tokio::task::spawn_blocking(move || {
        let reader = ChannelReader { chunks, current: Bytes::new() };
        machine.launcher.root.inside(move || unpack(reader, &directory))?
    });
    let done = unpack.await.map_err(|e| Status::internal(format!("unpacking panicked: {e}")))?;
    feed.abort();
    done.map_err(|e| Status::failed_precondition(format!("{e:#}")))
}

fn unpack(reader: impl Read, directory: &Path) -> Result<()> {
    let metadata =
        std::fs::metadata(directory).with_context(|| format!("copy into {}", directory.display()))?;
    ensure!(metadata.is_dir(), "copy into {}: not a directory", directory.display());
    let mut archive = tar::Archive::new(reader);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_overwrite(true);
    archive.unpack(directory).with_context(|| format!("unpack into {}", directory.display()))
}

/// Packs a file or directory as a tar stream whose entries begin with its last name.
pub(crate) fn copy_from(
    machine: Arc<Machine>,
    path: &str,
) -> Result<ReceiverStream<Result<CopyChunk, Status>>, Status> {
    if path.is_empty() {
        return Err(Status::invalid_argument("path is empty"));
    }
    let path = root_path(path);
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::task::spawn_blocking(move || {
        let writer = ChannelWriter(sender.clone());
        let packed = machine.launcher.root.inside(move || pack(writer, &path));
        if let Err(e) = packed.and_then(|done| done) {
            // A caller that has gone needs no reason.
            let _ = sender.blocking_send(Err(Status::failed_precondition(format!("{e:#}"))));
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// A writer that can be stopped: `tar::Builder` ends its archive properly even when dropped after an error, and half a
/// copy must not look like a whole one.
struct Stoppable<'a, W> {
    inner: W,
    stopped: &'a Cell<bool>,
}

impl<W: Write> Write for Stoppable<'_, W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.stopped.get() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.inner.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn pack(writer: impl Write, path: &Path) -> Result<()> {
    let stopped = Cell::new(false);
    let mut builder = tar::Builder::new(Stoppable { inner: writer, stopped: &stopped });
    builder.follow_symlinks(false);
    let appended = append_tree(&mut builder, path);
    stopped.set(appended.is_err());
    appended?;
    builder.into_inner().and_then(|mut w| w.flush()).context("end the archive")
}

fn append_tree<W: Write>(builder: &mut tar::Builder<W>, path: &Path) -> Result<()> {
    let name = path.file_name().map_or_else(|| PathBuf::from("."), PathBuf::from);
    let mut pending = vec![(path.to_owned(), name)];
    while let Some((path, name)) = pending.pop() {
        let metadata =
            std::fs::symlink_metadata(&path).with_context(|| format!("copy {}", path.display()))?;
        let kind = metadata.file_type();
        if kind.is_socket() {
            continue;
        }
        builder.append_path_with_name(&path, &name).with_context(|| format!("copy {}", path.display()))?;
        if kind.is_dir() {
            let entries = std::fs::read_dir(&path).with_context(|| format!("list {}", path.display()))?;
            for entry in entries {
                let entry = entry.with_context(|| format!("list {}", path.display()))?;
                pending.push((entry.path(), name.join(entry.file_name())));
            }
            if pending.len() > 1_000_000 {
                bail!("{} has too many entries to copy", path.display());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_tree_survives_packing_and_unpacking() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("tree");
        fs::create_dir_all(source.join("sub")).unwrap();
        fs::write(source.join("sub/file"), vec![5u8; 100_000]).unwrap();
        std::os::unix::fs::symlink("sub/file", source.join("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(source.join("socket")).unwrap();
        let mut packed = Vec::new();
        pack(&mut packed, &source).unwrap();
        let target = dir.path().join("target");
        fs::create_dir(&target).unwrap();
        unpack(&packed[..], &target).unwrap();
        assert_eq!(fs::read(target.join("tree/sub/file")).unwrap().len(), 100_000);
        assert_eq!(fs::read_link(target.join("tree/link")).unwrap(), Path::new("sub/file"));
        assert!(!target.join("tree/socket").exists());
    }

    #[test]
    fn a_cut_stream_and_a_missing_directory_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, vec![5u8; 10_000]).unwrap();
        let mut packed = Vec::new();
        pack(&mut packed, &file).unwrap();
        assert!(unpack(&packed[..5_000], dir.path()).is_err());
        assert!(unpack(&packed[..], &dir.path().join("missing")).is_err());
        assert!(unpack(&packed[..], &file).is_err());
        let mut nothing = Vec::new();
        assert!(pack(&mut nothing, &dir.path().join("missing")).is_err());
        assert!(nothing.is_empty(), "no end of an archive after an error");
    }
}
