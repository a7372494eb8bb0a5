//! Images in files: OCI layouts (as a directory or in a tar), and what `docker save` writes.
//!
//! Everything read is verified like what comes from a registry. Names from inside an archive are only compared with one another, never
//! opened on the host; a blob is looked for by its digest alone.

use crate::digest::Digest;
use crate::error::{ImageError, InvalidImage};
use crate::layer::tar::{EntryKind, TarError, TarReader};
use crate::limits::Limits;
use crate::manifest::{Blob, DOCKER_MANIFEST, OCI_CONFIG, OCI_INDEX, OCI_MANIFEST, RawDescriptor};
use crate::source::ImageSource;
use bytes::Bytes;
use camino::{Utf8Path, Utf8PathBuf};
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

/// Annotation of a layout's index entries that holds the tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Entries of an archive; a layout has one a blob.
const MAX_ARCHIVE_ENTRIES: usize = 100_000;

/// Where some bytes are.
#[derive(Clone, Debug)]
struct Span {
    path: Utf8PathBuf,
    offset: u64,
    size: u64,
}

impl Span {
    fn open(&self) -> io::Result<io::Take<File>> {
        let mut file = open_regular(&self.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        Ok(file.take(self.size))
    }
}

/// An image's files, and its manifest.
#[derive(Debug)]
pub(crate) struct LocalImage {
    blobs: Blobs,
    /// Manifest or index to begin with.
    pub(crate) root: Bytes,
}

#[derive(Debug)]
enum Blobs {
    /// `blobs/sha256/…` below a directory.
    Directory(Utf8PathBuf),
    Spans(HashMap<Digest, Span>),
}

impl LocalImage {
    /// Finds the image. Blocking.
    pub(crate) fn open(source: &ImageSource, limits: &Limits) -> Result<Self, ImageError> {
        match source {
            ImageSource::OciLayout(directory, tag) => Self::layout(source, directory, tag.as_deref(), limits),
            ImageSource::OciArchive(file, tag) => Self::oci_archive(source, file, tag.as_deref(), limits),
            ImageSource::DockerArchive(file, tag) => {
                Self::docker_archive(source, file, tag.as_deref(), limits)
            }
            ImageSource::Registry(reference) => Err(ImageError::NotFound {
                image: reference.clone(),
                detail: "it is in a registry, not in a file".into(),
            }),
        }
    }

    fn layout(
        source: &ImageSource,
        directory: &Utf8Path,
        tag: Option<&str>,
        limits: &Limits,
    ) -> Result<Self, ImageError> {
        let path = directory.join("index.json");
        let file = open_regular(&path).map_err(|error| not_found(source, &path, &error))?;
        let index = read_bounded(file, limits.manifest_bytes)
            .map_err(ImageError::io(format!("cannot read {path}")))?;
        let index = index.ok_or_else(|| too_large(source, limits))?;
        let blobs = Blobs::Directory(directory.join("blobs/sha256"));
        Self::from_index(source, &index, tag, blobs, limits)
    }

    fn oci_archive(
        source: &ImageSource,
        file: &Utf8Path,
        tag: Option<&str>,
        limits: &Limits,
    ) -> Result<Self, ImageError> {
        let archive = Archive::open(source, file, limits)?;
        let index = archive.read(source, "index.json", limits)?;
        let mut spans = HashMap::new();
        for (name, span) in &archive.files {
            if let Some(hex) = name.strip_prefix("blobs/sha256/")
                && let Ok(digest) = format!("sha256:{hex}").parse()
            {
                spans.insert(digest, span.clone());
            }
        }
        Self::from_index(source, &index, tag, Blobs::Spans(spans), limits)
    }

