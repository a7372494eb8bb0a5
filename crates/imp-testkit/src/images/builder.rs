//! Layers and images by hand: also such as no tool would make.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use camino::Utf8Path;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// How a layer is compressed, and what its media type says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// `…tar`
    None,
    /// `…tar+gzip`
    Gzip,
    /// `…tar+zstd`
    Zstd,
}

impl Compression {
    fn media_type(self) -> &'static str {
        match self {
            Self::None => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }

    fn compress(self, tar: &[u8]) -> Result<Vec<u8>> {
        Ok(match self {
            Self::None => tar.to_vec(),
            Self::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(tar)?;
                encoder.finish()?
            }
            Self::Zstd => zstd::encode_all(tar, 3)?,
        })
    }
}

/// A tar stream, entry by entry. Names are written as they are given, whatever they are.
#[derive(Debug, Default)]
pub struct LayerBuilder {
    bytes: Vec<u8>,
}

/// Seconds since the epoch that all entries have: 2024-01-01.
const MTIME: u64 = 1_704_067_200;

impl LayerBuilder {
    /// An empty layer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A directory of root's.
    pub fn directory(&mut self, path: &str, mode: u32) -> &mut Self {
        self.entry(path.as_bytes(), b'5', b"", mode, (0, 0), &[], b"")
    }

    /// A file of root's.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> &mut Self {
        self.entry(path.as_bytes(), b'0', b"", mode, (0, 0), &[], data)
    }

    /// A symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) -> &mut Self {
        self.entry(path.as_bytes(), b'2', target.as_bytes(), 0o777, (0, 0), &[], b"")
    }

    /// A hard link.
    pub fn hardlink(&mut self, path: &str, target: &str) -> &mut Self {
        self.entry(path.as_bytes(), b'1', target.as_bytes(), 0o644, (0, 0), &[], b"")
    }

    /// An empty file of that name, which is what a whiteout is: `DIRECTORY/.wh.NAME`.
    pub fn whiteout(&mut self, path: &str) -> &mut Self {
        self.file(path, 0o644, b"")
    }

    /// Any entry: its name, tar's type flag, link target, mode, owner and group, PAX records and data.
    #[expect(
        clippy::too_many_arguments,
        reason = "a tar header has these fields; the methods above are for most uses"
    )]
    pub fn entry(
        &mut self,
        path: &[u8],
        flag: u8,
        link: &[u8],
        mode: u32,
        owner: (u64, u64),
        pax: &[(&str, &[u8])],
        data: &[u8],
    ) -> &mut Self {
        let mut records: Vec<(&str, &[u8])> = pax.to_vec();
        if path.len() > 100 {
            records.push(("path", path));
        }
        if link.len() > 100 {
            records.push(("linkpath", link));
        }
        if !records.is_empty() {
            let body = pax_records(&records);
            self.header(b"pax", b'x', b"", 0o644, (0, 0), body.len() as u64, &[]);
            self.body(&body);
        }
        self.header(path, flag, link, mode, owner, data.len() as u64, &[]);
        self.body(data)
    }

    /// A device.
    pub fn device(&mut self, path: &str, flag: u8, mode: u32, major: u32, minor: u32) -> &mut Self {
        let numbers = [(329, format!("{major:07o}\0")), (337, format!("{minor:07o}\0"))];
        self.header(path.as_bytes(), flag, b"", mode, (0, 0), 0, &numbers);
        self
    }

    /// Bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    #[expect(clippy::too_many_arguments, reason = "as entry()")]
    fn header(
        &mut self,
        path: &[u8],
        flag: u8,
        link: &[u8],
        mode: u32,
        owner: (u64, u64),
        size: u64,
        more: &[(usize, String)],
    ) {
        let mut block = [0_u8; 512];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &path[..path.len().min(100)]);
        put(100, format!("{mode:07o}\0").as_bytes());
        put(108, &number(owner.0));
        put(116, &number(owner.1));
        put(124, format!("{size:011o}\0").as_bytes());
        put(136, format!("{MTIME:011o}\0").as_bytes());
        put(148, b"        ");
        put(156, &[flag]);
        put(157, &link[..link.len().min(100)]);
        put(257, b"ustar\x0000");
        for (at, text) in more {
            put(*at, text.as_bytes());
        }
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend_from_slice(&block);
    }

    fn body(&mut self, data: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    /// The stream with its end marker.
    #[must_use]
    pub fn finish(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }
}

