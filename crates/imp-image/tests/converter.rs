//! The converter: it makes the same disks, it is closed in, and its end is one image's error.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;

use camino::{Utf8Path, Utf8PathBuf};
use common::{Dir, chain, ensure, files, request};
use imp_image::{Converter, ImageError, ImageStore, StoreOptions};
use imp_testkit::images::{self, LayerBuilder};
use imp_testkit::wait::wait_for;
use sha2::Digest as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The example `pull`, which cargo builds beside the tests.
fn pull(store: &Utf8Path, reference: &str) -> Command {
    let here = Utf8PathBuf::from_path_buf(std::env::current_exe().unwrap()).unwrap();
    let program = here.ancestors().nth(2).unwrap().join("examples/pull");
    let mut command = Command::new(program);
    command.args([store.as_str(), reference]);
    command
}

fn disk(store: &Utf8Path) -> Vec<u8> {
    let disks = files(&store.join("disks"));
    assert_eq!(disks.len(), 1, "{disks:?}");
    std::fs::read(&disks[0]).unwrap()
}

/// An image that takes a moment: noise, which nothing makes smaller.
fn noise(dir: &Dir) -> String {
    let mut layer = LayerBuilder::new();
    let noise: Vec<u8> =
        (0_u64..).flat_map(|i| sha2::Sha256::digest(i.to_le_bytes())).take(60 << 20).collect();
    layer.file("noise", 0o644, &noise);
    common::layout(&dir.join("layout"), &[&layer])
}

#[tokio::test]
async fn a_disk_is_the_same_wherever_it_was_made() {
    for layout in [images::busybox().unwrap(), images::debian().unwrap()] {
        let dir = Dir::new();
        let (inside, outside) = (dir.join("in"), dir.join("out"));
        let store = ImageStore::open(&inside).unwrap();
        ensure(&store, &request(&layout.reference())).await.unwrap();
        let output = pull(&outside, &layout.reference()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(disk(&inside) == disk(&outside), "{}", layout.directory);
    }
}

#[test]
fn what_is_wrong_with_a_layer_is_told_as_before() {
    let dir = Dir::new();
    let mut layer = LayerBuilder::new();
    layer.hardlink("a", "nowhere/b");
    let reference = common::layout(&dir.join("layout"), &[&layer]);
    let output = pull(&dir.join("store"), &reference).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("a hard link to \"nowhere/b\""), "{text}");
    assert!(files(&dir.join("store/tmp")).is_empty());
}

/// The converter that a program started.
async fn converter_of(program: &Child) -> u32 {
    let children = format!("/proc/{0}/task", program.id());
    wait_for(Duration::from_secs(20), "the converter", async || {
        for thread in std::fs::read_dir(&children).map_err(|e| e.to_string())?.flatten() {
            let list = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            if let Some(pid) = list.split_whitespace().next().and_then(|pid| pid.parse().ok()) {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                if status.contains("Seccomp:\t2") {
                    return Ok(pid);
                }
            }
        }
        Err("it is not there yet".to_owned())
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn a_converter_that_is_killed_is_one_images_error() {
    let dir = Dir::new();
    let (reference, store) = (noise(&dir), dir.join("store"));
    let mut program = pull(&store, &reference).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let pid = converter_of(&program).await;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in ["Uid:\t65534\t65534", "Gid:\t65534\t65534", "NoNewPrivs:\t1", "CapEff:\t0000000000000000"] {
        assert!(status.contains(line), "{line} is not in {status}");
    }
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid.cast_signed()).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut program.stderr.take().unwrap(), &mut text).unwrap();
    assert!(!program.wait().unwrap().success());
    assert!(text.contains("the process that lays it out ended with signal: 9"), "{text}");
    assert!(files(&store.join("tmp")).is_empty() && files(&store.join("disks")).is_empty());
    assert!(pull(&store, &reference).stdout(Stdio::null()).status().unwrap().success());
}

#[tokio::test]
async fn a_converter_dies_with_its_store() {
    let dir = Dir::new();
    let (reference, store) = (noise(&dir), dir.join("store"));
    let mut program = pull(&store, &reference).stdout(Stdio::null()).spawn().unwrap();
    let pid = converter_of(&program).await;
    program.kill().unwrap();
    program.wait().unwrap();
    wait_for(Duration::from_secs(20), "the converter to end", async || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
        match status {
            Err(_) => Ok(()),
            Ok(text) if text.contains("State:\tZ") => Ok(()),
            Ok(_) => Err("it lives"),
        }
    })
    .await
    .unwrap();
}

/// This program's main is no converter's, so that nothing comes of it; whoever forgets run_if_asked learns that.
#[tokio::test]
async fn a_program_that_is_no_converter_is_told_as_such() {
    let dir = Dir::new();
    let options = StoreOptions { converter: Converter::Process { user: 65_534 }, ..Default::default() };
    let store = ImageStore::open_with(&dir.join("store"), options).unwrap();
    let error =
        ensure(&store, &request(&images::busybox().unwrap().reference())).await.expect_err("no converter");
    assert!(matches!(error, ImageError::Failed { .. }), "{error}");
    assert!(chain(&error).contains("the process that lays it out ended with"), "{}", chain(&error));
}
