//! From a reference to a disk.

use super::blobs::advance;
use super::{EnsureRequest, Inner, Progress, RootDisk, blocking, config_problem};
use crate::cancel::{Cancel, CancelOnDrop};
use crate::digest::Digest;
use crate::error::{ImageError, InvalidImage};
use crate::layer::{BuildError, Layer};
use crate::local::LocalImage;
use crate::manifest::{self, Blob, Document, Manifest, RawDescriptor};
use crate::registry::{FetchError, Repository};
use crate::source::ImageSource;
use bytes::Bytes;
use futures::future::Either;
use futures::{StreamExt, TryStreamExt, stream};
use oci_spec::distribution::Reference;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use tokio::sync::watch;

/// Layers fetched at the same time, as containerd and Docker do.
const PARALLEL_LAYERS: usize = 3;
/// Tries for a manifest when the registry or network fails, and the pause after the first.
const MANIFEST_TRIES: u32 = 4;
const MANIFEST_PAUSE: Duration = Duration::from_millis(250);

/// Where an image's parts come from.
#[derive(Clone, Debug)]
enum Origin {
    /// The first is asked first, each next one when those before have failed.
    Registry(Arc<[Repository]>),
    Local(Arc<LocalImage>),
}

/// An image that is chosen but perhaps not here yet.
#[derive(Clone, Debug)]
struct Resolved {
    image: String,
    digest: Digest,
    bytes: Bytes,
    manifest: Manifest,
    architecture: String,
}

impl Inner {
    pub(super) async fn pull(
        self: Arc<Self>,
        request: EnsureRequest,
        key: String,
        progress: watch::Sender<Progress>,
    ) -> Result<RootDisk, ImageError> {
        let image = request.source.to_string();
        let inner = Arc::clone(&self);
        let _pulling = blocking(move || inner.files.pulling()).await?;
        let (origin, start) = self.origin(&request).await?;
        let resolved = self.resolve(&image, &origin, start, &request.architecture).await?;
        let digest = resolved.digest;
        let mut disk = self.loaded(digest).await?;
        if disk.is_none() {
            self.make(resolved, origin, &progress).await?;
            disk = self.loaded(digest).await?;
        }
        let disk = disk.ok_or_else(|| ImageError::Failed {
            image: image.clone(),
            detail: format!("its disk ({digest}) was removed while it was made"),
        })?;
        // The disk may be there because another architecture was asked for.
        if !manifest::is_for(&disk.config, &request.architecture) {
            let platform = format!("{}/{}", disk.config.os(), disk.config.architecture());
            let problem = manifest::ConfigProblem::OtherPlatform(platform);
            return Err(config_problem(&image, problem, &request.architecture));
        }
        let inner = Arc::clone(&self);
        let remember = move || {
            inner.files.index(|index| {
                let old = index.references.insert(key, digest.to_string());
                ((), old.as_deref() != Some(digest.to_string().as_str()))
            })
        };
        blocking(remember).await?;
        Ok(disk)
    }

    async fn loaded(self: &Arc<Self>, digest: Digest) -> Result<Option<RootDisk>, ImageError> {
        let inner = Arc::clone(self);
        blocking(move || inner.load(&digest)).await
    }

    /// Where the image comes from, and its first manifest or index.
    async fn origin(self: &Arc<Self>, request: &EnsureRequest) -> Result<(Origin, Bytes), ImageError> {
        let image = request.source.to_string();
        let ImageSource::Registry(text) = &request.source else {
            let (inner, source) = (Arc::clone(self), request.source.clone());
            let local = blocking(move || LocalImage::open(&source, &inner.limits)).await?;
            let start = local.root.clone();
            return Ok((Origin::Local(Arc::new(local)), start));
        };
        let reference: Reference = text.parse().map_err(|error: oci_spec::distribution::ParseError| {
            ImageError::InvalidReference { input: text.clone(), problem: error.to_string() }
        })?;
        let mut places = self.registry.repositories(&reference, &request.docker_config_json);
        // A digest decides; a tag beside it is for people.
        let wanted = reference.digest().or_else(|| reference.tag()).unwrap_or("latest");
        let (start, served) = self.registry_manifest(&places, &image, wanted).await?;
        // Who has the manifest most likely has the rest.
        places[..=served].rotate_right(1);
        Ok((Origin::Registry(places.into()), start))
    }

