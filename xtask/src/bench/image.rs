//! `cargo xtask bench image`: from an image in a registry to a root disk, beside what other tools need for the same.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use clap::Args;
use imp_testkit::images::{self, Layout};
use imp_testkit::preflight;
use imp_testkit::registry::Registry;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::figures::Milliseconds;
use super::report;
use crate::programs;

/// What to measure.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Runs of each tool, in turn.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Leave the image of 2 GiB out.
    #[arg(long)]
    no_large: bool,
}

/// What the example `pull` of imp-image prints.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Pulled {
    milliseconds: f64,
    second_milliseconds: f64,
    second_copies: bool,
    peak_kib: u64,
    disk_bytes: u64,
}

#[derive(Serialize)]
struct Report {
    runs: usize,
    images: BTreeMap<&'static str, Figures>,
}

#[derive(Serialize)]
struct Figures {
    /// Bytes of the image as the registry has it.
    image_bytes: u64,
    /// From the registry to a disk that a VM can use.
    imp: Milliseconds,
    /// skopeo copy, umoci unpack, mke2fs -d.
    ext4_by_others: Milliseconds,
    /// skopeo copy, umoci unpack, mkfs.erofs.
    erofs_by_others: Milliseconds,
    /// Best of the others over ours, medians. At least 2.
    times_faster: f64,
    /// At most 150.
    peak_mib: f64,
    /// Bytes that the disk takes: ours, and theirs.
    disk_bytes: BTreeMap<&'static str, u64>,
    /// The same image once more. Less than 10.
    second_ms: f64,
    second_copies: bool,
}

/// Measures and reports.
///
/// # Errors
/// When anything can't be built, started or measured.
pub(crate) fn run(options: &Options) -> Result<()> {
    preflight::root()?;
    preflight::install_packages(&preflight::missing_packages(&[
        preflight::TEST_PACKAGES,
        &[("skopeo", "/usr/bin/skopeo"), ("docker-registry", "/usr/bin/docker-registry")],
    ]))?;
    let program = programs::example("imp-image", "pull")?;
    let python = json!({"Cmd": ["python3"]});
    let mut all: Vec<(&str, Layout)> = vec![
        ("small: busybox", images::busybox()?),
        ("middle: Debian with Python", images::debian_with("python", &["python3"], &python)?),
    ];
    if !options.no_large {
        all.push(("large: 2 GiB in 200 000 files", images::large()?));
    }
    let registry = Registry::start()?;
    let mut figures = BTreeMap::new();
    for (name, layout) in all {
        registry.push(&layout, "image:v1")?;
        figures.insert(name, measure(options, name, &layout, &program, registry.address())?);
    }
    report("image", &Report { runs: options.runs, images: figures })
}

fn measure(
    options: &Options,
    name: &str,
    layout: &Layout,
    program: &Utf8Path,
    registry: &str,
) -> Result<Figures> {
    let image = format!("{registry}/image:v1");
    let (mut ours, mut ext4, mut erofs) = (Vec::new(), Vec::new(), Vec::new());
    let mut sizes = BTreeMap::new();
    for run in 1..=options.runs {
        // On the disk where stores are, not in memory.
        let dir = tempfile::tempdir_in("/var/tmp").context("make a directory")?;
        let dir = Utf8Path::from_path(dir.path()).context("the directory's path is not UTF-8")?;
        let pulled = pull(program, &dir.join("store"), &image)?;
        let others = others(dir, &image, &mut sizes)?;
        eprintln!(
            "{name}, run {run} of {}: {:.0} ms; others: unpacked after {:?}, ext4 {:?}, erofs {:?}",
            options.runs, pulled.milliseconds, others.unpack, others.ext4, others.erofs
        );
        sizes.insert("imp", pulled.disk_bytes);
        ours.push(pulled);
        ext4.push(others.unpack + others.ext4);
        erofs.push(others.unpack + others.erofs);
    }
    let of = |pick: fn(&Pulled) -> f64| ours.iter().map(pick).fold(0.0, f64::max);
    let took: Vec<Duration> = ours.iter().map(|p| Duration::from_secs_f64(p.milliseconds / 1000.0)).collect();
    let (imp, ext4, erofs) = (Milliseconds::of(&took), Milliseconds::of(&ext4), Milliseconds::of(&erofs));
    Ok(Figures {
        image_bytes: size_of(&layout.directory)?,
        times_faster: (ext4.p50.min(erofs.p50) / imp.p50 * 100.0).round() / 100.0,
        imp,
        ext4_by_others: ext4,
        erofs_by_others: erofs,
        peak_mib: (of(|p| p.peak_kib as f64) / 102.4).round() / 10.0,
        disk_bytes: sizes,
        second_ms: of(|p| p.second_milliseconds),
        second_copies: ours.iter().any(|p| p.second_copies),
    })
}

