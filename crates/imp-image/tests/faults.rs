//! Networks and registries that fail: what is pulled is right or nothing is, and the error says whose fault it is.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;
#[path = "common/fake.rs"]
mod fake;

use common::{Dir, chain, ensure, files, request};
use fake::{Fake, Faults};
use imp_image::{EnsureRequest, ImageError, ImageStore, Limits, Progress, PullPolicy, StoreOptions};
use imp_testkit::images::{Compression, ImageBuilder, LayerBuilder};
use tokio::sync::watch;

/// No disk, nothing half-done. Blobs that came whole may stay.
fn assert_clean(dir: &Dir) {
    for place in ["store/tmp", "store/disks"] {
        assert_eq!(files(&dir.join(place)), Vec::<camino::Utf8PathBuf>::new(), "{place}");
    }
}

async fn fails(layer_bytes: usize, faults: Faults) -> (ImageError, Fake) {
    let fake = Fake::start(layer_bytes, faults).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let error = ensure(&store, &request(&fake.reference())).await.expect_err("must fail");
    assert_clean(&dir);
    (error, fake)
}

async fn works(layer_bytes: usize, faults: Faults) -> Fake {
    let fake = Fake::start(layer_bytes, faults).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let (sender, progress) = watch::channel(Progress::default());
    let disk = store
        .ensure(&request(&fake.reference()), sender)
        .await
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(common::erofs::read(&disk.path)[&b"noise"[..]].data.len(), layer_bytes);
    let progress = *progress.borrow();
    assert_eq!(progress.pulled_bytes, progress.total_bytes);
    assert!(progress.total_bytes > layer_bytes as u64);
    fake
}

#[tokio::test]
async fn a_changed_byte_is_found() {
    let (error, _) = fails(100_000, Faults { wrong_byte: true, ..Faults::default() }).await;
    assert!(matches!(error, ImageError::Invalid { .. }), "{error}");
    assert!(chain(&error).contains("the digest of the configuration does not match"), "{}", chain(&error));
}

#[tokio::test]
async fn more_bytes_than_promised_are_found() {
    let (error, _) = fails(100_000, Faults { one_more: true, ..Faults::default() }).await;
    assert!(chain(&error).contains("the size of the configuration does not match"), "{}", chain(&error));
}

#[tokio::test]
async fn a_manifest_that_is_not_what_was_asked_for_is_found() {
    let fake = Fake::start(10, Faults { manifest: Some(b"{}".to_vec()), ..Faults::default() }).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let pinned = format!("{}@sha256:{}", fake.reference().trim_end_matches(":v1"), "0".repeat(64));
    // The fake knows no such digest under its own name, so ask for a digest that it has.
    let known = fake.reference();
    let error = ensure(&store, &request(&known)).await.expect_err("no manifest");
    assert!(chain(&error).contains("neither a configuration nor manifests"), "{}", chain(&error));
    let error = ensure(&store, &request(&pinned)).await.expect_err("not there");
    assert!(matches!(error, ImageError::NotFound { .. }), "{error}");
    assert!(chain(&error).contains("MANIFEST_UNKNOWN"), "{}", chain(&error));
}

#[tokio::test]
async fn a_download_is_resumed_after_a_cut() {
    let fake = works(300_000, Faults { cut_after: Some(100_000), ..Faults::default() }).await;
    let resumed = fake.log().iter().filter(|line| line.starts_with("blobs bytes=")).count();
    assert!(resumed >= 2, "{:?}", fake.log());
}

#[tokio::test]
async fn a_download_is_resumed_where_the_registry_knows_no_ranges() {
    // Cut later each time is not possible here, so the cut must be past the layer's half at least once.
    let fake =
        Fake::start(50_000, Faults { no_ranges: true, cut_after: Some(60_000), ..Faults::default() }).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    ensure(&store, &request(&fake.reference())).await.expect("in one piece");
    let (error, fake) =
        fails(100_000, Faults { no_ranges: true, cut_after: Some(60_000), ..Faults::default() }).await;
    assert!(matches!(error, ImageError::Failed { .. }) && error.retryable(), "{error}");
    assert!(chain(&error).contains("broke off after 60000 of"), "{}", chain(&error));
    assert!(fake.count("blobs") < 12, "tries are bounded: {:?}", fake.log());
}

#[tokio::test]
async fn a_registry_in_trouble_is_a_passing_failure() {
    let (error, fake) = fails(10, Faults { status: Some(503), ..Faults::default() }).await;
    assert!(error.retryable() && chain(&error).contains("503"), "{}", chain(&error));
    assert!((2..12).contains(&fake.count("blobs")));
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = nobody.local_addr().unwrap();
    drop(nobody);
    let error = ensure(&store, &request(&format!("{address}/app:v1"))).await.expect_err("nobody there");
    assert!(error.retryable() && chain(&error).contains("refused"), "{}", chain(&error));
}