    /// The entry of a layout's index that a tag names, or the only one.
    fn from_index(
        source: &ImageSource,
        index: &[u8],
        tag: Option<&str>,
        blobs: Blobs,
        limits: &Limits,
    ) -> Result<Self, ImageError> {
        #[derive(Deserialize)]
        struct Index {
            manifests: Vec<RawDescriptor>,
        }
        let invalid = |source_error| ImageError::invalid(source.to_string(), source_error);
        let index: Index =
            serde_json::from_slice(index).map_err(|e| invalid(InvalidImage::document("index.json", e)))?;
        let name = |descriptor: &RawDescriptor| {
            descriptor.annotations.as_ref().and_then(|a| a.get(REF_NAME).cloned())
        };
        let named =
            |descriptor: &&RawDescriptor| tag.is_none_or(|tag| name(descriptor).as_deref() == Some(tag));
        let mut found: Vec<&RawDescriptor> = index.manifests.iter().filter(named).collect();
        if tag.is_none() && found.len() > 1 {
            // As several platforms of one image, without an index of their own.
            found.retain(|descriptor| descriptor.platform.is_none());
            if found.is_empty() {
                let root = serde_json::json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": raw(&index.manifests)});
                return Ok(Self { blobs, root: root.to_string().into() });
            }
        }
        let tags = || index.manifests.iter().filter_map(name).collect::<Vec<_>>().join(", ");
        let descriptor = match found.as_slice() {
            [one] => *one,
            [] => {
                return Err(ImageError::NotFound {
                    image: source.to_string(),
                    detail: format!("its tags are: {}", tags()),
                });
            }
            _ => {
                let problem =
                    format!("it holds several images; add one of these tags behind a colon: {}", tags());
                return Err(invalid(InvalidImage::document("index.json", problem)));
            }
        };
        let blob = descriptor.blob("index.json").map_err(invalid)?;
        let image = Self { blobs, root: Bytes::new() };
        let root = image.manifest(&source.to_string(), &blob.digest, limits)?;
        Ok(Self { root, ..image })
    }

