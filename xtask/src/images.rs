//! Our container images, and the two that the development cluster needs besides.

use std::time::SystemTime;

use anyhow::{Context as _, Result};
use camino::{Utf8Path, Utf8PathBuf};
use imp_testkit::boot::BootFiles;
use imp_testkit::node::PAUSE_IMAGE;

use crate::oci::{ImageFile, ImageSpec, write_archive};
use crate::programs::Programs;
use crate::workspace;

/// Prefix of the names of our images, as in the chart's default values.
pub(crate) const REGISTRY: &str = "imp.dev";
/// Tag of images of this checkout.
pub(crate) const TAG: &str = "dev";

/// OCI archives.
#[derive(Debug)]
pub(crate) struct Images {
    /// What every node of the development cluster has: pause, operator, agent, runtime.
    pub(crate) node: Vec<Utf8PathBuf>,
    /// busybox, for the development registry.
    pub(crate) busybox: Utf8PathBuf,
}

/// Builds the images that are older than what they are made of.
///
/// # Errors
/// When a source is missing or an archive can't be written.
pub(crate) fn build(programs: &Programs, boot: &BootFiles) -> Result<Images> {
    let dir = workspace::target().join("images");
    std::fs::create_dir_all(&dir).with_context(|| format!("make {dir}"))?;
    let ours = [
        ours(programs, "imp-operator", "65532:65532", Vec::new()),
        ours(programs, "imp-agent", "65531:65531", Vec::new()),
        ours(programs, "imp-runtime", "0:0", boot_files(boot)),
    ];
    let mut node = vec![ensure(&pause(), &dir)?];
    for spec in &ours {
        node.push(ensure(spec, &dir)?);
    }
    Ok(Images { node, busybox: ensure(&busybox()?, &dir)? })
}

/// An image of one of our programs.
fn ours(programs: &Programs, name: &str, user: &str, more: Vec<ImageFile>) -> ImageSpec {
    let program = format!("usr/bin/{name}");
    let entrypoint = vec![format!("/{program}")];
    let mut files = vec![ImageFile { path: program.into(), source: programs.path(name), mode: 0o755 }];
    files.extend(more);
    ImageSpec {
        name: format!("{REGISTRY}/{name}:{TAG}"),
        files,
        links: Vec::new(),
        entrypoint,
        user: user.into(),
    }
}

fn boot_files(boot: &BootFiles) -> Vec<ImageFile> {
    [("vmlinux", &boot.kernel), ("initramfs.cpio", &boot.initrd)]
        .map(|(name, source)| ImageFile {
            path: format!("usr/lib/imp/boot/{name}").into(),
            source: source.clone(),
            mode: 0o644,
        })
        .to_vec()
}

/// The container that holds a pod's namespaces; it only has to be there.
fn pause() -> ImageSpec {
    ImageSpec {
        name: PAUSE_IMAGE.into(),
        files: vec![busybox_file()],
        links: Vec::new(),
        entrypoint: ["/bin/busybox", "sleep", "2147483647"].map(str::to_owned).to_vec(),
        user: "65535:65535".into(),
    }
}

/// Debian's static busybox with a link for each of its commands.
fn busybox() -> Result<ImageSpec> {
    let list = imp_testkit::netns::output(std::process::Command::new("/bin/busybox").arg("--list"))?;
    let links = list
        .lines()
        .filter(|name| *name != "busybox")
        .map(|name| (Utf8Path::new("bin").join(name), "busybox".to_owned()))
        .collect();
    Ok(ImageSpec {
        name: "imp.dev/busybox:1.35".into(),
        files: vec![busybox_file()],
        links,
        entrypoint: vec!["/bin/sh".into()],
        user: "0:0".into(),
    })
}

fn busybox_file() -> ImageFile {
    ImageFile { path: "bin/busybox".into(), source: "/bin/busybox".into(), mode: 0o755 }
}

/// Writes the archive unless it is newer than every source and than this program, which says how it is written.
fn ensure(spec: &ImageSpec, dir: &Utf8Path) -> Result<Utf8PathBuf> {
    let (repository, _) = spec.name.rsplit_once(':').context("an image name needs a tag")?;
    let file = repository.rsplit('/').next().unwrap_or(repository);
    let archive = dir.join(format!("{file}.tar"));
    let modified = |path: &Utf8Path| -> Result<SystemTime> {
        std::fs::metadata(path).and_then(|m| m.modified()).with_context(|| format!("look at {path}"))
    };
    let mut newest = modified(&workspace::self_program()?)?;
    for source in spec.files.iter().map(|f| &f.source) {
        newest = newest.max(modified(source)?);
    }
    if !archive.exists() || modified(&archive)? < newest {
        write_archive(spec, &archive).with_context(|| format!("build the image {}", spec.name))?;
    }
    Ok(archive)
}
