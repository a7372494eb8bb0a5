//! Manifests and indexes: what they may be, and which of an index is ours. Pure.

use crate::digest::Digest;
use crate::error::InvalidImage;
use crate::limits::Limits;
use oci_spec::image::ImageConfiguration;
use serde::Deserialize;
use std::collections::HashMap;

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// Layers that we lay out. The compression is told from the bytes, not from here.
const LAYERS: [&str; 6] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
];

/// Says that content with a digest and size exists.
#[derive(Clone, Debug)]
pub(crate) struct Blob {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RawDescriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    pub(crate) platform: Option<Platform>,
    pub(crate) annotations: Option<HashMap<String, String>>,
    artifact_type: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    variant: Option<String>,
}

impl Platform {
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let mut value = serde_json::json!({"os": self.os, "architecture": self.architecture});
        if let Some(variant) = &self.variant {
            value["variant"] = variant.as_str().into();
        }
        value
    }
}

impl std::fmt::Display for Platform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

impl RawDescriptor {
    pub(crate) fn blob(&self, what: &str) -> Result<Blob, InvalidImage> {
        let digest = self.digest.parse().map_err(|problem: String| InvalidImage::document(what, problem))?;
        Ok(Blob { digest, size: self.size })
    }

    /// Signatures, attestations and other things beside the images.
    fn is_attachment(&self) -> bool {
        let annotated =
            self.annotations.as_ref().is_some_and(|a| a.contains_key("vnd.docker.reference.type"));
        let unknown =
            self.platform.as_ref().is_some_and(|p| p.os == "unknown" || p.architecture == "unknown");
        annotated || unknown || self.artifact_type.is_some()
    }
}

/// A manifest or an index.
#[derive(Debug)]
pub(crate) enum Document {
    Index(Vec<RawDescriptor>),
    Manifest(Manifest),
}

/// An image's manifest, with nothing in it that we do not support.
#[derive(Clone, Debug)]
pub(crate) struct Manifest {
    pub(crate) config: Blob,
    pub(crate) layers: Vec<Blob>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    schema_version: Option<u32>,
    media_type: Option<String>,
    artifact_type: Option<String>,
    config: Option<RawDescriptor>,
    layers: Option<Vec<RawDescriptor>>,
    manifests: Option<Vec<RawDescriptor>>,
    fs_layers: Option<serde::de::IgnoredAny>,
}

/// Reads a manifest or index and refuses what we cannot run.
pub(crate) fn parse(bytes: &[u8], limits: &Limits) -> Result<Document, InvalidImage> {
    let raw: RawDocument =
        serde_json::from_slice(bytes).map_err(|e| InvalidImage::document("manifest", e))?;
    if raw.fs_layers.is_some() || raw.schema_version == Some(1) {
        return Err(InvalidImage::Unsupported(
            "its manifest has Docker's schema 1, which registries dropped in 2020; push the image again with a current tool".into(),
        ));
    }
    match (raw.manifests, raw.layers, raw.config) {
        // CVE-2021-41190: the same bytes must not be one thing here and another elsewhere.
        (Some(_), Some(_), _) | (Some(_), _, Some(_)) => {
            Err(InvalidImage::document("manifest", "it is a manifest and an index at the same time"))
        }
        (Some(manifests), None, None) => Ok(Document::Index(manifests)),
        (None, layers, Some(config)) => {
            image(raw.artifact_type, &config, &layers.unwrap_or_default(), limits)
        }
        _ => Err(InvalidImage::document(
            "manifest",
            format!(
                "it has neither a configuration nor manifests (media type {})",
                raw.media_type.as_deref().unwrap_or("none")
            ),
        )),
    }
}

fn image(
    artifact_type: Option<String>,
    config: &RawDescriptor,
    layers: &[RawDescriptor],
    limits: &Limits,
) -> Result<Document, InvalidImage> {
    if config.media_type != OCI_CONFIG && config.media_type != DOCKER_CONFIG {
        let kind = artifact_type.unwrap_or_else(|| config.media_type.clone());
        return Err(InvalidImage::Unsupported(format!(
            "it is an artifact of type \"{kind}\", not a container image"
        )));
    }
    if layers.len() > limits.layers {
        return Err(InvalidImage::Limit {
            at: "manifest".into(),
            limit: limits.layers as u64,
            what: "layers".into(),
        });
    }
    if config.size > limits.config_bytes {
        return Err(InvalidImage::Limit {
            at: "configuration".into(),
            limit: limits.config_bytes,
            what: "bytes".into(),
        });
    }
    let mut blobs = Vec::with_capacity(layers.len());
    for (index, layer) in layers.iter().enumerate() {
        let label = format!("layer {} of {} ({})", index + 1, layers.len(), layer.digest);
        let kind = layer.media_type.as_str();
        if kind.contains("nondistributable") || kind.contains("foreign") {
            return Err(InvalidImage::Unsupported(format!(
                "{label} is not distributable ({kind}): it is not in the registry; such layers are those of Windows images"
            )));
        }
        if !LAYERS.contains(&kind) {
            return Err(InvalidImage::Unsupported(format!(
                "{label} has the unsupported media type \"{kind}\""
            )));
        }
        if layer.size > limits.layer_compressed_bytes {
            return Err(InvalidImage::Limit {
                at: label,
                limit: limits.layer_compressed_bytes,
                what: "bytes compressed".into(),
            });
        }
        blobs.push(layer.blob(&label)?);
    }
    Ok(Document::Manifest(Manifest { config: config.blob("configuration")?, layers: blobs }))
}

