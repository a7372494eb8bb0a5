//! The images of a node: pulled, checked, laid out, kept and removed.

mod blobs;
mod collect;
mod files;
mod pull;

pub use collect::{Collected, StoredImage};

use crate::converter::Converter;
use crate::digest::Digest;
use crate::error::ImageError;
use crate::flight::Flights;
use crate::healthcheck::{self, Healthcheck};
use crate::limits::Limits;
use crate::manifest::{self, ConfigProblem, Document, Manifest};
use crate::registry::{RegistryClient, RegistryOptions};
use crate::source::ImageSource;
use camino::{Utf8Path, Utf8PathBuf};
use files::Files;
use oci_spec::image::ImageConfiguration;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::watch;

/// When to ask the registry, as a Pod's imagePullPolicy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PullPolicy {
    /// Resolve the tag every time; what is cached by digest is not fetched again.
    Always,
    /// Only when the reference is not cached. What is cached is handed out whatever the credentials, as a kubelet does unless told
    /// otherwise; where that matters, use Always.
    IfNotPresent,
    /// Never. Images in files are read all the same: there is nothing to pull.
    Never,
}

/// One wish for an image.
#[derive(Clone)]
pub struct EnsureRequest {
    /// Where it comes from.
    pub source: ImageSource,
    /// When to ask the registry.
    pub policy: PullPolicy,
    /// OCI architecture, e.g. "amd64", perhaps with a variant ("arm/v7").
    pub architecture: String,
    /// Documents of type kubernetes.io/dockerconfigjson, tried in order. Kept in memory only.
    pub docker_config_json: Vec<Vec<u8>>,
}

impl std::fmt::Debug for EnsureRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnsureRequest")
            .field("source", &self.source)
            .field("policy", &self.policy)
            .field("architecture", &self.architecture)
            .field("docker_config_json", &format_args!("{} documents", self.docker_config_json.len()))
            .finish()
    }
}

/// How far a pull is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes fetched, or found to be here already.
    pub pulled_bytes: u64,
    /// Bytes to fetch, as the manifest says; 0 while unknown.
    pub total_bytes: u64,
}

/// An image as a disk. While it (or a clone) is held, the disk is not collected, by no process.
#[derive(Clone, Debug)]
pub struct RootDisk {
    /// Raw file to attach read-only.
    pub path: Utf8PathBuf,
    /// "erofs".
    pub fs_type: &'static str,
    /// Digest of the (platform's) manifest.
    pub digest: String,
    /// The image's configuration.
    pub config: Arc<ImageConfiguration>,
    /// How the image says that its health is found out.
    pub healthcheck: Option<Healthcheck>,
    /// Holds a shared flock(2).
    _held: Arc<File>,
}

/// How a store is to be opened.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    /// How registries are reached.
    pub registry: RegistryOptions,
    /// How large images may be.
    pub limits: Limits,
    /// Where layers are laid out.
    pub converter: Converter,
}

/// The images of a node. Cheap to clone; clones are the same store.
#[derive(Clone, Debug)]
pub struct ImageStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    files: Files,
    limits: Limits,
    converter: Converter,
    registry: RegistryClient,
    /// From a reference, with credentials, to a disk.
    references: Flights<RootDisk>,
    /// From a manifest to a disk.
    images: Flights<()>,
    /// Blobs being fetched.
    blobs: Flights<()>,
}

impl ImageStore {
    /// Opens the store under `root` with default options, undoing what a crash left half-done.
    ///
    /// # Errors
    /// When the directory cannot be made, read or locked.
    pub fn open(root: &Utf8Path) -> Result<Self, ImageError> {
        Self::open_with(root, StoreOptions::default())
    }

