//! Container images from files, without a daemon: the same input gives the same digest.

use std::fs;

use anyhow::{Context as _, Result};
use camino::{Utf8Path, Utf8PathBuf};
use oci_spec::image::{
    ConfigBuilder, DescriptorBuilder, Digest, ImageConfigurationBuilder, ImageIndexBuilder,
    ImageManifestBuilder, MediaType, RootFsBuilder,
};
use sha2::{Digest as _, Sha256};

/// A file of an image.
#[derive(Clone, Debug)]
pub(crate) struct ImageFile {
    /// Where it is in the image, without a leading slash.
    pub(crate) path: Utf8PathBuf,
    /// Where it is on this machine.
    pub(crate) source: Utf8PathBuf,
    /// Permission bits.
    pub(crate) mode: u32,
}

/// What an image holds and how it is started.
#[derive(Debug)]
pub(crate) struct ImageSpec {
    /// Its full name with a tag.
    pub(crate) name: String,
    /// One layer of files of root.
    pub(crate) files: Vec<ImageFile>,
    /// Links: (where, to what).
    pub(crate) links: Vec<(Utf8PathBuf, String)>,
    /// Program and first arguments.
    pub(crate) entrypoint: Vec<String>,
    /// Who runs it, as `65532:65532`.
    pub(crate) user: String,
}

/// Everything in an image is of this time: it must not depend on when it was built.
const EPOCH: u64 = 0;

/// Writes the image as an OCI archive (a tar of an OCI image layout) to `archive`.
///
/// # Errors
/// When a source can't be read or the archive not be written.
pub(crate) fn write_archive(spec: &ImageSpec, archive: &Utf8Path) -> Result<()> {
    let layer = layer(spec)?;
    let layer_digest = digest(&layer);
    let config = ConfigBuilder::default()
        .user(spec.user.clone())
        .env(vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()])
        .entrypoint(spec.entrypoint.clone())
        .build()?;
    let config = ImageConfigurationBuilder::default()
        .architecture("amd64")
        .os("linux")
        .created("1970-01-01T00:00:00Z")
        .config(config)
        .rootfs(RootFsBuilder::default().typ("layers").diff_ids(vec![layer_digest.clone()]).build()?)
        .history(Vec::new())
        .build()?;
    let config = serde_json::to_vec(&config)?;
    let manifest = ImageManifestBuilder::default()
        .schema_version(2u32)
        .media_type(MediaType::ImageManifest)
        .config(descriptor(MediaType::ImageConfig, &config)?)
        .layers(vec![descriptor(MediaType::ImageLayer, &layer)?])
        .build()?;
    let manifest = serde_json::to_vec(&manifest)?;
    let mut entry = descriptor(MediaType::ImageManifest, &manifest)?;
    let (_, tag) = spec.name.rsplit_once(':').context("an image name needs a tag")?;
    let names =
        [("io.containerd.image.name", spec.name.as_str()), ("org.opencontainers.image.ref.name", tag)];
    entry.set_annotations(Some(names.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()));
    let index = ImageIndexBuilder::default()
        .schema_version(2u32)
        .media_type(MediaType::ImageIndex)
        .manifests(vec![entry])
        .build()?;
    // Annotations are a hash map; going through a value sorts the keys.
    let index = serde_json::to_vec(&serde_json::to_value(&index)?)?;
    let blob = |bytes: &[u8]| format!("blobs/{}", digest(bytes).replace(':', "/"));
    let mut tar = tar::Builder::new(Vec::new());
    append(&mut tar, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    for bytes in [&config, &layer, &manifest] {
        append(&mut tar, &blob(bytes), 0o644, bytes)?;
    }
    append(&mut tar, "index.json", 0o644, &index)?;
    let bytes = tar.into_inner()?;
    imp_testkit::files::write_whole(archive, &bytes)
}

fn layer(spec: &ImageSpec) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut directories = std::collections::BTreeSet::new();
    let places = spec.files.iter().map(|f| &f.path).chain(spec.links.iter().map(|(p, _)| p));
    for path in places {
        directories
            .extend(path.ancestors().skip(1).filter(|p| !p.as_str().is_empty()).map(Utf8Path::to_owned));
    }
    for dir in directories {
        let mut header = header(tar::EntryType::Directory, 0o755, 0);
        tar.append_data(&mut header, format!("{dir}/"), std::io::empty())?;
    }
    for file in &spec.files {
        let bytes = fs::read(&file.source).with_context(|| format!("read {}", file.source))?;
        append(&mut tar, file.path.as_str(), file.mode, &bytes)?;
    }
    for (path, target) in &spec.links {
        let mut header = header(tar::EntryType::Symlink, 0o777, 0);
        tar.append_link(&mut header, path.as_str(), target)?;
    }
    Ok(tar.into_inner()?)
}

fn append(tar: &mut tar::Builder<Vec<u8>>, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
    let mut header = header(tar::EntryType::Regular, mode, bytes.len() as u64);
    tar.append_data(&mut header, path, bytes).with_context(|| format!("pack {path}"))
}

fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(EPOCH);
    header.set_size(size);
    header
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

fn descriptor(media_type: MediaType, bytes: &[u8]) -> Result<oci_spec::image::Descriptor> {
    let digest: Digest = digest(bytes).parse()?;
    Ok(DescriptorBuilder::default().media_type(media_type).digest(digest).size(bytes.len() as u64).build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_input_gives_the_same_archive() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Utf8Path::from_path(dir.path()).unwrap();
        let write = |name: &str, text: &str| {
            fs::write(dir.join("program"), text).unwrap();
            let spec = ImageSpec {
                name: "imp.dev/x:dev".into(),
                files: vec![ImageFile { path: "usr/bin/x".into(), source: dir.join("program"), mode: 0o755 }],
                links: vec![("bin".into(), "usr/bin".into())],
                entrypoint: vec!["/usr/bin/x".into()],
                user: "65532:65532".into(),
            };
            write_archive(&spec, &dir.join(name)).unwrap();
            fs::read(dir.join(name)).unwrap()
        };
        let (a, b, c) = (write("a", "1"), write("b", "1"), write("c", "2"));
        assert_eq!(a, b);
        assert_ne!(a, c);
    }
}
