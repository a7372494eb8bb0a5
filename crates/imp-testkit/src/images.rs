//! Images for tests: small real ones made from Debian packages, and hand-made ones of any shape.
//!
//! What is slow to make is kept in the cache directory (see [`crate::tools::cache_dir`]) under a name that has the version of everything
//! that went into it; the directory may be deleted at any time.

mod builder;
mod debian;
mod large;
mod packages;

pub use builder::{Compression, ImageBuilder, LayerBuilder, descriptor, write_blob, write_index};

use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};

/// An OCI image layout in a directory, and a tag in it.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The directory with `index.json`.
    pub directory: Utf8PathBuf,
    /// The tag.
    pub tag: String,
}

impl Layout {
    /// `oci:DIR:TAG` (containers-transports(5)).
    #[must_use]
    pub fn reference(&self) -> String {
        format!("oci:{}:{}", self.directory, self.tag)
    }

    /// The tar stream of the first layer, which must be a gzip'ed one.
    fn layer_tar(&self) -> Result<Vec<u8>> {
        let read = |path: Utf8PathBuf| std::fs::read(&path).with_context(|| format!("read {path}"));
        let blob = |descriptor: &serde_json::Value| {
            let digest = descriptor["digest"].as_str().and_then(|d| d.strip_prefix("sha256:"));
            let hex = digest.with_context(|| format!("{} names a blob without a digest", self.directory))?;
            read(self.directory.join("blobs/sha256").join(hex))
        };
        let index: serde_json::Value = serde_json::from_slice(&read(self.directory.join("index.json"))?)?;
        let manifest: serde_json::Value = serde_json::from_slice(&blob(&index["manifests"][0])?)?;
        let mut tar = Vec::new();
        std::io::Read::read_to_end(
            &mut flate2::read::GzDecoder::new(blob(&manifest["layers"][0])?.as_slice()),
            &mut tar,
        )
        .context("decompress the layer")?;
        Ok(tar)
    }
}