    /// A manifest, and which of the places had it.
    async fn registry_manifest(
        &self,
        places: &[Repository],
        image: &str,
        wanted: &str,
    ) -> Result<(Bytes, usize), ImageError> {
        let mut earlier = Vec::new();
        for (index, repository) in places.iter().enumerate() {
            let last = index + 1 == places.len();
            let tries = if last { MANIFEST_TRIES } else { 1 };
            match self.manifest_of(repository, image, wanted, tries).await {
                Ok(bytes) => return Ok((bytes, index)),
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
        Err(ImageError::NotFound { image: image.to_owned(), detail: "there is nobody to ask".to_owned() })
    }

    async fn manifest_of(
        &self,
        repository: &Repository,
        image: &str,
        wanted: &str,
        max_tries: u32,
    ) -> Result<Bytes, ImageError> {
        let mut pause = MANIFEST_PAUSE;
        let mut tries = 0;
        loop {
            tries += 1;
            match repository.manifest(wanted, &self.limits).await {
                Ok((bytes, _)) => return Ok(bytes),
                Err(FetchError::Passing(passing)) => match passing.pause(pause).filter(|_| tries < max_tries)
                {
                    Some(wait) => {
                        tracing::info!(image, problem = passing.problem, "asking for a manifest again");
                        tokio::time::sleep(wait).await;
                        pause *= 2;
                    }
                    None => return Err(FetchError::Passing(passing).into_image(image)),
                },
                Err(error) => return Err(error.into_image(image)),
            }
        }
    }

    /// Goes through indexes to the manifest for the architecture.
    async fn resolve(
        self: &Arc<Self>,
        image: &str,
        origin: &Origin,
        start: Bytes,
        architecture: &str,
    ) -> Result<Resolved, ImageError> {
        let invalid = |source| ImageError::invalid(image, source);
        // Documents still to look at, the best last.
        let mut todo: Vec<(u32, Option<RawDescriptor>)> = vec![(0, None)];
        let mut offered = Vec::new();
        let mut visited = 0;
        while let Some((depth, descriptor)) = todo.pop() {
            visited += 1;
            if depth > self.limits.index_depth || visited > 64 {
                let limit = u64::from(self.limits.index_depth);
                return Err(invalid(InvalidImage::Limit {
                    at: "index".into(),
                    limit,
                    what: "indexes in one another".into(),
                }));
            }
            let bytes = match &descriptor {
                None => start.clone(),
                Some(descriptor) => self.document(image, origin, descriptor).await?,
            };
            match manifest::parse(&bytes, &self.limits).map_err(invalid)? {
                Document::Index(manifests) => {
                    offered.push(manifest::platforms(&manifests));
                    let candidates = manifest::candidates(&manifests, architecture);
                    todo.extend(candidates.into_iter().rev().map(|d| (depth + 1, Some(d.clone()))));
                }
                Document::Manifest(manifest) => {
                    // Without a platform in the index only the configuration tells.
                    let says_platform = descriptor.as_ref().is_some_and(|d| d.platform.is_some());
                    if !says_platform
                        && !todo.is_empty()
                        && !self.fits(image, origin, &manifest, architecture).await?
                    {
                        continue;
                    }
                    let (digest, architecture) = (Digest::of(&bytes), architecture.to_owned());
                    return Ok(Resolved { image: image.to_owned(), digest, bytes, manifest, architecture });
                }
            }
        }
        let detail = format!("there is none for linux/{architecture}; there is: {}", offered.join(", "));
        Err(ImageError::NotFound { image: image.to_owned(), detail })
    }

    async fn document(
        self: &Arc<Self>,
        image: &str,
        origin: &Origin,
        descriptor: &RawDescriptor,
    ) -> Result<Bytes, ImageError> {
        let blob = descriptor.blob("index").map_err(|source| ImageError::invalid(image, source))?;
        match origin {
            Origin::Registry(places) => {
                let (bytes, _) = self.registry_manifest(places, image, &blob.digest.to_string()).await?;
                Ok(bytes)
            }
            Origin::Local(local) => {
                let (inner, local, image) = (Arc::clone(self), Arc::clone(local), image.to_owned());
                blocking(move || local.manifest(&image, &blob.digest, &inner.limits)).await
            }
        }
    }

    async fn fits(
        self: &Arc<Self>,
        image: &str,
        origin: &Origin,
        manifest: &Manifest,
        architecture: &str,
    ) -> Result<bool, ImageError> {
        let (progress, _) = watch::channel(Progress::default());
        self.blob(image, "the configuration", origin, &manifest.config, &progress).await?;
        let bytes = self.read_blob(manifest.config.digest).await?;
        Ok(manifest::parse_config(&bytes, manifest.layers.len(), Some(architecture)).is_ok())
    }

    /// Makes the disk, or waits for whoever is making it.
    async fn make(
        self: &Arc<Self>,
        resolved: Resolved,
        origin: Origin,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), ImageError> {
        loop {
            let (inner, resolved, origin) = (Arc::clone(self), resolved.clone(), origin.clone());
            let key = resolved.digest.to_string();
            let begin = |progress| inner.make_alone(resolved, origin, progress);
            match self.images.run(&key, progress, begin).await {
                (Err(error), true) if error.depends_on_who_asks() => {}
                (result, _) => return result,
            }
        }
    }

    async fn make_alone(
        self: Arc<Self>,
        resolved: Resolved,
        origin: Origin,
        progress: watch::Sender<Progress>,
    ) -> Result<(), ImageError> {
        let Resolved { image, manifest, .. } = &resolved;
        let total = manifest.config.size + manifest.layers.iter().map(|layer| layer.size).sum::<u64>();
        progress.send_replace(Progress { pulled_bytes: 0, total_bytes: total });
        self.blob(image, "the configuration", &origin, &manifest.config, &progress).await?;
        let config = self.read_blob(manifest.config.digest).await?;
        let (_, diff_ids) =
            manifest::parse_config(&config, manifest.layers.len(), Some(&resolved.architecture))
                .map_err(|problem| config_problem(image, problem, &resolved.architecture))?;
        let count = manifest.layers.len();
        let fetches: Vec<_> = manifest
            .layers
            .iter()
            .cloned()
            .enumerate()
            .map(|(index, layer)| {
                let what = format!("layer {} of {count}", index + 1);
                let (inner, image, origin, progress) =
                    (Arc::clone(&self), image.clone(), origin.clone(), progress.clone());
                let diff_id = diff_ids[index];
                async move {
                    inner.blob(&image, &what, &origin, &layer, &progress).await?;
                    inner.layer(layer.digest, diff_id).await
                }
            })
            .collect();
        let (ready, layers) = std::sync::mpsc::channel();
        let fetching = async {
            let mut fetched = std::pin::pin!(stream::iter(fetches).buffered(PARALLEL_LAYERS));
            while let Some(layer) = fetched.try_next().await? {
                // When nobody takes it, the disk cannot be made, which the other side tells.
                let _ = ready.send(layer);
            }
            drop(ready);
            Ok(())
        };
        // The disk grows while upper layers are still on their way.
        let cancel = CancelOnDrop::default();
        let (inner, cancelled, making) = (Arc::clone(&self), Arc::clone(&cancel.0), resolved.clone());
        let building = blocking(move || inner.build(&making, layers, &cancelled));
        let (fetching, building) = (std::pin::pin!(fetching), std::pin::pin!(building));
        match futures::future::try_select(fetching, building).await {
            Ok(Either::Left(((), building))) => building.await,
            Ok(Either::Right(((), _))) => Ok(()),
            Err(Either::Left((error, building))) => {
                // It ends at once, and removes what it has begun.
                drop(cancel);
                let _ = building.await;
                Err(error)
            }
            Err(Either::Right((error, _))) => Err(error),
        }
    }

    /// A layer that is in the store, to be laid out.
    async fn layer(self: &Arc<Self>, digest: Digest, diff_id: Digest) -> Result<Layer, ImageError> {
        let path = self.files.blob(&digest);
        let open = blocking(move || {
            std::fs::File::open(&path).map_err(ImageError::io(format!("cannot open {path}")))
        });
        Ok(Layer { file: open.await?, digest, diff_id })
    }

    /// Brings one blob into the store.
    async fn blob(
        self: &Arc<Self>,
        image: &str,
        what: &str,
        origin: &Origin,
        blob: &Blob,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), ImageError> {
        if self.files.blob(&blob.digest).exists() {
            advance(progress, blob.size);
            return Ok(());
        }
        loop {
            let (inner, image, what, blob) =
                (Arc::clone(self), image.to_owned(), what.to_owned(), blob.clone());
            let (key, size, origin) = (blob.digest.to_string(), blob.size, origin.clone());
            // Whoever began the download tells its progress; who joins learns of it at the end.
            let own = progress.clone();
            let (unused, _) = watch::channel(Progress::default());
            let begin = |_| async move {
                match origin {
                    Origin::Registry(places) => inner.fetch_blob(image, what, &places, blob, own).await,
                    Origin::Local(local) => {
                        blocking(move || {
                            inner.import_blob(&image, &what, local.blob(&image, &blob)?, &blob)?;
                            advance(&own, size);
                            Ok(())
                        })
                        .await
                    }
                }
            };
            match self.blobs.run(&key, &unused, begin).await {
                (Err(error), true) if error.depends_on_who_asks() => {}
                (Ok(()), true) => {
                    advance(progress, size);
                    return Ok(());
                }
                (result, _) => return result,
            }
        }
    }

    async fn read_blob(&self, digest: Digest) -> Result<Vec<u8>, ImageError> {
        let path = self.files.blob(&digest);
        blocking(move || std::fs::read(&path).map_err(ImageError::io(format!("cannot read {path}")))).await
    }

    /// Lays the layers out as they come and gives the disk its name. Blocking.
    fn build(
        &self,
        resolved: &Resolved,
        layers: Receiver<Layer>,
        cancel: &Arc<Cancel>,
    ) -> Result<(), ImageError> {
        let image = &resolved.image;
        let disk = self.files.temporary()?;
        let count = resolved.manifest.layers.len();
        let built = self.converter.build(layers, count, disk.as_file(), &self.limits, cancel);
        match built {
            Ok(bytes) => tracing::info!(image, digest = %resolved.digest, bytes, "made a root disk"),
            Err(BuildError::Cancelled) => return Err(ImageError::Cancelled { image: image.clone() }),
            Err(BuildError::Broke(detail)) => {
                return Err(ImageError::Failed { image: image.clone(), detail });
            }
            Err(BuildError::Io(doing, error)) => {
                return Err(ImageError::io(format!("{doing} of {image}"))(error));
            }
            Err(BuildError::Invalid(source)) => return Err(self.blame(image, source, &resolved.manifest)),
        }
        // The disk last: what is found beside it is complete.
        let mut manifest = self.files.temporary()?;
        std::io::Write::write_all(&mut manifest, &resolved.bytes)
            .map_err(ImageError::io(format!("cannot store the manifest of {image}")))?;
        self.files.keep(manifest, &self.files.blob(&resolved.digest))?;
        // VMMs run as users of their own; only who knows the digest finds it.
        disk.as_file()
            .set_permissions(std::fs::Permissions::from_mode(0o444))
            .map_err(ImageError::io(format!("cannot store the root disk of {image}")))?;
        self.files.keep(disk, &self.files.disk(&resolved.digest))
    }

    /// Whether the image is at fault, or our copy of a layer, which then is removed and fetched again the next time.
    fn blame(&self, image: &str, source: InvalidImage, manifest: &Manifest) -> ImageError {
        for layer in &manifest.layers {
            let path = self.files.blob(&layer.digest);
            let intact = std::fs::File::open(&path).and_then(crate::digest::of_file);
            if !intact.is_ok_and(|digest| digest == layer.digest) {
                let _ = std::fs::remove_file(&path);
                let detail = format!(
                    "the copy of layer {} in the store was damaged and is removed ({source})",
                    layer.digest
                );
                return ImageError::Failed { image: image.to_owned(), detail };
            }
        }
        ImageError::invalid(image, source)
    }
}