fn pull(program: &Utf8Path, store: &Utf8Path, image: &str) -> Result<Pulled> {
    let output = Command::new(program).args([store.as_str(), image]).output().context("run pull")?;
    ensure!(output.status.success(), "pull {image}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("read what pull printed")
}

struct Others {
    unpack: Duration,
    ext4: Duration,
    erofs: Duration,
}

fn others(dir: &Utf8Path, image: &str, sizes: &mut BTreeMap<&'static str, u64>) -> Result<Others> {
    let (layout, bundle) = (dir.join("layout"), dir.join("bundle"));
    let start = Instant::now();
    run_tool(
        "skopeo",
        &["copy", "-q", "--src-tls-verify=false", &format!("docker://{image}"), &format!("oci:{layout}:v1")],
    )?;
    run_tool("umoci", &["unpack", "--image", &format!("{layout}:v1"), bundle.as_str()])?;
    let unpack = start.elapsed();
    let (root, ext4, erofs) = (bundle.join("rootfs"), dir.join("ext4.img"), dir.join("erofs.img"));
    // mke2fs must be told a size; room for the files, inodes and a tenth more.
    let (bytes, files) = tree_of(&root)?;
    let size = (bytes + files * 512) * 11 / 10 + (16 << 20);
    let start = Instant::now();
    run_tool(
        "mke2fs",
        &[
            "-q",
            "-F",
            "-t",
            "ext4",
            "-m",
            "0",
            "-N",
            &(files + 1000).to_string(),
            "-d",
            root.as_str(),
            ext4.as_str(),
            &format!("{}k", size >> 10),
        ],
    )?;
    let ext4_time = start.elapsed();
    let start = Instant::now();
    run_tool("mkfs.erofs", &["--quiet", erofs.as_str(), root.as_str()])?;
    let erofs_time = start.elapsed();
    sizes.insert("ext4", size_of(&ext4)?);
    sizes.insert("mkfs.erofs", size_of(&erofs)?);
    Ok(Others { unpack, ext4: ext4_time, erofs: erofs_time })
}

fn run_tool(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output().with_context(|| format!("run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Bytes on disk of everything at and below a path.
fn size_of(path: &Utf8Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = path.symlink_metadata().with_context(|| format!("look at {path}"))?;
    let mut bytes = metadata.blocks() * 512;
    if metadata.is_dir() {
        for entry in path.read_dir_utf8().with_context(|| format!("read {path}"))? {
            bytes += size_of(&Utf8PathBuf::from(entry?.path()))?;
        }
    }
    Ok(bytes)
}

/// Bytes on disk and number of files of a tree.
fn tree_of(path: &Utf8Path) -> Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = path.symlink_metadata().with_context(|| format!("look at {path}"))?;
    let mut sum = (metadata.blocks() * 512, 1);
    if metadata.is_dir() {
        for entry in path.read_dir_utf8().with_context(|| format!("read {path}"))? {
            let (bytes, files) = tree_of(entry?.path())?;
            sum = (sum.0 + bytes, sum.1 + files);
        }
    }
    Ok(sum)
}
