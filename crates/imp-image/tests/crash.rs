//! What is left when the process dies in the middle, or the disk is full.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;

use common::{Dir, chain, ensure, files, request};
use imp_image::{ImageError, ImageStore};
use imp_testkit::images::LayerBuilder;
use sha2::Digest as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the process that is to be killed: where store and image are.
const VICTIM: &str = "IMP_IMAGE_TEST_VICTIM";

fn big_layout(dir: &Dir) -> String {
    let mut layer = LayerBuilder::new();
    // Nothing that gzip could make smaller.
    let noise: Vec<u8> =
        (0_u64..).flat_map(|i| sha2::Sha256::digest(i.to_le_bytes())).take(40 << 20).collect();
    layer.file("noise", 0o644, &noise);
    common::layout(&dir.join("layout"), &[&layer])
}

/// Not a test by itself: the other one runs it in a process of its own.
#[tokio::test]
async fn victim() {
    let Ok(place) = std::env::var(VICTIM) else { return };
    let (root, reference) = place.split_once('|').unwrap();
    let store = ImageStore::open(root.into()).unwrap();
    ensure(&store, &request(reference)).await.unwrap();
}

#[tokio::test]
async fn killed_in_the_middle_the_store_is_clean_when_opened_again() {
    let dir = Dir::new();
    let reference = big_layout(&dir);
    let root = dir.join("store");
    let mut interrupted = 0;
    // Kill at growing amounts of written bytes: in the import of the layer, between the two, in the disk.
    for megabytes in [1, 5, 20, 45, 60] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim"])
            .env(VICTIM, format!("{root}|{reference}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the victim hangs");
            let written: u64 = ["tmp", "blobs"]
                .iter()
                .filter(|place| root.join(place).exists())
                .flat_map(|place| files(&root.join(place)))
                .filter_map(|path| path.metadata().ok())
                .map(|metadata| metadata.len())
                .sum();
            if written >= megabytes << 20 {
                child.kill().unwrap();
                interrupted += 1;
            }
            std::thread::yield_now();
        }
        let store = ImageStore::open(&root).unwrap();
        assert_eq!(files(&root.join("tmp")), Vec::<camino::Utf8PathBuf>::new(), "after {megabytes} MiB");
        // What is there is whole.
        for image in store.list().await.unwrap() {
            common::fsck(&store.lookup(&image.digest).await.unwrap().expect("whole").path);
        }
        drop(store);
        for disk in files(&root.join("disks")) {
            std::fs::remove_file(disk).unwrap();
        }
    }
    assert!(interrupted >= 3, "only {interrupted} of the victims were caught");
    let store = ImageStore::open(&root).unwrap();
    let disk = ensure(&store, &request(&reference)).await.unwrap();
    common::fsck(&disk.path);
}

#[tokio::test]
async fn a_full_disk_is_told_and_leaves_nothing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: mounting a small file system needs root");
        return;
    }
    let dir = Dir::new();
    let reference = big_layout(&dir);
    let mount = dir.join("small");
    std::fs::create_dir(&mount).unwrap();
    // Once too small for the layer, once for the disk beside it. The store is used through /proc, so that nobody else sees the mount.
    for megabytes in [8, 60] {
        let mut holder = Command::new("unshare")
            .args([
                "-m",
                "sh",
                "-c",
                "mount -t tmpfs -o size=\"$1\"m none \"$2\" && echo ready && exec cat",
                "sh",
            ])
            .args([&megabytes.to_string(), mount.as_str()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(holder.stdout.as_mut().unwrap()), &mut line)
            .unwrap();
        assert_eq!(line, "ready\n");
        let root: camino::Utf8PathBuf = format!("/proc/{}/root{mount}", holder.id()).into();
        let store = ImageStore::open(&root).unwrap();
        let error = ensure(&store, &request(&reference)).await.expect_err("no room");
        assert!(matches!(error, ImageError::Io { .. }) && error.retryable(), "{error}");
        assert!(chain(&error).contains("No space left on device"), "{}", chain(&error));
        assert_eq!(files(&root.join("tmp")), Vec::<camino::Utf8PathBuf>::new());
        assert_eq!(files(&root.join("disks")), Vec::<camino::Utf8PathBuf>::new());
        drop(store);
        drop(holder.stdin.take());
        holder.wait().unwrap();
    }
}
