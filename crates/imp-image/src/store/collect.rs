//! What is in the store, and its removal.

use super::files::DISK_FORMAT;
use super::{ImageStore, Inner, blocking, parse_digest};
use crate::digest::Digest;
use crate::error::ImageError;
use camino::{Utf8Path, Utf8PathBuf};
use std::collections::HashSet;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// An image in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredImage {
    /// References that were last resolved to it, as people write them.
    pub references: Vec<String>,
    /// Digest of its manifest.
    pub digest: String,
    /// Bytes that its disk takes, holes not counted.
    pub disk_bytes: u64,
    /// When it was last asked for.
    pub last_used: SystemTime,
    /// Whether somebody holds its [`crate::RootDisk`].
    pub in_use: bool,
}

/// What a collection removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Disks removed.
    pub disks: u64,
    /// Manifests, configurations and layers removed.
    pub blobs: u64,
    /// Bytes given back.
    pub bytes: u64,
}

impl ImageStore {
    /// The images in the store, by digest.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn list(&self) -> Result<Vec<StoredImage>, ImageError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || inner.list()).await
    }

    /// Removes an image and what only it needs. False when it is in use; nothing is removed then. True also when there was none.
    ///
    /// # Errors
    /// When the store cannot be read or written, or the text is no digest.
    pub async fn remove(&self, digest: &str) -> Result<bool, ImageError> {
        let digest = parse_digest(digest)?;
        let inner = Arc::clone(&self.inner);
        blocking(move || {
            let removed = inner.files.remove_disk(&inner.files.disk(&digest))?.is_some();
            if removed {
                inner.forget(&[digest])?;
                inner.collect_blobs(None, &mut Collected::default())?;
            }
            Ok(removed)
        })
        .await
    }

    /// Removes the disks that are not in use and were not asked for since `unused_for`, and the layers that were fetched before
    /// and are in a disk already.
    ///
    /// Call it when every VM that survived a restart holds its [`crate::RootDisk`] again (see [`ImageStore::lookup`]).
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub async fn collect(&self, unused_for: Duration) -> Result<Collected, ImageError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || inner.collect(unused_for)).await
    }
}

impl Inner {
    fn list(&self) -> Result<Vec<StoredImage>, ImageError> {
        use std::os::unix::fs::MetadataExt;
        let references = self.files.index(|index| (index.references.clone(), false))?;
        let mut images = Vec::new();
        for (path, digest) in self.disks()? {
            let (Some(digest), Ok(metadata)) = (digest, fs::metadata(&path)) else { continue };
            let text = digest.to_string();
            // The key ends in the architecture.
            let names =
                references.iter().filter(|(_, d)| **d == text).filter_map(|(key, _)| key.rsplit_once(' '));
            images.push(StoredImage {
                references: names.map(|(name, _)| name.to_owned()).collect(),
                digest: text,
                disk_bytes: metadata.blocks() * 512,
                last_used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                in_use: self.files.is_held(&path),
            });
        }
        Ok(images)
    }

    /// All disks; without a digest those of another format.
    fn disks(&self) -> Result<Vec<(Utf8PathBuf, Option<Digest>)>, ImageError> {
        let suffix = format!("-{DISK_FORMAT}.img");
        let mut disks: Vec<_> = entries(&self.files.disks())?
            .into_iter()
            .map(|path| {
                let hex = path.file_name().and_then(|name| name.strip_suffix(&suffix));
                let digest = hex.and_then(|hex| format!("sha256:{hex}").parse().ok());
                (path, digest)
            })
            .collect();
        disks.sort();
        Ok(disks)
    }

    fn forget(&self, digests: &[Digest]) -> Result<(), ImageError> {
        let gone: HashSet<String> = digests.iter().map(ToString::to_string).collect();
        self.files.index(|index| {
            let before = index.references.len();
            index.references.retain(|_, digest| !gone.contains(digest));
            ((), index.references.len() != before)
        })
    }

    fn collect(&self, unused_for: Duration) -> Result<Collected, ImageError> {
        let before = SystemTime::now().checked_sub(unused_for).unwrap_or(SystemTime::UNIX_EPOCH);
        let mut report = Collected::default();
        let mut removed = Vec::new();
        for (path, digest) in self.disks()? {
            let old = modified(&path).is_some_and(|time| time <= before);
            if !old {
                continue;
            }
            if let Some(bytes) = self.files.remove_disk(&path)? {
                report.disks += 1;
                report.bytes += bytes;
                removed.extend(digest);
            }
        }
        self.forget(&removed)?;
        self.collect_blobs(Some(before), &mut report)?;
        Ok(report)
    }

    /// Removes blobs that no image needs. With a time also the layers that are older: they are in a disk.
    fn collect_blobs(
        &self,
        layers_before: Option<SystemTime>,
        report: &mut Collected,
    ) -> Result<(), ImageError> {
        // Whoever pulls counts on the blobs that are here; the next collection gets what this one leaves.
        let Some(_collecting) = self.files.collecting()? else { return Ok(()) };
        let (mut needed, mut layers) = (HashSet::new(), HashSet::new());
        for digest in self.disks()?.into_iter().filter_map(|(_, digest)| digest) {
            if let Some((manifest, ..)) = self.documents(&digest) {
                needed.extend([digest, manifest.config.digest]);
                layers.extend(manifest.layers.iter().map(|layer| layer.digest));
            }
        }
        for path in entries(&self.files.blobs())? {
            let digest = path.file_name().and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok());
            let keep = digest.is_some_and(|digest| {
                let recent =
                    layers_before.is_none_or(|before| modified(&path).is_some_and(|time| time > before));
                needed.contains(&digest) || (layers.contains(&digest) && recent)
            });
            if keep {
                continue;
            }
            report.bytes += fs::metadata(&path).map_or(0, |metadata| metadata.len());
            report.blobs += 1;
            fs::remove_file(&path).map_err(ImageError::io(format!("cannot remove {path}")))?;
        }
        Ok(())
    }
}

fn modified(path: &Utf8Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn entries(directory: &Utf8Path) -> Result<Vec<Utf8PathBuf>, ImageError> {
    let read = directory.read_dir_utf8().and_then(|entries| {
        entries.map(|entry| entry.map(camino::Utf8DirEntry::into_path)).collect::<Result<Vec<_>, _>>()
    });
    read.map_err(ImageError::io(format!("cannot list {directory}")))
}
