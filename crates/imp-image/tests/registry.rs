//! Images from a real registry, in every form that a registry may have them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;

use common::{Dir, chain, ensure, request};
use imp_image::{EnsureRequest, ImageError, ImageStore, Progress, PullPolicy};
use imp_testkit::images::{self, Compression, ImageBuilder, LayerBuilder, Layout, write_blob, write_index};
use imp_testkit::registry::Registry;
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::sync::watch;

fn marked(mark: &str) -> LayerBuilder {
    let mut layer = LayerBuilder::new();
    layer.file("mark", 0o644, mark.as_bytes());
    layer
}

fn layout_of(dir: &Dir, image: &ImageBuilder) -> Layout {
    image.write(dir.path(), "t").unwrap();
    Layout { directory: dir.path().to_owned(), tag: "t".into() }
}

async fn mark_of(reference: &str, store: &ImageStore) -> Result<String, ImageError> {
    let disk = ensure(store, &request(reference)).await?;
    common::fsck(&disk.path);
    Ok(String::from_utf8(common::erofs::read(&disk.path)[&b"mark"[..]].data.clone()).unwrap())
}

#[tokio::test]
async fn fr15_private_images_need_the_right_secret() {
    let registry = Registry::start_with_login("imp", "open sesame").unwrap();
    let reference = registry.push(&images::busybox().unwrap(), "team/busybox:v1").unwrap();
    let dir = Dir::new();
    let store = ImageStore::open(dir.path()).unwrap();
    let with =
        |documents: Vec<Vec<u8>>| EnsureRequest { docker_config_json: documents, ..request(&reference) };
    let secret = |key: String, password: &str| {
        json!({"auths": {key: {"username": "imp", "password": password}}}).to_string().into_bytes()
    };
    let address = registry.address();
    for documents in [
        vec![],
        vec![secret(address.into(), "wrong")],
        vec![secret("registry.example.com".into(), "open sesame")],
        vec![secret(format!("{address}/other"), "open sesame")],
    ] {
        let error = ensure(&store, &with(documents)).await.expect_err("not for everyone");
        assert!(
            matches!(&error, ImageError::Unauthorized { registry, .. } if registry == address),
            "{error}"
        );
        assert!(!error.retryable());
        assert!(!format!("{error:?}{}", chain(&error)).contains("sesame"));
    }
    for key in [
        address.into(),
        format!("http://{address}/v2/"),
        format!("{address}/team"),
        "*.0.0.1".to_owned() + &address[9..],
    ] {
        let dir = Dir::new();
        let store = ImageStore::open(dir.path()).unwrap();
        let documents = vec![secret(address.into(), "wrong"), secret(key.clone(), "open sesame")];
        let disk =
            ensure(&store, &with(documents)).await.unwrap_or_else(|error| panic!("{key}: {}", chain(&error)));
        assert_eq!(disk.config.config().as_ref().unwrap().cmd().as_deref(), Some(&["sh".to_owned()][..]));
        // No secret is anywhere in the store.
        for file in common::files(dir.path()).into_iter().filter(|f| f.metadata().unwrap().len() < 1 << 20) {
            assert!(!String::from_utf8_lossy(&std::fs::read(&file).unwrap()).contains("sesame"), "{file}");
        }
    }
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let registry = Registry::start().unwrap();
    let dir = Dir::new();
    let store = ImageStore::open(dir.path()).unwrap();
    for name in ["nothing:v1", "nothing"] {
        let error = ensure(&store, &request(&registry.reference(name))).await.expect_err("nothing");
        assert!(matches!(error, ImageError::NotFound { .. }) && !error.retryable(), "{error}");
    }
    assert!(store.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_second_vm_of_an_image_costs_no_copy_and_no_time() {
    let registry = Registry::start().unwrap();
    let reference = registry.push(&images::busybox().unwrap(), "busybox:v1").unwrap();
    let dir = Dir::new();
    let store = ImageStore::open(dir.path()).unwrap();
    let (sender, progress) = watch::channel(Progress::default());
    let first = store.ensure(&request(&reference), sender).await.unwrap();
    let told = *progress.borrow();
    assert!(told.total_bytes > 500_000 && told.pulled_bytes == told.total_bytes, "{told:?}");
    // The best of some: other tests use the machine too.
    let mut best = Duration::MAX;
    for _ in 0..10 {
        let start = Instant::now();
        let again = ensure(&store, &request(&reference)).await.unwrap();
        best = best.min(start.elapsed());
        assert_eq!(again.path, first.path);
    }
    assert!(best < Duration::from_millis(10), "{best:?}");
    let by_digest = store.lookup(&first.digest).await.unwrap().expect("known");
    assert_eq!(by_digest.path, first.path);
    // Without the registry too, also after the store is opened anew.
    drop(registry);
    let reopened = ImageStore::open(dir.path()).unwrap();
    assert_eq!(ensure(&reopened, &request(&reference)).await.unwrap().digest, first.digest);
    let error = ensure(&reopened, &EnsureRequest { policy: PullPolicy::Always, ..request(&reference) }).await;
    assert!(error.expect_err("the registry is gone").retryable());
}

#[tokio::test]
async fn a_tag_that_moves_is_followed_by_always_only() {
    let registry = Registry::start().unwrap();
    let (one, two) = (Dir::new(), Dir::new());
    let dir = Dir::new();
    let store = ImageStore::open(dir.path()).unwrap();
    let image = |mark: &str| ImageBuilder::new().layer(marked(mark).finish(), Compression::Gzip);
    let reference = registry.push(&layout_of(&one, &image("one")), "app:v1").unwrap();
    assert_eq!(mark_of(&reference, &store).await.unwrap(), "one");
    let pinned = store.list().await.unwrap()[0].digest.clone();
    registry.push(&layout_of(&two, &image("two")), "app:v1").unwrap();
    assert_eq!(mark_of(&reference, &store).await.unwrap(), "one");
    let always = EnsureRequest { policy: PullPolicy::Always, ..request(&reference) };
    assert_ne!(ensure(&store, &always).await.unwrap().digest, pinned);
    assert_eq!(mark_of(&reference, &store).await.unwrap(), "two");
    let by_digest = format!("{}@{pinned}", registry.reference("app"));
    assert_eq!(mark_of(&by_digest, &store).await.unwrap(), "one");
}

#[tokio::test]
async fn fr106_layers_of_every_compression_and_dockers_manifests_are_pulled() {
    let registry = Registry::start().unwrap();
    let store_dir = Dir::new();
    let store = ImageStore::open(store_dir.path()).unwrap();
    for compression in [Compression::Gzip, Compression::Zstd, Compression::None] {
        let dir = Dir::new();
        let mark = format!("{compression:?}");
        let layout = layout_of(&dir, &ImageBuilder::new().layer(marked(&mark).finish(), compression));
        let reference = registry.push(&layout, &format!("app:{}", mark.to_lowercase())).unwrap();
        assert_eq!(mark_of(&reference, &store).await.unwrap(), mark);
    }
    let dir = Dir::new();
    let layout = layout_of(&dir, &ImageBuilder::new().layer(marked("docker").finish(), Compression::Gzip));
    let reference = registry.push_with(&layout, "app:docker", &["--format", "v2s2"]).unwrap();
    assert_eq!(mark_of(&reference, &store).await.unwrap(), "docker");
    let dir = Dir::new();
    let mut image = ImageBuilder::new();
    for index in 0..200 {
        let mut layer = marked(&index.to_string());
        layer.file(&format!("layer{index}"), 0o644, b"").whiteout(&format!(".wh.layer{}", index.max(1) - 1));
        image = image.layer(layer.finish(), Compression::Gzip);
    }
    let reference = registry.push(&layout_of(&dir, &image), "app:many").unwrap();
    assert_eq!(mark_of(&reference, &store).await.unwrap(), "199");
}

/// A layout whose index entry is that document.
fn indexed(dir: &Dir, media_type: &str, document: &serde_json::Value) -> String {
    let entry = write_blob(dir.path(), media_type, document.to_string().as_bytes()).unwrap();
    write_index(dir.path(), entry, "t").unwrap();
    format!("oci:{}:t", dir.path())
}

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

#[tokio::test]
async fn fr106_nested_indexes_attestations_and_other_platforms() {
    let store_dir = Dir::new();
    let store = ImageStore::open(store_dir.path()).unwrap();
    let dir = Dir::new();
    let build = |architecture: &str| {
        let image = ImageBuilder::new()
            .architecture(architecture)
            .layer(marked(architecture).finish(), Compression::Gzip);
        image.write_blobs(dir.path()).unwrap()
    };
    let (amd64, arm64) = (build("amd64"), build("arm64"));
    let mut attestation = build("s390x");
    attestation["platform"] = json!({"os": "unknown", "architecture": "unknown"});
    attestation["annotations"] = json!({"vnd.docker.reference.type": "attestation-manifest"});
    let inner = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [attestation, arm64, amd64]});
    let inner = write_blob(dir.path(), INDEX, inner.to_string().as_bytes()).unwrap();
    let outer = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [inner]});
    let reference = indexed(&dir, INDEX, &outer);
    assert_eq!(mark_of(&reference, &store).await.unwrap(), "amd64");
    for (architecture, mark) in [("arm64", "arm64"), ("arm64/v8", "arm64")] {
        let wish = EnsureRequest { architecture: architecture.into(), ..request(&reference) };
        let disk = ensure(&store, &wish).await.unwrap();
        assert_eq!(common::erofs::read(&disk.path)[&b"mark"[..]].data, mark.as_bytes());
    }
    let wish = EnsureRequest { architecture: "s390x".into(), ..request(&reference) };
    let error = ensure(&store, &wish).await.expect_err("only an attestation says s390x");
    assert!(matches!(error, ImageError::NotFound { .. }), "{error}");
    assert!(chain(&error).contains("linux/arm64, linux/amd64"), "{}", chain(&error));
    // A single manifest says its platform in the configuration alone.
    let mut other = build("arm64");
    other.as_object_mut().unwrap().remove("platform");
    write_index(dir.path(), other, "t").unwrap();
    let error = ensure(&store, &request(&reference)).await.expect_err("another architecture");
    assert!(chain(&error).contains("it is for linux/arm64, not for linux/amd64"), "{}", chain(&error));
}