/// Debian's static busybox with a link for every applet, users, and `/tmp`; runs `sh`.
///
/// # Errors
/// When busybox-static is not installed or the cache cannot be written.
pub fn busybox() -> Result<Layout> {
    let program = "/bin/busybox";
    let bytes =
        std::fs::read(program).with_context(|| format!("read {program} (Debian package busybox-static)"))?;
    cached("busybox", &[b"1", &bytes], |directory| {
        let list = Command::new(program).arg("--list").output().context("run busybox --list")?;
        let mut layer = LayerBuilder::new();
        for (path, mode) in [
            ("bin", 0o755),
            ("dev", 0o755),
            ("etc", 0o755),
            ("home", 0o755),
            ("proc", 0o755),
            ("root", 0o700),
            ("run", 0o755),
            ("sbin", 0o755),
            ("sys", 0o755),
            ("tmp", 0o1777),
            ("usr", 0o755),
            ("usr/bin", 0o755),
            ("usr/sbin", 0o755),
            ("var", 0o755),
            ("var/tmp", 0o1777),
        ] {
            layer.directory(path, mode);
        }
        layer.file("bin/busybox", 0o755, &bytes);
        for applet in String::from_utf8_lossy(&list.stdout).lines().filter(|name| *name != "busybox") {
            layer.symlink(&format!("bin/{applet}"), "busybox");
        }
        layer.file(
            "etc/passwd",
            0o644,
            b"root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/bin/false\n\
            imp:x:1000:1000:imp:/home/imp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
        );
        layer.file(
            "etc/group",
            0o644,
            b"root:x:0:\nadm:x:4:imp\nwww-data:x:33:\nimp:x:1000:\nnogroup:x:65534:\n",
        );
        let config = serde_json::json!({"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["sh"]});
        ImageBuilder::new().config(config).layer(layer.finish(), Compression::Gzip).write(directory, "latest")
    })
}

/// One static program and nothing else: no shell, no /etc, no directories.
///
/// The program, `/probe`, prints what it was given as lines of JSON (see `programs/probe.rs`) and ends as its arguments say.
///
/// # Errors
/// When rustc or its target x86_64-unknown-linux-musl is not installed, or the cache cannot be written.
pub fn scratch_static() -> Result<Layout> {
    cached("scratch-static", &[b"1", PROBE.as_bytes()], |directory| {
        let mut layer = LayerBuilder::new();
        layer.file("probe", 0o755, &probe()?);
        let config = serde_json::json!({"Entrypoint": ["/probe"]});
        ImageBuilder::new().config(config).layer(layer.finish(), Compression::Gzip).write(directory, "latest")
    })
}

const PROBE: &str = include_str!("../programs/probe.rs");

/// The static program of [`scratch_static`], built anew.
///
/// # Errors
/// When rustc or its target x86_64-unknown-linux-musl is not installed.
pub fn probe() -> Result<Vec<u8>> {
    let work = tempfile::tempdir().context("make a directory")?;
    let (source, program) = (work.path().join("probe.rs"), work.path().join("probe"));
    std::fs::write(&source, PROBE).context("write probe.rs")?;
    let output = Command::new("rustc")
        .args(["--edition", "2024", "-O", "-C", "strip=symbols", "-C", "panic=abort"])
        .args(["--target", "x86_64-unknown-linux-musl", "-o"])
        .args([&program, &source])
        .output()
        .context("start rustc")?;
    if !output.status.success() {
        bail!(
            "rustc for x86_64-unknown-linux-musl (rustup target add): {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    std::fs::read(&program).context("read the program")
}

/// A debootstrap'ed Debian 12 (minbase), of some 70 MB compressed. Takes a minute or two the first time.
///
/// # Errors
/// When not root, or debootstrap is not installed or fails, or the cache cannot be written.
pub fn debian() -> Result<Layout> {
    cached("debian", &[b"1", debian::RECIPE.as_bytes()], debian::make)
}

/// Debian packages on top of [`debian()`], and what such an image runs (`config` of its configuration).
///
/// # Errors
/// As [`debian()`]; when apt-get fails.
pub fn debian_with(name: &str, packages: &[&str], config: &serde_json::Value) -> Result<Layout> {
    let base = debian()?;
    let (all, text) = (packages.join(" "), config.to_string());
    let inputs = [debian::RECIPE, packages::RECIPE, all.as_str(), text.as_str()].map(str::as_bytes);
    cached(&format!("debian-{name}"), &inputs, |directory| packages::make(directory, &base, packages, config))
}

/// 2 GiB in 200 000 files and 8 layers. Takes two minutes the first time.
///
/// # Errors
/// When the cache cannot be written.
pub fn large() -> Result<Layout> {
    cached("large", &[large::RECIPE.as_bytes()], large::make)
}

/// The layout of that name made from those inputs; made unless it is there. Whoever comes meanwhile waits.
fn cached(name: &str, inputs: &[&[u8]], make: impl FnOnce(&Utf8Path) -> Result<()>) -> Result<Layout> {
    let key = inputs.iter().fold(Sha256::new(), |hash, input| {
        hash.chain_update((input.len() as u64).to_le_bytes()).chain_update(input)
    });
    let cache = crate::tools::cache_dir()?.join("images");
    let directory = cache.join(format!("{name}-{}", hex::encode(&key.finalize()[..8])));
    let layout = Layout { directory: directory.clone(), tag: "latest".into() };
    if directory.exists() {
        return Ok(layout);
    }
    std::fs::create_dir_all(&cache).with_context(|| format!("make {cache}"))?;
    let lock_path = cache.join(format!(".{name}.lock"));
    let lock = File::create(&lock_path).with_context(|| format!("open {lock_path}"))?;
    flock(&lock, FlockOperation::LockExclusive).with_context(|| format!("lock {lock_path}"))?;
    if directory.exists() {
        return Ok(layout);
    }
    let work = tempfile::Builder::new()
        .prefix(".new-")
        .tempdir_in(&cache)
        .context("make a directory in the cache")?;
    let path = Utf8Path::from_path(work.path()).context("the cache's path is not UTF-8")?;
    make(path).with_context(|| format!("make the image {name}"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("chmod {path}"))?;
    std::fs::rename(work.keep(), &directory).with_context(|| format!("make {directory}"))?;
    Ok(layout)
}
