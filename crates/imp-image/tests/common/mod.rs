//! What the tests of images share.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

pub mod erofs;

use camino::{Utf8Path, Utf8PathBuf};
use erofs::Node;
use imp_image::{EnsureRequest, ImageError, ImageStore, Progress, PullPolicy, RootDisk};
use imp_testkit::images::{Compression, ImageBuilder, LayerBuilder};
use std::collections::BTreeMap;
use std::process::Command;
use tokio::sync::watch;

/// A directory that is removed at the end.
pub struct Dir(tempfile::TempDir);

impl Dir {
    pub fn new() -> Self {
        Self(tempfile::Builder::new().prefix("imp-image-").tempdir().expect("a directory"))
    }

    pub fn path(&self) -> &Utf8Path {
        Utf8Path::from_path(self.0.path()).expect("UTF-8")
    }

    pub fn join(&self, name: &str) -> Utf8PathBuf {
        self.path().join(name)
    }
}

pub fn request(reference: &str) -> EnsureRequest {
    EnsureRequest {
        source: reference.parse().expect(reference),
        policy: PullPolicy::IfNotPresent,
        architecture: "amd64".into(),
        docker_config_json: Vec::new(),
    }
}

pub async fn ensure(store: &ImageStore, request: &EnsureRequest) -> Result<RootDisk, ImageError> {
    store.ensure(request, watch::channel(Progress::default()).0).await
}

/// Writes layers as a layout and returns its reference.
pub fn layout(directory: &Utf8Path, layers: &[&LayerBuilder]) -> String {
    let image = layers
        .iter()
        .fold(ImageBuilder::new(), |image, layer| image.layer(layer.finish(), Compression::Gzip));
    std::fs::create_dir_all(directory).expect("directory");
    image.write(directory, "t").expect("layout");
    format!("oci:{directory}:t")
}

/// Lays layers out in a store of their own and reads the disk back.
pub async fn tree_of(layers: &[&LayerBuilder]) -> Result<BTreeMap<Vec<u8>, Node>, ImageError> {
    let dir = Dir::new();
    let reference = layout(&dir.join("layout"), layers);
    let store = ImageStore::open(&dir.join("store"))?;
    let disk = ensure(&store, &request(&reference)).await?;
    fsck(&disk.path);
    Ok(erofs::read(&disk.path))
}

/// erofs-utils finds nothing wrong.
pub fn fsck(disk: &Utf8Path) {
    let output =
        Command::new("fsck.erofs").arg(disk).output().expect("fsck.erofs (Debian package erofs-utils)");
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "fsck.erofs {disk}: {text}");
}

/// The names in a tree, as text.
pub fn names(tree: &BTreeMap<Vec<u8>, Node>) -> Vec<String> {
    tree.keys().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
}

/// All causes of an error on one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Files in a directory and below.
pub fn files(directory: &Utf8Path) -> Vec<Utf8PathBuf> {
    let mut found = Vec::new();
    for entry in directory.read_dir_utf8().expect("directory") {
        let entry = entry.expect("entry");
        if entry.file_type().expect("type").is_dir() {
            found.extend(files(entry.path()));
        } else {
            found.push(entry.into_path());
        }
    }
    found.sort();
    found
}