    /// Opens the store under `root`. Several processes may have the same store open.
    ///
    /// # Errors
    /// When the directory cannot be made, read or locked, or a CA certificate of the options cannot be read.
    pub fn open_with(root: &Utf8Path, options: StoreOptions) -> Result<Self, ImageError> {
        let inner = Inner {
            files: Files::open(root)?,
            registry: RegistryClient::new(&options.registry)?,
            limits: options.limits,
            converter: options.converter,
            references: Flights::default(),
            images: Flights::default(),
            blobs: Flights::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Makes sure that an image's disk is there. `progress` is told how far its pull is.
    ///
    /// Whoever asks for the same image at the same time shares one pull. Dropping the future gives up; when all who wait have
    /// given up, the download is stopped and nothing of it is left.
    ///
    /// # Errors
    /// See [`ImageError`]; [`ImageError::retryable`] tells whether to ask again.
    pub async fn ensure(
        &self,
        request: &EnsureRequest,
        progress: watch::Sender<Progress>,
    ) -> Result<RootDisk, ImageError> {
        let in_registry = matches!(request.source, ImageSource::Registry(_));
        let key = format!("{} {}", request.source, request.architecture);
        if in_registry && request.policy != PullPolicy::Always {
            let (inner, reference) = (Arc::clone(&self.inner), key.clone());
            if let Some(disk) = blocking(move || inner.cached(&reference)).await? {
                return Ok(disk);
            }
            if request.policy == PullPolicy::Never {
                return Err(ImageError::NotCached { image: request.source.to_string() });
            }
        }
        // Who brings other credentials must not be given another's refusal, or another's image.
        let secrets = Digest::of(&request.docker_config_json.join(&b'\n'));
        let begin = |progress| Arc::clone(&self.inner).pull(request.clone(), key.clone(), progress);
        self.inner.references.run(&format!("{key} {secrets}"), &progress, begin).await.0
    }

    /// The disk of a manifest digest, if it is here. Asks no registry.
    ///
    /// # Errors
    /// When the store cannot be read, or the text is no digest.
    pub async fn lookup(&self, digest: &str) -> Result<Option<RootDisk>, ImageError> {
        let digest = parse_digest(digest)?;
        let inner = Arc::clone(&self.inner);
        blocking(move || inner.load(&digest)).await
    }
}

impl Inner {
    /// What a reference was last resolved to, if its disk is still here. Blocking.
    fn cached(&self, key: &str) -> Result<Option<RootDisk>, ImageError> {
        let digest = self.files.index(|index| (index.references.get(key).cloned(), false))?;
        match digest.as_deref().map(str::parse::<Digest>) {
            Some(Ok(digest)) => self.load(&digest),
            _ => Ok(None),
        }
    }

    /// A finished disk with its configuration. Blocking.
    fn load(&self, digest: &Digest) -> Result<Option<RootDisk>, ImageError> {
        let Some(held) = self.files.hold_disk(digest)? else { return Ok(None) };
        let Some((_, config, healthcheck)) = self.documents(digest) else { return Ok(None) };
        // Only for the order in which disks are collected.
        let _ = held.set_modified(SystemTime::now());
        Ok(Some(RootDisk {
            path: self.files.disk(digest),
            fs_type: "erofs",
            digest: digest.to_string(),
            config: Arc::new(config),
            healthcheck,
            _held: Arc::new(held),
        }))
    }

    /// Manifest and configuration from the store; none if they are not there or damaged, so that they are fetched again.
    fn documents(&self, digest: &Digest) -> Option<(Manifest, ImageConfiguration, Option<Healthcheck>)> {
        let read = |digest: &Digest| {
            std::fs::read(self.files.blob(digest)).ok().filter(|bytes| Digest::of(bytes) == *digest)
        };
        let Ok(Document::Manifest(manifest)) = manifest::parse(&read(digest)?, &self.limits) else {
            return None;
        };
        let bytes = read(&manifest.config.digest)?;
        let (config, _) = manifest::parse_config(&bytes, manifest.layers.len(), None).ok()?;
        Some((manifest, config, healthcheck::of(&bytes)))
    }
}

/// This machine's architecture as OCI names it (Go's GOARCH), e.g. "amd64".
#[must_use]
pub fn host_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        "loongarch64" => "loong64",
        other => other,
    }
}

fn parse_digest(text: &str) -> Result<Digest, ImageError> {
    text.parse().map_err(|problem| ImageError::InvalidReference { input: text.to_owned(), problem })
}

/// Runs what waits for files or uses the CPU where it blocks nobody.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> Result<T, ImageError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ImageError::io("work on an image broke off")(io::Error::other(error)))?
}

fn config_problem(image: &str, problem: ConfigProblem, architecture: &str) -> ImageError {
    match problem {
        ConfigProblem::Invalid(source) => ImageError::invalid(image, source),
        ConfigProblem::OtherPlatform(platform) => ImageError::NotFound {
            image: image.to_owned(),
            detail: format!("it is for {platform}, not for linux/{architecture}"),
        },
    }
}