    /// Writes an OCI manifest for what `docker save` wrote, whose own manifest has no digests.
    fn docker_archive(
        source: &ImageSource,
        file: &Utf8Path,
        tag: Option<&str>,
        limits: &Limits,
    ) -> Result<Self, ImageError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Item {
            config: String,
            repo_tags: Option<Vec<String>>,
            layers: Vec<String>,
        }
        let archive = Archive::open(source, file, limits)?;
        let manifest = archive.read(source, "manifest.json", limits)?;
        let invalid = |source_error| ImageError::invalid(source.to_string(), source_error);
        let items: Vec<Item> = serde_json::from_slice(&manifest)
            .map_err(|e| invalid(InvalidImage::document("manifest.json", e)))?;
        let tags = |item: &Item| item.repo_tags.clone().unwrap_or_default();
        let wanted: Vec<&Item> = items
            .iter()
            .filter(|item| tag.is_none_or(|tag| tags(item).iter().any(|have| same_tag(have, tag))))
            .collect();
        let all = || items.iter().flat_map(tags).collect::<Vec<_>>().join(", ");
        let item = match wanted.as_slice() {
            [one] => *one,
            [] => {
                return Err(ImageError::NotFound {
                    image: source.to_string(),
                    detail: format!("its tags are: {}", all()),
                });
            }
            _ => {
                let problem =
                    format!("it holds several images; add one of these tags behind a colon: {}", all());
                return Err(invalid(InvalidImage::document("manifest.json", problem)));
            }
        };
        if item.layers.len() > limits.layers {
            return Err(invalid(InvalidImage::Limit {
                at: "manifest.json".into(),
                limit: limits.layers as u64,
                what: "layers".into(),
            }));
        }
        let mut spans = HashMap::new();
        let mut descriptor = |name: &str, media_type: &str| -> Result<serde_json::Value, ImageError> {
            let span = archive.find(source, name)?;
            let digest = span
                .open()
                .and_then(crate::digest::of_file)
                .map_err(ImageError::io(format!("cannot read {name} in {file}")))?;
            spans.insert(digest, span.clone());
            Ok(serde_json::json!({"mediaType": media_type, "digest": digest.to_string(), "size": span.size}))
        };
        let config = descriptor(&item.config, OCI_CONFIG)?;
        let layers: Vec<_> = item
            .layers
            .iter()
            .map(|name| descriptor(name, "application/vnd.oci.image.layer.v1.tar"))
            .collect::<Result<_, _>>()?;
        let root = serde_json::json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers});
        Ok(Self { blobs: Blobs::Spans(spans), root: root.to_string().into() })
    }

    fn span(&self, image: &str, digest: &Digest) -> Result<Span, ImageError> {
        let missing = |detail: String| ImageError::NotFound { image: image.to_owned(), detail };
        match &self.blobs {
            Blobs::Spans(spans) => {
                spans.get(digest).cloned().ok_or_else(|| missing(format!("blob {digest} is missing")))
            }
            Blobs::Directory(directory) => {
                let path = directory.join(digest.hex());
                let file =
                    open_regular(&path).map_err(|error| missing(format!("cannot open {path}: {error}")))?;
                let size = file.metadata().map_err(ImageError::io(format!("cannot read {path}")))?.len();
                Ok(Span { path, offset: 0, size })
            }
        }
    }

    /// A manifest or index by its digest, verified. Blocking.
    pub(crate) fn manifest(
        &self,
        image: &str,
        digest: &Digest,
        limits: &Limits,
    ) -> Result<Bytes, ImageError> {
        let span = self.span(image, digest)?;
        let bytes = span
            .open()
            .and_then(|reader| read_bounded(reader, limits.manifest_bytes))
            .map_err(ImageError::io(format!("cannot read {}", span.path)))?;
        let limit =
            InvalidImage::Limit { at: "manifest".into(), limit: limits.manifest_bytes, what: "bytes".into() };
        let bytes = bytes.ok_or_else(|| ImageError::invalid(image, limit))?;
        let actual = Digest::of(&bytes);
        if actual != *digest {
            let what = "the digest of its manifest".to_owned();
            let source =
                InvalidImage::Mismatch { what, expected: digest.to_string(), actual: actual.to_string() };
            return Err(ImageError::invalid(image, source));
        }
        Ok(bytes.into())
    }

    /// A blob's bytes. Blocking.
    pub(crate) fn blob(&self, image: &str, blob: &Blob) -> Result<impl Read + use<>, ImageError> {
        let span = self.span(image, &blob.digest)?;
        span.open().map_err(ImageError::io(format!("cannot read {}", span.path)))
    }
}

/// Descriptors as they were, for an index of our own.
fn raw(manifests: &[RawDescriptor]) -> Vec<serde_json::Value> {
    manifests
        .iter()
        .map(|d| {
            let media_type = if d.media_type.is_empty() { DOCKER_MANIFEST } else { &d.media_type };
            let mut value = serde_json::json!({"mediaType": media_type, "digest": d.digest, "size": d.size});
            if let Some(platform) = &d.platform {
                value["platform"] = platform.to_json();
            }
            value
        })
        .collect()
}

/// `app:v1` and `docker.io/library/app:v1` are the same for Docker.
fn same_tag(have: &str, wanted: &str) -> bool {
    let normal = |text: &str| text.parse::<ImageSource>().map(|source| source.to_string()).ok();
    have == wanted || (normal(have).is_some() && normal(have) == normal(wanted))
}

/// Where the files of a tar are.
struct Archive {
    files: HashMap<String, Span>,
    links: HashMap<String, String>,
}

