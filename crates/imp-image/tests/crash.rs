//! What is left when the process dies in the middle, or the disk is full.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;

use common::{Dir, chain, ensure, files, request};
use imp_image::{ImageError, ImageStore, Limits, StoreOptions};
use imp_testkit::images::{LayerBuilder, write_blob, write_index};
use serde_json::json;
use sha2::Digest as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the process that is to be killed: where store and image are.
const VICTIM: &str = "IMP_IMAGE_TEST_VICTIM";
/// The same for the process whose memory is measured.
const MEASURED: &str = "IMP_IMAGE_TEST_MEASURED";

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

/// Peak of this process's memory in KiB.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// Not a test by itself either: lays an image out and says how much memory that took.
#[tokio::test]
async fn measured() {
    let Ok(place) = std::env::var(MEASURED) else { return };
    let (root, reference) = place.split_once('|').unwrap();
    let limits = Limits { layer_bytes: 1 << 30, ..Limits::default() };
    let store =
        ImageStore::open_with(root.into(), StoreOptions { limits, ..StoreOptions::default() }).unwrap();
    let before = peak_memory();
    let result = ensure(&store, &request(reference)).await;
    let text = result.map_or_else(|error| chain(&error), |_| "a disk".into());
    std::fs::write(format!("{root}/result"), format!("{} {text}", peak_memory() - before)).unwrap();
}

#[tokio::test]
async fn a_bomb_is_stopped_with_little_memory() {
    let dir = Dir::new();
    // Two GiB of zeros in one file, in a few kilobytes.
    let mut header = LayerBuilder::new();
    header.file("zeros", 0o644, b"");
    let mut tar = header.finish();
    tar.truncate(512);
    tar[124..136].copy_from_slice(b"20000000000\0");
    tar[148..156].fill(b' ');
    let sum: u32 = tar.iter().map(|&byte| u32::from(byte)).sum();
    tar[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    std::io::Write::write_all(&mut encoder, &tar).unwrap();
    let mut zeros = std::io::Read::take(std::io::repeat(0), 2 << 30);
    std::io::copy(&mut zeros, &mut encoder).unwrap();
    let layer = encoder.finish().unwrap();
    assert!(layer.len() < 1 << 20);
    let layer = write_blob(dir.path(), "application/vnd.oci.image.layer.v1.tar+zstd", &layer).unwrap();
    let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}});
    let config = config.to_string();
    let config =
        write_blob(dir.path(), "application/vnd.oci.image.config.v1+json", config.as_bytes()).unwrap();
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": [layer]});
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = write_blob(dir.path(), media_type, manifest.to_string().as_bytes()).unwrap();
    write_index(dir.path(), manifest, "t").unwrap();
    let root = dir.join("store");
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "measured"])
        .env(MEASURED, format!("{root}|oci:{}:t", dir.path()))
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let result = std::fs::read_to_string(root.join("result")).unwrap();
    let (kibibytes, text) = result.split_once(' ').unwrap();
    assert!(text.contains("more than 1073741824 bytes uncompressed"), "{text}");
    let kibibytes: u64 = kibibytes.parse().unwrap();
    assert!(kibibytes < 64 << 10, "{kibibytes} KiB");
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
