//! The workload's root: put together from the block devices, furnished, and made the root of the mount namespace.
//!
//! The agent itself stays in the initramfs, below the new root: whatever the workload does to its files, the agent's
//! own are out of its reach. Paths of the image are only ever resolved by threads that are chrooted into it.

use std::ffi::CString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use imp_proto::v1::GuestRoot;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::mount::{MountFlags, mount, mount_move, mount_remount};

use crate::sys;

/// Where the image's disk is mounted when it is only a layer.
const BASE: &str = "/base";
/// Where the VM's own disk is mounted.
const DISK: &str = "/disk";
/// Where the root is put together, before it becomes `/`.
const NEW_ROOT: &str = "/newroot";
/// What `/run` of an image may hold at most; it is copied into memory.
const MAX_RUN_ENTRIES: usize = 1000;
const MAX_RUN_FILE: u64 = 64 << 10;

/// The root that the workload runs in.
#[derive(Debug)]
pub(crate) struct Root {
    directory: OwnedFd,
    /// Changes go to memory until [`Root::seal`], and nowhere after it.
    sealed: bool,
    on_disk: bool,
}

/// A device, said as people know it.
fn mount_disk(device: &str, target: &str, kind: &str, flags: MountFlags) -> Result<()> {
    DirBuilder::new().recursive(true).create(target).with_context(|| format!("make {target}"))?;
    mount(device, target, kind, flags, None).with_context(|| {
        let hint = if Path::new(device).exists() { "" } else { " (the VM has no such disk)" };
        format!("mount {device} as {kind}{hint}")
    })
}

