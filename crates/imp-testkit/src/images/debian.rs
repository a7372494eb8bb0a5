//! A Debian image as `debian:12-slim` is made: debootstrap, then one layer.

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use camino::Utf8Path;

use super::{Compression, ImageBuilder};

/// What it is made of; another recipe is another image in the cache.
pub(super) const RECIPE: &str = "bookworm minbase gzip";

/// Writes the layout.
pub(super) fn make(directory: &Utf8Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "debootstrap needs root: run as root, or copy the image cache from a machine where it was made"
        );
    }
    let work = tempfile::Builder::new().prefix("imp-debootstrap-").tempdir().context("make a directory")?;
    let root = work.path().join("root");
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.arg("--variant=minbase").arg("bookworm").arg(&root).arg("http://deb.debian.org/debian");
    run(debootstrap, "debootstrap (Debian package debootstrap)")?;
    for cache in ["var/cache/apt/archives", "var/lib/apt/lists"] {
        let path = root.join(cache);
        for entry in std::fs::read_dir(&path).with_context(|| format!("read {}", path.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                std::fs::remove_file(entry.path())?;
            }
        }
    }
    let tar = work.path().join("layer.tar");
    let mut command = Command::new("tar");
    command.args([
        "--format=pax",
        "--pax-option=delete=atime,delete=ctime",
        "--xattrs",
        "--xattrs-include=*",
    ]);
    command.args(["--numeric-owner", "--sort=name", "-C"]).arg(&root).arg("-cf").arg(&tar).arg(".");
    run(command, "tar")?;
    let layer = std::fs::read(&tar).context("read the layer")?;
    let config = serde_json::json!({
        "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["bash"]
    });
    ImageBuilder::new().config(config).layer(layer, Compression::Gzip).write(directory, "latest")
}

pub(super) fn run(mut command: Command, what: &str) -> Result<()> {
    let output = command.output().with_context(|| format!("start {what}"))?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        bail!("{what}: {}\n{}", output.status, lines[lines.len().saturating_sub(20)..].join("\n"));
    }
    Ok(())
}
