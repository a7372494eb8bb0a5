//! The store's files: where they are, how they become whole, who may remove them.
//!
//! ```text
//! lock                 held shared while the store is open, exclusively while leftovers are removed
//! pull.lock            held shared while an image is being made, exclusively while blobs are collected
//! index.json           references and the digests they were last resolved to (under index.lock)
//! blobs/sha256/HEX     manifests, configurations and layers as they were sent, verified
//! disks/HEX-V.img      root disk of the manifest HEX in format version V; held shared (flock) while in use
//! tmp/                 what is not whole yet; only things from here are renamed into the others
//! ```
//! Several processes may use one store: everything is written under another name, synced and renamed, and locks are flock(2)s, which the kernel
//! gives up with their process.

use crate::digest::Digest;
use crate::error::ImageError;
use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use tempfile::NamedTempFile;

/// Changes when the same layers would give another disk.
pub(super) const DISK_FORMAT: u32 = 1;

/// Paths of a store, and the lock that says that it is open.
#[derive(Debug)]
pub(crate) struct Files {
    root: Utf8PathBuf,
    /// Held for as long as we are.
    _open: File,
}

/// What references were last resolved to. Keys are "REFERENCE ARCHITECTURE".
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) references: BTreeMap<String, String>,
}

impl Files {
    /// Makes the directories and removes what an earlier process left half-done, unless another one is using the store.
    pub(super) fn open(root: &Utf8Path) -> Result<Self, ImageError> {
        // A VMM, which is another user, opens a disk whose digest it is told; nobody else needs to see anything.
        for (directory, mode) in [("blobs", 0o700), ("blobs/sha256", 0o700), ("disks", 0o711), ("tmp", 0o700)]
        {
            let path = root.join(directory);
            let made = fs::create_dir_all(&path)
                .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)));
            made.map_err(ImageError::io(format!("cannot make the image store's directory {path}")))?;
        }
        let path = root.join("lock");
        let open = open_lock(&path)?;
        if rustix::fs::flock(&open, FlockOperation::NonBlockingLockExclusive).is_ok() {
            clear(&root.join("tmp"))?;
        }
        lock(&open, FlockOperation::LockShared, &path)?;
        Ok(Self { root: root.to_owned(), _open: open })
    }

    pub(super) fn blob(&self, digest: &Digest) -> Utf8PathBuf {
        self.root.join("blobs/sha256").join(digest.hex())
    }

    pub(super) fn blobs(&self) -> Utf8PathBuf {
        self.root.join("blobs/sha256")
    }

    pub(super) fn disk(&self, digest: &Digest) -> Utf8PathBuf {
        self.root.join("disks").join(format!("{}-{DISK_FORMAT}.img", digest.hex()))
    }

    pub(super) fn disks(&self) -> Utf8PathBuf {
        self.root.join("disks")
    }

    /// A file that vanishes unless it is [`Files::keep`]t.
    pub(super) fn temporary(&self) -> Result<NamedTempFile, ImageError> {
        let directory = self.root.join("tmp");
        tempfile::Builder::new()
            .prefix("t")
            .tempfile_in(&directory)
            .map_err(ImageError::io(format!("cannot make a file in {directory}")))
    }

    /// Gives a finished file its name, so that after a crash it is there whole or not at all.
    pub(super) fn keep(&self, file: NamedTempFile, path: &Utf8Path) -> Result<(), ImageError> {
        let doing = || format!("cannot store {path}");
        file.as_file().sync_all().map_err(ImageError::io(doing()))?;
        file.persist(path).map_err(|error| ImageError::io(doing())(error.error))?;
        let parent = path.parent().unwrap_or(&self.root);
        File::open(parent).and_then(|directory| directory.sync_all()).map_err(ImageError::io(doing()))
    }

    /// Reads or changes the index; it is written if `change` says true.
    pub(super) fn index<T>(&self, change: impl FnOnce(&mut Index) -> (T, bool)) -> Result<T, ImageError> {
        let lock_path = self.root.join("index.lock");
        let locked = open_lock(&lock_path)?;
        lock(&locked, FlockOperation::LockExclusive, &lock_path)?;
        let path = self.root.join("index.json");
        let mut index = match fs::read(&path) {
            // What cannot be read is only a cache: references are resolved again.
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                tracing::warn!(%path, %error, "the image index cannot be read and begins anew");
                Index::default()
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Index::default(),
            Err(error) => return Err(ImageError::io(format!("cannot read {path}"))(error)),
        };
        let (result, changed) = change(&mut index);
        if changed {
            let mut file = self.temporary()?;
            let bytes = serde_json::to_vec_pretty(&index).map_err(io::Error::other);
            bytes
                .and_then(|bytes| file.write_all(&bytes))
                .map_err(ImageError::io(format!("cannot write {path}")))?;
            self.keep(file, &path)?;
        }
        Ok(result)
    }

    /// Keeps blobs from being collected while it is held.
    pub(super) fn pulling(&self) -> Result<File, ImageError> {
        let path = self.root.join("pull.lock");
        let file = open_lock(&path)?;
        lock(&file, FlockOperation::LockShared, &path)?;
        Ok(file)
    }

    /// The right to collect blobs; none while somebody pulls.
    pub(super) fn collecting(&self) -> Result<Option<File>, ImageError> {
        let file = open_lock(&self.root.join("pull.lock"))?;
        Ok(rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(file))
    }

    /// Opens a finished disk and keeps it from being removed; none if it is not there.
    pub(super) fn hold_disk(&self, digest: &Digest) -> Result<Option<File>, ImageError> {
        let path = self.disk(digest);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ImageError::io(format!("cannot open {path}"))(error)),
        };
        lock(&file, FlockOperation::LockShared, &path)?;
        // It may have been removed between the two.
        let links = rustix::fs::fstat(&file)
            .map_err(|e| ImageError::io(format!("cannot look at {path}"))(e.into()))?
            .st_nlink;
        Ok((links > 0).then_some(file))
    }

    /// Whether somebody holds a disk.
    pub(super) fn is_held(&self, path: &Utf8Path) -> bool {
        File::open(path)
            .is_ok_and(|file| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err())
    }

    /// Removes a disk that nobody holds; returns whether it did, and the bytes that it took.
    pub(super) fn remove_disk(&self, path: &Utf8Path) -> Result<Option<u64>, ImageError> {
        use std::os::unix::fs::MetadataExt;
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(0)),
            Err(error) => return Err(ImageError::io(format!("cannot open {path}"))(error)),
        };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let bytes = file.metadata().map_or(0, |metadata| metadata.blocks() * 512);
        fs::remove_file(path).map_err(ImageError::io(format!("cannot remove {path}")))?;
        Ok(Some(bytes))
    }
}

fn open_lock(path: &Utf8Path) -> Result<File, ImageError> {
    let open = File::options().read(true).write(true).create(true).truncate(false).open(path);
    open.map_err(ImageError::io(format!("cannot open {path}")))
}

fn lock(file: &File, operation: FlockOperation, path: &Utf8Path) -> Result<(), ImageError> {
    loop {
        match rustix::fs::flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ImageError::io(format!("cannot lock {path}"))(errno.into())),
        }
    }
}

fn clear(directory: &Utf8Path) -> Result<(), ImageError> {
    let doing = || format!("cannot clear {directory}");
    for entry in fs::read_dir(directory).map_err(ImageError::io(doing()))? {
        let path = entry.map_err(ImageError::io(doing()))?.path();
        fs::remove_file(&path).map_err(ImageError::io(doing()))?;
    }
    Ok(())
}