#[tokio::test]
async fn fr106_an_index_in_a_registry_gives_each_architecture_its_image() {
    let registry = Registry::start().unwrap();
    let (dir, store_dir) = (Dir::new(), Dir::new());
    let mut manifests = Vec::new();
    for architecture in ["arm64", "amd64", "s390x"] {
        let image = ImageBuilder::new()
            .architecture(architecture)
            .layer(marked(architecture).finish(), Compression::Gzip);
        manifests.push(image.write_blobs(dir.path()).unwrap());
    }
    // As buildx adds them.
    manifests[2]["platform"] = json!({"os": "unknown", "architecture": "unknown"});
    manifests[2]["annotations"] = json!({"vnd.docker.reference.type": "attestation-manifest"});
    indexed(&dir, INDEX, &json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}));
    let layout = Layout { directory: dir.path().to_owned(), tag: "t".into() };
    let reference = registry.push(&layout, "app:multi").unwrap();
    let store = ImageStore::open(store_dir.path()).unwrap();
    for architecture in ["amd64", "arm64"] {
        let wish = EnsureRequest { architecture: architecture.into(), ..request(&reference) };
        let disk = ensure(&store, &wish).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        assert_eq!(common::erofs::read(&disk.path)[&b"mark"[..]].data, architecture.as_bytes());
    }
    let wish = EnsureRequest { architecture: "s390x".into(), ..request(&reference) };
    assert!(matches!(ensure(&store, &wish).await, Err(ImageError::NotFound { .. })));
}

