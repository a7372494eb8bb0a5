//! Real images: the tree on the disk is the tree that another tool unpacks, and the kernel mounts it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;

use camino::Utf8Path;
use common::{Dir, ensure, fsck, request};
use imp_image::{ImageStore, RootDisk};
use imp_testkit::images::{self, Compression, ImageBuilder, LayerBuilder, Layout};
use std::process::{Command, Output};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn run(program: &str, arguments: &[&str]) -> Output {
    let output =
        Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    output
}

/// A tree in one stream: names, types, owners, sizes, times, targets, contents; if all is wanted also modes, hard links and attributes.
fn archive(root: &Utf8Path, all: bool, out: &Utf8Path) {
    let mut arguments =
        vec!["--format=pax", "--pax-option=delete=atime,delete=ctime", "--numeric-owner", "--sort=name"];
    if all {
        arguments.extend(["--xattrs", "--xattrs-include=*"]);
    } else {
        arguments.extend(["--hard-dereference", "--mode=0777"]);
    }
    arguments.extend(["-C", root.as_str(), "-cf", out.as_str(), "."]);
    run("tar", &arguments);
}

fn assert_same(left: &Utf8Path, right: &Utf8Path) {
    if std::fs::read(left).unwrap() == std::fs::read(right).unwrap() {
        return;
    }
    let list = |path: &Utf8Path| {
        let output = run("tar", &["--full-time", "--numeric-owner", "-tvf", path.as_str()]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let (left, right) = (list(left), list(right));
    let different: Vec<_> = left.lines().zip(right.lines()).filter(|(a, b)| a != b).take(10).collect();
    panic!("the trees differ (or only contents or attributes do, if nothing follows): {different:#?}");
}

/// The tree as umoci unpacks it, in a tar.
fn unpacked_by_umoci(layout: &Layout, dir: &Dir, all: bool) -> camino::Utf8PathBuf {
    let bundle = dir.join("bundle");
    if !bundle.exists() {
        let image = format!("{}:{}", layout.directory, layout.tag);
        run("umoci", &["unpack", "--image", &image, bundle.as_str()]);
    }
    let out = dir.join("umoci.tar");
    archive(&bundle.join("rootfs"), all, &out);
    out
}

async fn disk_of(layout: &Layout, dir: &Dir) -> RootDisk {
    let store = ImageStore::open(&dir.join("store")).unwrap();
    let disk = ensure(&store, &request(&layout.reference())).await.expect("a disk");
    fsck(&disk.path);
    disk
}

/// What erofs-utils extracts is what umoci unpacks, as far as version 1.5 can extract: neither hard links nor setuid nor attributes,
/// which [`kernel_sees`] compares.
async fn compare_extracted(layout: &Layout) {
    if !is_root() {
        eprintln!("skipped: owners can only be restored by root");
        return;
    }
    let dir = Dir::new();
    let disk = disk_of(layout, &dir).await;
    let extracted = dir.join("extracted");
    run("fsck.erofs", &["--preserve", &format!("--extract={extracted}"), disk.path.as_str()]);
    let out = dir.join("erofs.tar");
    archive(&extracted, false, &out);
    assert_same(&unpacked_by_umoci(layout, &dir, false), &out);
}

/// What the kernel shows of the mounted disk is what umoci unpacks, attributes included.
async fn kernel_sees(layout: &Layout) {
    let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap();
    if !is_root() || !filesystems.lines().any(|line| line.trim_start_matches("nodev").trim() == "erofs") {
        eprintln!("skipped: mounting needs root and a kernel with erofs");
        return;
    }
    let dir = Dir::new();
    let disk = disk_of(layout, &dir).await;
    let (mount, out) = (dir.join("mnt"), dir.join("kernel.tar"));
    std::fs::create_dir(&mount).unwrap();
    // In a mount namespace of its own, which takes mount and loop device with it.
    let script = "mount -t erofs -o ro,loop \"$1\" \"$2\" && exec tar --format=pax --pax-option=delete=atime,delete=ctime \
        --numeric-owner --sort=name --xattrs '--xattrs-include=*' -C \"$2\" -cf \"$3\" .";
    run("unshare", &["-m", "sh", "-c", script, "sh", disk.path.as_str(), mount.as_str(), out.as_str()]);
    assert_same(&unpacked_by_umoci(layout, &dir, true), &out);
}

#[tokio::test]
async fn busybox_is_as_umoci_unpacks_it() {
    let layout = images::busybox().unwrap();
    compare_extracted(&layout).await;
    kernel_sees(&layout).await;
}

#[tokio::test]
async fn scratch_image_has_its_program_alone() {
    let layout = images::scratch_static().unwrap();
    let dir = Dir::new();
    let disk = disk_of(&layout, &dir).await;
    assert_eq!(common::names(&common::erofs::read(&disk.path)), ["", "probe"]);
    assert_eq!(
        disk.config.config().as_ref().unwrap().entrypoint().as_deref(),
        Some(&["/probe".to_owned()][..])
    );
}

#[tokio::test]
async fn debian_is_as_umoci_unpacks_it() {
    if !is_root() {
        eprintln!("skipped: debootstrap needs root");
        return;
    }
    let layout = images::debian().unwrap();
    compare_extracted(&layout).await;
    kernel_sees(&layout).await;
}

#[tokio::test]
async fn awkward_image_is_as_umoci_unpacks_it() {
    let dir = Dir::new();
    let mut lower = LayerBuilder::new();
    lower.directory("./", 0o755).directory("a", 0o755).file("a/x", 0o4711, b"x").hardlink("a/y", "a/x");
    lower.device("null", b'3', 0o666, 1, 3).entry(b"fifo", b'6', b"", 0o640, (5, 6), &[], b"");
    lower.entry(
        b"cap",
        b'0',
        b"",
        0o755,
        (70_000, 80_000),
        &[
            ("SCHILY.xattr.security.capability", b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
            ("SCHILY.xattr.user.note", b"two\nlines"),
            ("mtime", b"1600000000.5"),
        ],
        b"cap",
    );
    lower.symlink("link", "/etc/passwd").file("gone/deep/file", 0o644, b"1").directory("gone", 0o700);
    for index in 0..500 {
        lower.file(
            &format!("many/file-{index}-{}", "n".repeat(index % 100)),
            0o600,
            &[b'm'; 5000][..index * 10],
        );
    }
    lower.directory("many", 0o755);
    let mut upper = LayerBuilder::new();
    upper.directory("./", 0o755).directory("gone", 0o755).whiteout("gone/.wh.deep").file(
        "a/z",
        0o644,
        &[9; 100_000],
    );
    upper.directory("a", 0o3775);
    let image =
        ImageBuilder::new().layer(lower.finish(), Compression::Gzip).layer(upper.finish(), Compression::None);
    image.write(dir.path(), "t").unwrap();
    let layout = Layout { directory: dir.path().to_owned(), tag: "t".into() };
    compare_extracted(&layout).await;
    kernel_sees(&layout).await;
}
