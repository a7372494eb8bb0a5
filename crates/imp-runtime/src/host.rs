//! In a pod: from the image's file system to the host's, where VMMs must live to outlive the pod.

use anyhow::Context as _;
use camino::{Utf8Path, Utf8PathBuf};
use rustix::{
    fs::{Mode, OFlags},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use std::{io, os::fd::AsFd as _};

/// Files that a guest boots from.
const BOOT_FILES: [&str; 2] = ["vmlinux", "initramfs.cpio"];

/// Enters the mount namespace of PID 1 (with hostPID, the host's) where it is another than ours. The boot files of our
/// image are put on the host first, by content, so that a VM's kernel does not change under it. Returns their directory.
///
/// # Errors
/// When we may not (the pod must be privileged and have hostPID), or the boot files cannot be copied.
pub(crate) fn enter(boot_dir: &Utf8Path, state_dir: &Utf8Path) -> anyhow::Result<Utf8PathBuf> {
    let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let (Ok(ours), Ok(host)) = (of("self"), of("1")) else { return Ok(boot_dir.to_owned()) };
    if ours == host {
        return Ok(boot_dir.to_owned());
    }
    let boot = copy_boot_files(boot_dir, state_dir)?;
    for (name, kind) in [("cgroup", LinkNameSpaceType::ControlGroup), ("mnt", LinkNameSpaceType::Mount)] {
        let path = format!("/proc/1/ns/{name}");
        let fd = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .with_context(|| format!("cannot open {path}: the pod needs hostPID and privileged"))?;
        move_into_link_name_space(fd.as_fd(), Some(kind))
            .with_context(|| format!("cannot enter {path}: the pod needs hostPID and privileged"))?;
    }
    std::env::set_current_dir("/").context("cannot change to the host's root")?;
    Ok(boot)
}

/// Copies to `<state>/boot/<hash>/`; a directory that is there is complete, since it is renamed into place.
fn copy_boot_files(boot_dir: &Utf8Path, state_dir: &Utf8Path) -> anyhow::Result<Utf8PathBuf> {
    use sha2::{Digest as _, Sha256};
    let mut hash = Sha256::new();
    for file in BOOT_FILES {
        let path = boot_dir.join(file);
        let mut reader = std::fs::File::open(&path).with_context(|| format!("cannot read {path}"))?;
        io::copy(&mut reader, &mut HashWriter(&mut hash)).with_context(|| format!("cannot read {path}"))?;
    }
    let name = hex::encode(&hash.finalize()[..8]);
    let parent = state_dir.join("boot");
    let target = parent.join(&name);
    if target.exists() {
        return Ok(target);
    }
    let new = parent.join(format!("{name}.new"));
    let copied = (|| {
        std::fs::create_dir_all(&new)?;
        for file in BOOT_FILES {
            std::fs::copy(boot_dir.join(file), new.join(file))?;
            std::fs::File::open(new.join(file))?.sync_all()?;
        }
        std::fs::rename(&new, &target)
    })();
    copied.with_context(|| format!("cannot copy the boot files to {target}"))?;
    Ok(target)
}

struct HashWriter<'a>(&'a mut sha2::Sha256);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        sha2::Digest::update(self.0, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