#[tokio::test]
async fn fr106_dockers_media_types_with_zstd() {
    let (dir, store_dir) = (Dir::new(), Dir::new());
    let image = ImageBuilder::new().layer(marked("docker").finish(), Compression::Zstd);
    let descriptor = image.write_blobs(dir.path()).unwrap();
    let hex = descriptor["digest"].as_str().unwrap().trim_start_matches("sha256:");
    let manifest = std::fs::read_to_string(dir.join(&format!("blobs/sha256/{hex}"))).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let docker = "application/vnd.docker.distribution.manifest.v2+json";
    manifest["mediaType"] = docker.into();
    manifest["config"]["mediaType"] = "application/vnd.docker.container.image.v1+json".into();
    manifest["layers"][0]["mediaType"] = "application/vnd.docker.image.rootfs.diff.tar.zstd".into();
    let reference = indexed(&dir, docker, &manifest);
    let store = ImageStore::open(store_dir.path()).unwrap();
    assert_eq!(mark_of(&reference, &store).await.unwrap(), "docker");
}

#[tokio::test]
async fn fr106_what_is_no_image_is_refused_clearly() {
    let store_dir = Dir::new();
    let store = ImageStore::open(store_dir.path()).unwrap();
    let layer = json!({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": format!("sha256:{}", "0".repeat(64)), "size": 1});
    let config = json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": layer["digest"], "size": 1});
    let with = |key: &str, value: &str| {
        let mut changed = layer.clone();
        changed[key] = value.into();
        json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [changed]})
    };
    let helm = json!({"schemaVersion": 2, "config": {"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": layer["digest"], "size": 1}, "layers": []});
    let both = json!({"schemaVersion": 2, "manifests": [], "layers": [], "config": config});
    let deep = (0..6).fold(with("size", "x"), |document, _| document);
    for (document, words) in [
        (with("mediaType", "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"), "not distributable"),
        (
            with("mediaType", "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"),
            "not distributable",
        ),
        (
            with("mediaType", "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"),
            "unsupported media type",
        ),
        (with("digest", "sha512:00"), "the only algorithm that is supported"),
        (helm, "it is an artifact of type \"application/vnd.cncf.helm.config.v1+json\""),
        (both, "a manifest and an index at the same time"),
        (json!({"schemaVersion": 1, "fsLayers": []}), "schema 1"),
        (json!([]), "manifest"),
        (deep, "manifest"),
    ] {
        let dir = Dir::new();
        let reference = indexed(&dir, MANIFEST, &document);
        let error = ensure(&store, &request(&reference)).await.expect_err(words);
        assert!(matches!(error, ImageError::Invalid { .. }), "{words}: {error}");
        assert!(chain(&error).contains(words), "{words}: {}", chain(&error));
    }
}