impl Archive {
    fn open(source: &ImageSource, path: &Utf8Path, limits: &Limits) -> Result<Self, ImageError> {
        let file = open_regular(path).map_err(|error| not_found(source, path, &error))?;
        let invalid = |problem: String| {
            ImageError::invalid(source.to_string(), InvalidImage::document(path.as_str(), problem))
        };
        let mut reader = TarReader::new(Seeking { file, position: 0 }, limits);
        let mut archive = Self { files: HashMap::new(), links: HashMap::new() };
        loop {
            let entry = match reader.next_entry() {
                Ok(Some(entry)) => entry,
                Ok(None) => return Ok(archive),
                Err(TarError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(invalid(
                        "the archive is cut off, or compressed (decompress it first)".into(),
                    ));
                }
                Err(TarError::Io(error)) => return Err(ImageError::io(format!("cannot read {path}"))(error)),
                Err(TarError::Malformed(name, problem)) => {
                    return Err(invalid(format!("entry \"{}\": {problem}", String::from_utf8_lossy(&name))));
                }
            };
            if archive.files.len() + archive.links.len() > MAX_ARCHIVE_ENTRIES {
                return Err(invalid(format!("more than {MAX_ARCHIVE_ENTRIES} entries")));
            }
            let Ok(name) = String::from_utf8(entry.path) else { continue };
            let name = lexical(&name);
            match entry.kind {
                EntryKind::File if entry.sparse.is_none() => {
                    let span = Span { path: path.to_owned(), offset: reader.position(), size: entry.size };
                    archive.files.insert(name, span);
                }
                // Old versions of `docker save` link layers that are the same.
                EntryKind::Symlink | EntryKind::Hardlink => {
                    let target = String::from_utf8_lossy(&entry.link).into_owned();
                    let parent = name.rsplit_once('/').map_or("", |(parent, _)| parent);
                    let base = if entry.kind == EntryKind::Symlink { parent } else { "" };
                    archive.links.insert(name.clone(), lexical(&format!("{base}/{target}")));
                }
                _ => {}
            }
        }
    }

    fn find(&self, source: &ImageSource, name: &str) -> Result<&Span, ImageError> {
        let name = lexical(name);
        let found = self.files.get(&name).or_else(|| self.files.get(self.links.get(&name)?));
        found.ok_or_else(|| ImageError::NotFound {
            image: source.to_string(),
            detail: format!("the archive has no file {name}"),
        })
    }

    fn read(&self, source: &ImageSource, name: &str, limits: &Limits) -> Result<Vec<u8>, ImageError> {
        let span = self.find(source, name)?;
        let read = span.open().and_then(|reader| read_bounded(reader, limits.manifest_bytes));
        let bytes = read.map_err(ImageError::io(format!("cannot read {name} in {}", span.path)))?;
        bytes.ok_or_else(|| too_large(source, limits))
    }
}

/// A name without `.`, `..` and double slashes.
fn lexical(name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Tells where the reader is, so that entries can be found again.
struct Seeking {
    file: File,
    position: u64,
}

impl Read for Seeking {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl crate::layer::tar::Skip for Seeking {
    fn skip(&mut self, count: u64) -> io::Result<u64> {
        let rest = self.file.metadata()?.len().saturating_sub(self.position).min(count);
        self.position += rest;
        self.file.seek(SeekFrom::Start(self.position))?;
        Ok(rest)
    }
}

impl TarReader<'_, Seeking> {
    fn position(&self) -> u64 {
        self.inner().position
    }
}

/// Opens a file that must be a regular one: a FIFO would block us for ever.
fn open_regular(path: &Utf8Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// Everything, or none if there is more than `limit` bytes.
fn read_bounded(reader: impl Read, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    reader.take(limit + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

fn not_found(source: &ImageSource, path: &Utf8Path, error: &io::Error) -> ImageError {
    ImageError::NotFound { image: source.to_string(), detail: format!("cannot open {path}: {error}") }
}

fn too_large(source: &ImageSource, limits: &Limits) -> ImageError {
    let limit =
        InvalidImage::Limit { at: "index".into(), limit: limits.manifest_bytes, what: "bytes".into() };
    ImageError::invalid(source.to_string(), limit)
}