#[tokio::test]
async fn fr15_tokens_are_fetched_and_renewed_when_they_run_out() {
    let faults = Faults { token_uses: Some(2), cut_after: Some(100_000), ..Faults::default() };
    let fake = Fake::start(500_000, faults).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let address = fake.reference().split('/').next().unwrap().to_owned();
    let secret = |password: &str| {
        let entry = serde_json::json!({"username": "user", "password": password});
        serde_json::json!({"auths": {address.as_str(): entry}}).to_string().into_bytes()
    };
    let wrong = EnsureRequest { docker_config_json: vec![secret("wrong")], ..request(&fake.reference()) };
    let error = ensure(&store, &wrong).await.expect_err("wrong password");
    assert!(matches!(error, ImageError::Unauthorized { .. }) && !error.retryable(), "{error}");
    assert!(!chain(&error).contains("wrong"), "{}", chain(&error));
    // The right one is tried after the wrong one.
    let both = EnsureRequest { docker_config_json: vec![secret("wrong"), secret("password")], ..wrong };
    ensure(&store, &both).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert!(fake.count("token") >= 4, "{:?}", fake.log());
}

#[tokio::test]
async fn who_is_told_to_come_later_comes_later() {
    let start = std::time::Instant::now();
    let fake = works(10_000, Faults { too_many: 2, ..Faults::default() }).await;
    // Configuration and layer; each refusal costs the second that was asked for, where our own first pause is a quarter of it.
    assert_eq!(fake.count("blobs"), 4, "{:?}", fake.log());
    assert!(start.elapsed() >= std::time::Duration::from_secs(2));
}

#[tokio::test]
async fn credentials_do_not_follow_a_redirect_to_another_host() {
    let storage = Fake::start(100_000, Faults::default()).await;
    let faults =
        Faults { token_uses: Some(99), redirect: Some(storage.address().to_owned()), ..Faults::default() };
    let fake = Fake::start(100_000, faults).await;
    let entry = serde_json::json!({"username": "user", "password": "password"});
    let secret = serde_json::json!({"auths": {fake.address(): entry}}).to_string().into_bytes();
    let wanted = EnsureRequest { docker_config_json: vec![secret], ..request(&fake.reference()) };
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    ensure(&store, &wanted).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert!(storage.count("blobs") >= 2 && fake.authorized().iter().any(|path| path.contains("blobs")));
    assert_eq!(storage.authorized(), [""; 0]);
}

#[tokio::test]
async fn two_who_ask_at_once_fetch_once() {
    let fake = Fake::start(100_000, Faults { stall: true, ..Faults::default() }).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    // Always looks nothing up first, so that both have joined before anything is answered.
    let wish = EnsureRequest { policy: PullPolicy::Always, ..request(&fake.reference()) };
    let (one, two, ()) = tokio::join!(ensure(&store, &wish), ensure(&store, &wish), async {
        fake.wait_open(1).await;
        fake.release();
    });
    assert_eq!(one.expect("one").digest, two.expect("two").digest);
    assert_eq!((fake.count("manifests"), fake.count("blobs")), (1, 2), "{:?}", fake.log());
}

#[tokio::test]
async fn who_stays_gets_the_image_when_the_first_leaves() {
    let fake = Fake::start(100_000, Faults { stall: true, ..Faults::default() }).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    // Always looks nothing up first, so that one poll is enough to join.
    let wish = EnsureRequest { policy: PullPolicy::Always, ..request(&fake.reference()) };
    let (other_store, other_wish) = (store.clone(), wish.clone());
    let first = tokio::spawn(async move { ensure(&other_store, &other_wish).await });
    fake.wait_open(1).await;
    let mut second = Box::pin(ensure(&store, &wish));
    assert!(futures::poll!(&mut second).is_pending());
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    fake.release();
    second.await.expect("the image");
    assert_eq!((fake.count("manifests"), fake.count("blobs")), (1, 2), "{:?}", fake.log());
}