impl Root {
    /// Mounts the root that `wanted` describes. Blocks.
    ///
    /// # Errors
    /// When a device is missing, holds another file system, or a mount is refused.
    pub(crate) fn mount(wanted: &GuestRoot) -> Result<Self> {
        let kind = wanted.base_fs_type.as_str();
        if !matches!(kind, "erofs" | "ext4") {
            bail!("the base disk's file system {kind:?} is unknown; erofs and ext4 are");
        }
        fs::create_dir_all(NEW_ROOT).context("make a directory for the root")?;
        let private_copy = kind == "ext4" && !wanted.overlay && !wanted.read_only;
        let on_disk = private_copy || (wanted.overlay && !wanted.read_only);
        if private_copy {
            mount_disk("/dev/vda", NEW_ROOT, kind, MountFlags::empty())?;
        } else {
            mount_disk("/dev/vda", BASE, kind, MountFlags::RDONLY)?;
            if on_disk {
                mount_disk("/dev/vdb", DISK, "ext4", MountFlags::empty())?;
            } else {
                // Holds the few files we write ourselves; sealed before the workload starts.
                mount_disk("tmpfs", DISK, "tmpfs", MountFlags::empty())?;
            }
            overlay()?;
        }
        let directory =
            rustix::fs::open(NEW_ROOT, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .context("open the new root")?;
        let root = Self { directory, sealed: !on_disk, on_disk };
        root.inside(furnish)?.context("furnish the new root")?;
        mount_move(NEW_ROOT, "/").context("make the new root the root of all mounts")?;
        Ok(root)
    }

    /// Makes a root that is to be read-only so; the agent has written what it had to.
    pub(crate) fn seal(&self) -> Result<()> {
        if !self.sealed {
            return Ok(());
        }
        self.inside(|| mount_remount("/", MountFlags::RDONLY, c""))?.context("make the root read-only")
    }

    /// The directory, for a child to make its root.
    pub(crate) fn directory(&self) -> io::Result<OwnedFd> {
        self.directory.try_clone()
    }

    /// Runs `work` in a thread whose root is the workload's: no path, whatever links the image has, leads out. Blocks.
    ///
    /// # Errors
    /// When the thread can't be made or enter the root, or `work` panics.
    pub(crate) fn inside<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> Result<R> {
        let directory = self.directory()?;
        let enter = move || -> Result<R> {
            sys::unshare_fs()?;
            rustix::process::fchdir(&directory)?;
            rustix::process::chroot(".")?;
            drop(directory);
            Ok(work())
        };
        let thread =
            std::thread::Builder::new().name("root".into()).spawn(enter).context("start a thread")?;
        thread
            .join()
            .map_err(|_| anyhow!("work in the workload's root panicked"))?
            .context("enter the workload's root")
    }

    /// Writes everything back and makes the disk clean, as far as that can be done: the machine is about to go.
    pub(crate) fn close(&self) {
        rustix::fs::sync();
        if !self.on_disk {
            return;
        }
        // The overlay goes first: it holds the disk. A disk that stays busy is synced, only not marked clean.
        let overlay = self.inside(|| mount_remount("/", MountFlags::RDONLY, c""));
        if let Err(e) = overlay.and_then(|r| r.map_err(Into::into)) {
            eprintln!("imp-guest: the root stays writable: {e}");
        }
        if Path::new(DISK).exists()
            && let Err(e) = mount_remount(DISK, MountFlags::RDONLY, c"")
        {
            eprintln!("imp-guest: the disk stays writable: {e}");
        }
        rustix::fs::sync();
    }
}

/// Lays the writable layer over the base.
fn overlay() -> Result<()> {
    let base = fs::metadata(BASE).context("read the base's root directory")?;
    let (upper, work) = (format!("{DISK}/upper"), format!("{DISK}/work"));
    // The root directory's own attributes come from the upper layer once it exists. Made under another name first, so
    // that a boot that dies in between does not leave a root with wrong attributes.
    if !Path::new(&upper).exists() {
        let new = format!("{DISK}/upper.new");
        fs::create_dir_all(&new).with_context(|| format!("make {new}"))?;
        rustix::fs::chown(&new, Some(Uid::from_raw(base.uid())), Some(Gid::from_raw(base.gid())))
            .context("give the root directory its owner")?;
        fs::set_permissions(&new, fs::Permissions::from_mode(base.mode() & 0o7777))
            .context("give the root directory its mode")?;
        fs::rename(&new, &upper).with_context(|| format!("make {upper}"))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("make {work}"))?;
    // redirect_dir: directories of the image can be renamed, as on any disk.
    let options = format!("lowerdir={BASE},upperdir={upper},workdir={work},redirect_dir=on");
    let options = CString::new(options).context("mount options")?;
    mount("overlay", NEW_ROOT, "overlay", MountFlags::empty(), options.as_c_str())
        .context("mount the overlay")
}

/// Mounts what a process expects to find. Runs inside the root.
fn furnish() -> Result<()> {
    let strict = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let run = open_image_run();
    for (kind, target, flags, options) in [
        ("proc", "/proc", strict, c""),
        ("sysfs", "/sys", strict, c""),
        ("devtmpfs", "/dev", MountFlags::NOSUID, c""),
        ("devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, c"gid=5,mode=620,ptmxmode=666"),
        ("tmpfs", "/dev/shm", MountFlags::NOSUID | MountFlags::NODEV, c"mode=1777"),
        ("mqueue", "/dev/mqueue", strict, c""),
        ("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV, c"mode=755"),
        ("cgroup2", "/sys/fs/cgroup", strict, c""),
    ] {
        if !Path::new(target).exists() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(target)
                .with_context(|| format!("make {target}"))?;
        }
        mount(kind, target, kind, flags, options).with_context(|| format!("mount {kind} on {target}"))?;
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        match symlink(target, link) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(e).with_context(|| format!("make {link}"));
            }
            _ => {}
        }
    }
    // Images ship directories in /run that their programs need, with owners; a fresh /run must not hide them.
    if let Some(run) = run {
        use std::os::fd::AsRawFd as _;
        let source = format!("/proc/self/fd/{}", run.as_raw_fd());
        copy_tree(Path::new(&source), Path::new("/run"), &mut 0).context("copy the image's /run")?;
    }
    if !Path::new("/tmp").exists() {
        DirBuilder::new().mode(0o1777).create("/tmp").context("make /tmp")?;
        fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777)).context("make /tmp")?;
    }
    Ok(())
}

fn open_image_run() -> Option<OwnedFd> {
    rustix::fs::open("/run", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// Copies directories, links and small files with their owners and modes; what is neither stays behind.
fn copy_tree(from: &Path, to: &Path, entries: &mut usize) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        *entries += 1;
        if *entries > MAX_RUN_ENTRIES {
            return Err(io::Error::other(format!("it has more than {MAX_RUN_ENTRIES} entries")));
        }
        let (source, target, metadata) = (entry.path(), to.join(entry.file_name()), entry.metadata()?);
        if metadata.is_dir() {
            fs::create_dir(&target)?;
            copy_tree(&source, &target, entries)?;
        } else if metadata.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
            continue;
        } else if metadata.is_file() && metadata.len() <= MAX_RUN_FILE {
            fs::copy(&source, &target)?;
        } else {
            continue;
        }
        rustix::fs::chown(&target, Some(Uid::from_raw(metadata.uid())), Some(Gid::from_raw(metadata.gid())))?;
        fs::set_permissions(&target, fs::Permissions::from_mode(metadata.mode() & 0o7777))?;
    }
    Ok(())
}