/// The entries of an index that may hold the image for Linux on an architecture, the best first: those that say so, then
/// those that do not tell (nested indexes mostly).
pub(crate) fn candidates<'m>(manifests: &'m [RawDescriptor], architecture: &str) -> Vec<&'m RawDescriptor> {
    let (wanted, variant) = split_variant(architecture);
    let mut found: Vec<(u8, &RawDescriptor)> = manifests
        .iter()
        .filter(|descriptor| !descriptor.is_attachment())
        .filter_map(|descriptor| {
            let Some(platform) = descriptor.platform.as_ref().filter(|p| !p.architecture.is_empty()) else {
                return Some((3, descriptor));
            };
            if platform.os != "linux" || platform.architecture != wanted {
                return None;
            }
            let rank = match (&platform.variant, variant) {
                (Some(have), Some(want)) if have == want => 0,
                (Some(have), None) if Some(have.as_str()) == usual_variant(wanted) => 0,
                (None, _) => 1,
                // A machine that has the newer variant runs the older one; we cannot know more here.
                (Some(_), None) => 2,
                (Some(_), Some(_)) => return None,
            };
            Some((rank, descriptor))
        })
        .collect();
    found.sort_by_key(|(rank, _)| *rank);
    found.into_iter().map(|(_, descriptor)| descriptor).collect()
}

/// What an index offers, for the message that ours is not there.
pub(crate) fn platforms(manifests: &[RawDescriptor]) -> String {
    let all: Vec<String> = manifests
        .iter()
        .filter(|descriptor| !descriptor.is_attachment())
        .filter_map(|descriptor| descriptor.platform.as_ref().map(ToString::to_string))
        .take(20)
        .collect();
    if all.is_empty() { "nothing".into() } else { all.join(", ") }
}

fn split_variant(architecture: &str) -> (&str, Option<&str>) {
    architecture.split_once('/').map_or((architecture, None), |(arch, variant)| (arch, Some(variant)))
}

fn usual_variant(architecture: &str) -> Option<&'static str> {
    match architecture {
        "arm64" => Some("v8"),
        "arm" => Some("v7"),
        _ => None,
    }
}

/// Reads a configuration and checks that it belongs to this manifest and can run on Linux (on the architecture, if one is given).
pub(crate) fn parse_config(
    bytes: &[u8],
    layers: usize,
    architecture: Option<&str>,
) -> Result<(ImageConfiguration, Vec<Digest>), ConfigProblem> {
    let document = |problem: String| ConfigProblem::Invalid(InvalidImage::document("configuration", problem));
    let mut value: serde_json::Value = serde_json::from_slice(bytes).map_err(|e| document(e.to_string()))?;
    // Docker writes null where the specification wants the field left out.
    drop_nulls(&mut value);
    let config: ImageConfiguration = serde_json::from_value(value).map_err(|e| document(e.to_string()))?;
    let os = config.os().to_string();
    if os != "linux" || architecture.is_some_and(|wanted| !is_for(&config, wanted)) {
        return Err(ConfigProblem::OtherPlatform(format!("{os}/{}", config.architecture())));
    }
    let diff_ids = config
        .rootfs()
        .diff_ids()
        .iter()
        .map(|text| text.parse())
        .collect::<Result<Vec<Digest>, String>>()
        .map_err(document)?;
    if diff_ids.len() != layers {
        return Err(document(format!("it names {} layers where the manifest has {layers}", diff_ids.len())));
    }
    Ok((config, diff_ids))
}

/// Whether a configuration is for Linux on that architecture; variants are not compared, for few configurations have them.
pub(crate) fn is_for(config: &ImageConfiguration, architecture: &str) -> bool {
    config.os().to_string() == "linux" && config.architecture().to_string() == split_variant(architecture).0
}

/// Why a configuration is not for us.
#[derive(Debug)]
pub(crate) enum ConfigProblem {
    Invalid(InvalidImage),
    /// It is for this platform.
    OtherPlatform(String),
}

fn drop_nulls(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}