#[tokio::test]
async fn fr53_a_download_that_nobody_wants_is_stopped_and_leaves_nothing() {
    let fake = Fake::start(100_000, Faults { stall: true, ..Faults::default() }).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let wish = request(&fake.reference());
    let (first, second) = (store.clone(), store.clone());
    let (one, two) = (wish.clone(), wish.clone());
    let first = tokio::spawn(async move { ensure(&first, &one).await });
    let second = tokio::spawn(async move { ensure(&second, &two).await });
    fake.wait_open(1).await;
    // The other one goes on waiting: the download must too.
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    fake.wait_open(1).await;
    second.abort();
    assert!(second.await.unwrap_err().is_cancelled());
    fake.wait_open(0).await;
    // The thread that writes sees it soon; waiting for the file's removal is waiting for the directory to change.
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
    while !files(&dir.join("store/tmp")).is_empty() {
        assert!(tokio::time::Instant::now() < deadline, "the partial file is still there");
        tokio::task::yield_now().await;
    }
    assert_clean(&dir);
    // And it can be had afterwards.
    fake.release();
    ensure(&store, &wish).await.expect("a new pull");
}

#[tokio::test]
async fn bombs_hit_limits() {
    let zeros = vec![0; 64 << 20];
    let mut layer = LayerBuilder::new();
    layer.file("zeros", 0o644, &zeros);
    let image = ImageBuilder::new().layer(layer.finish(), Compression::Zstd);
    let fake = Fake::serve(&image, Faults::default()).await;
    let default = Limits::default();
    for (limits, words) in [
        (
            Limits { ratio_free_bytes: 1 << 20, compression_ratio: 100, ..default.clone() },
            "100 bytes for each compressed byte",
        ),
        (Limits { layer_bytes: 10 << 20, ..default.clone() }, "10485760 bytes uncompressed"),
        (Limits { disk_bytes: 10 << 20, ..default.clone() }, "10485760 bytes of disk"),
        (Limits { layer_compressed_bytes: 100, ..default.clone() }, "100 bytes compressed"),
        (Limits { entries: 0, ..default.clone() }, "0 entries"),
        (Limits { metadata_bytes: 3, ..default.clone() }, "3 bytes of names"),
        (Limits { manifest_bytes: 10, ..default.clone() }, "10 bytes"),
        (Limits { config_bytes: 10, ..default.clone() }, "10 bytes"),
        (Limits { layers: 0, ..default.clone() }, "0 layers"),
    ] {
        let dir = Dir::new();
        let options = StoreOptions { limits, ..StoreOptions::default() };
        let store = ImageStore::open_with(&dir.join("store"), options).unwrap();
        let error = ensure(&store, &request(&fake.reference())).await.expect_err(words);
        assert!(matches!(error, ImageError::Invalid { .. }), "{words}: {error}");
        assert!(chain(&error).contains(&format!("more than {words}")), "{words}: {}", chain(&error));
        assert_clean(&dir);
    }
    // Within the limits the same image is laid out, its zeros as a hole.
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    ensure(&store, &request(&fake.reference())).await.expect("a disk");
    assert!(store.list().await.unwrap()[0].disk_bytes < 1 << 20);
}

#[tokio::test]
async fn a_damaged_layer_in_the_store_is_fetched_again() {
    let fake = Fake::start(100_000, Faults::default()).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let wish = request(&fake.reference());
    drop(ensure(&store, &wish).await.expect("a disk"));
    let layer = files(&dir.join("store/blobs"))
        .into_iter()
        .max_by_key(|path| path.metadata().unwrap().len())
        .unwrap();
    std::fs::write(&layer, b"damaged").unwrap();
    for disk in files(&dir.join("store/disks")) {
        std::fs::remove_file(disk).unwrap();
    }
    let error = ensure(&store, &wish).await.expect_err("the copy is damaged");
    assert!(error.retryable() && chain(&error).contains("damaged"), "{}", chain(&error));
    ensure(&store, &wish).await.expect("fetched again");
}

#[tokio::test]
async fn policies_decide_who_is_asked() {
    let fake = Fake::start(1000, Faults::default()).await;
    let dir = Dir::new();
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let with = |policy| EnsureRequest { policy, ..request(&fake.reference()) };
    let error = ensure(&store, &with(PullPolicy::Never)).await.expect_err("not here");
    assert!(matches!(error, ImageError::NotCached { .. }), "{error}");
    assert_eq!(fake.log(), Vec::<String>::new());
    let disk = ensure(&store, &with(PullPolicy::IfNotPresent)).await.expect("pulled");
    let requests = fake.log().len();
    for policy in [PullPolicy::IfNotPresent, PullPolicy::Never] {
        assert_eq!(ensure(&store, &with(policy)).await.expect("cached").digest, disk.digest);
    }
    assert_eq!(fake.log().len(), requests, "nobody was asked");
    ensure(&store, &with(PullPolicy::Always)).await.expect("asked");
    assert_eq!((fake.count("manifests"), fake.log().len()), (2, requests + 1), "the manifest alone");
}