#[tokio::test]
async fn archives_hold_the_same_image_as_their_layout() {
    let layout = images::busybox().unwrap();
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let mut disks =
        vec![std::fs::read(ensure(&store, &request(&layout.reference())).await.unwrap().path).unwrap()];
    for (transport, tag) in [("oci-archive", "v1"), ("docker-archive", "busybox:v1")] {
        let file = dir.join(&format!("{transport}.tar"));
        let target = format!("{transport}:{file}:{tag}");
        let output = std::process::Command::new("skopeo")
            .args(["copy", "--quiet", &layout.reference(), &target])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for reference in [target, format!("{transport}:{file}")] {
            let disk = ensure(&store, &request(&reference))
                .await
                .unwrap_or_else(|e| panic!("{reference}: {}", chain(&e)));
            disks.push(std::fs::read(disk.path).unwrap());
        }
        let error =
            ensure(&store, &request(&format!("{transport}:{file}:other"))).await.expect_err("no such tag");
        assert!(chain(&error).contains("v1"), "{}", chain(&error));
    }
    assert!(disks.windows(2).all(|pair| pair[0] == pair[1]));
}

#[tokio::test]
async fn images_in_use_are_kept_and_others_collected() {
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let mut disks = Vec::new();
    for mark in ["one", "two"] {
        let layers = [marked(mark)];
        let reference = common::layout(&dir.join(mark), &[&layers[0]]);
        disks.push(ensure(&store, &request(&reference)).await.unwrap());
    }
    let (used, unused) = (disks.remove(0), disks.remove(0));
    let digest = unused.digest.clone();
    assert!(!store.remove(&digest).await.unwrap(), "held");
    // Another process (here: another store) respects what this one holds.
    let other = ImageStore::open(&dir.join("store")).unwrap();
    assert_eq!(other.collect(Duration::ZERO).await.unwrap().disks, 0);
    assert!(other.list().await.unwrap().iter().all(|image| image.in_use));
    drop(unused);
    let report = other.collect(Duration::ZERO).await.unwrap();
    assert_eq!(report.disks, 1);
    assert!(report.blobs >= 2 && report.bytes > 0, "{report:?}");
    assert!(other.lookup(&digest).await.unwrap().is_none());
    let left = store.list().await.unwrap();
    assert_eq!(left.iter().map(|image| &image.digest).collect::<Vec<_>>(), [&used.digest]);
    assert_eq!(left[0].references, [format!("oci:{}:t", dir.join("one"))]);
    assert!(store.lookup(&used.digest).await.unwrap().is_some());
    let digest = used.digest.clone();
    drop(used);
    assert_eq!(store.collect(Duration::from_secs(3600)).await.unwrap().disks, 0, "used a moment ago");
    assert!(store.remove(&digest).await.unwrap());
    assert_eq!(common::files(&dir.join("store/blobs")), Vec::<camino::Utf8PathBuf>::new());
}