/// An eight-byte field: octal, or GNU's base 256 when it does not fit.
fn number(value: u64) -> [u8; 8] {
    let mut field = [0; 8];
    if value < 0o10_000_000 {
        field.copy_from_slice(format!("{value:07o}\0").as_bytes());
    } else {
        field = value.to_be_bytes();
        field[0] |= 0x80;
    }
    field
}

fn pax_records(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        // The length counts its own digits.
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length != rest + length.to_string().len() {
            length = rest + length.to_string().len();
        }
        body.extend_from_slice(format!("{length} {key}=").as_bytes());
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    body
}

/// An image, layer by layer.
#[derive(Clone, Debug)]
pub struct ImageBuilder {
    architecture: String,
    config: Value,
    layers: Vec<(Vec<u8>, Compression)>,
}

impl Default for ImageBuilder {
    fn default() -> Self {
        Self { architecture: "amd64".into(), config: json!({}), layers: Vec::new() }
    }
}

impl ImageBuilder {
    /// An image for linux/amd64 without layers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// For another architecture.
    #[must_use]
    pub fn architecture(mut self, architecture: &str) -> Self {
        self.architecture = architecture.to_owned();
        self
    }

    /// The `config` object of the configuration: Env, Cmd and so on.
    #[must_use]
    pub fn config(mut self, config: Value) -> Self {
        self.config = config;
        self
    }

    /// One more layer on top: a tar stream.
    #[must_use]
    pub fn layer(mut self, tar: Vec<u8>, compression: Compression) -> Self {
        self.layers.push((tar, compression));
        self
    }

    /// Writes the image's blobs and returns the descriptor of its manifest.
    ///
    /// # Errors
    /// When files cannot be written.
    pub fn write_blobs(&self, directory: &Utf8Path) -> Result<Value> {
        let mut layers = Vec::new();
        let mut diff_ids = Vec::new();
        for (tar, compression) in &self.layers {
            diff_ids.push(digest(tar));
            let blob = compression.compress(tar).context("compress a layer")?;
            layers.push(write_blob(directory, compression.media_type(), &blob)?);
        }
        let config = json!({
            "architecture": self.architecture, "os": "linux", "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids}
        });
        let config =
            write_blob(directory, "application/vnd.oci.image.config.v1+json", config.to_string().as_bytes())?;
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest =
            json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": layers});
        let mut descriptor = write_blob(directory, media_type, manifest.to_string().as_bytes())?;
        descriptor["platform"] = json!({"os": "linux", "architecture": self.architecture});
        Ok(descriptor)
    }

    /// Writes a layout that holds this image alone, under a tag.
    ///
    /// # Errors
    /// When files cannot be written.
    pub fn write(&self, directory: &Utf8Path, tag: &str) -> Result<()> {
        let manifest = self.write_blobs(directory)?;
        write_index(directory, manifest, tag)
    }
}

/// Writes `oci-layout` and `index.json` with one entry.
///
/// # Errors
/// When files cannot be written.
pub fn write_index(directory: &Utf8Path, mut entry: Value, tag: &str) -> Result<()> {
    entry["annotations"]["org.opencontainers.image.ref.name"] = tag.into();
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    for (name, content) in [("oci-layout", json!({"imageLayoutVersion": "1.0.0"})), ("index.json", index)] {
        let path = directory.join(name);
        std::fs::write(&path, content.to_string()).with_context(|| format!("write {path}"))?;
    }
    Ok(())
}

/// Writes a blob into a layout and returns its descriptor.
///
/// # Errors
/// When files cannot be written.
pub fn write_blob(directory: &Utf8Path, media_type: &str, bytes: &[u8]) -> Result<Value> {
    let blobs = directory.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).with_context(|| format!("make {blobs}"))?;
    let descriptor = descriptor(media_type, bytes);
    let path = blobs.join(hex::encode(Sha256::digest(bytes)));
    std::fs::write(&path, bytes).with_context(|| format!("write {path}"))?;
    Ok(descriptor)
}

/// What describes these bytes.
#[must_use]
pub fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(bytes), "size": bytes.len()})
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}
