//! What a VM boots: Debian's cloud kernel as an ELF file and an initramfs of `imp-guest` and the few modules it needs.

mod cpio;
mod kernel;

use std::fs::{self, File};
use std::io::Write as _;
use std::process::Command;

use anyhow::{Context as _, Result};
use camino::{Utf8Path, Utf8PathBuf};
use sha2::{Digest as _, Sha256};

pub use cpio::Cpio;

/// Part of the cache's key: changes with what this module makes of the same input.
const FORMAT: &str = "2";

/// A kernel and an initramfs that fit each other.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct BootFiles {
    /// ELF `vmlinux` with a PVH entry, for QEMU and Firecracker.
    pub kernel: Utf8PathBuf,
    /// Uncompressed cpio archive; `/init` is the guest program.
    pub initrd: Utf8PathBuf,
}

/// Where slow things are kept between runs: `$IMP_CACHE_DIR`, else `$XDG_CACHE_HOME/imp`, else `~/.cache/imp`.
///
/// # Errors
/// When none of these is set, or the path is not UTF-8.
pub fn cache_dir() -> Result<Utf8PathBuf> {
    let var = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
    if let Some(dir) = var("IMP_CACHE_DIR") {
        return Ok(dir.into());
    }
    if let Some(dir) = var("XDG_CACHE_HOME") {
        return Ok(Utf8PathBuf::from(dir).join("imp"));
    }
    let home = var("HOME").context("no cache directory: set IMP_CACHE_DIR (neither it nor HOME is set)")?;
    Ok(Utf8PathBuf::from(home).join(".cache/imp"))
}

/// The boot files for `guest_binary` (`imp-guest`, static), from the cache or made now.
///
/// Debian's kernel package is fetched once a version with `apt-get download`; nothing is installed. Several
/// processes may call this at a time, and may be killed at any moment.
///
/// # Errors
/// When apt, the package or the cache directory fail; the message says which and what to do.
pub fn ensure(guest_binary: &Utf8Path) -> Result<BootFiles> {
    ensure_in(&cache_dir()?.join("boot"), guest_binary)
}

/// The boot files of this checkout's guest program. `IMP_PROGRAMS` names a directory with programs that were built before, as
/// `cargo xtask test` does; else cargo builds it.
///
/// # Errors
/// When it can't be built, or as [`ensure`].
pub fn of_checkout() -> Result<BootFiles> {
    if let Ok(programs) = std::env::var("IMP_PROGRAMS") {
        return ensure(&Utf8Path::new(&programs).join("imp-guest"));
    }
    let target = "x86_64-unknown-linux-musl";
    let root = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let arguments = ["build", "--quiet", "-p", "imp-guest", "--profile", "guest", "--target", target];
    crate::netns::run(Command::new(cargo).args(arguments).current_dir(&root))?;
    let built = std::env::var("CARGO_TARGET_DIR").map_or_else(|_| root.join("target"), Utf8PathBuf::from);
    ensure(&built.join(target).join("guest/imp-guest"))
}

fn ensure_in(cache: &Utf8Path, guest_binary: &Utf8Path) -> Result<BootFiles> {
    let guest = fs::read(guest_binary).with_context(|| {
        format!(
            "read the guest program {guest_binary}: build it with \
             `cargo build -p imp-guest --profile guest --target x86_64-unknown-linux-musl`"
        )
    })?;
    fs::create_dir_all(cache).with_context(|| format!("make the cache directory {cache}"))?;
    let lock = File::create(cache.join("lock")).with_context(|| format!("create {cache}/lock"))?;
    lock.lock().with_context(|| format!("lock {cache}/lock"))?;
    remove_leftovers(cache)?;

    let package = kernel::Package::current()?;
    let kernel_dir = kernel_dir(cache, &package);
    if !kernel_dir.exists() {
        package.extract(&kernel_dir)?;
    }
    let key = key(&package.file, &guest);
    let dir = cache.join(&key);
    let files = BootFiles { kernel: dir.join("vmlinux"), initrd: dir.join("initramfs.cpio") };
    if !dir.exists() {
        let work = tempfile::Builder::new().prefix(".boot-").tempdir_in(cache)?;
        let made = Utf8Path::from_path(work.path()).context("the cache path is not UTF-8")?.join("made");
        fs::create_dir(&made)?;
        // The same file under a second name: 50 MB that need no copy.
        fs::hard_link(kernel_dir.join("vmlinux"), made.join("vmlinux")).context("link the kernel")?;
        let initramfs = initramfs(&kernel_dir, &guest).context("write the initramfs")?;
        write_durably(&made.join("initramfs.cpio"), &initramfs)?;
        fs::rename(&made, &dir).with_context(|| format!("move the boot files to {dir}"))?;
    }
    Ok(files)
}

fn kernel_dir(cache: &Utf8Path, package: &kernel::Package) -> Utf8PathBuf {
    cache.join(format!("kernel-{FORMAT}-{}", package.file.trim_end_matches(".deb")))
}

/// What a killed process left half done; the caller holds the lock, so nobody works on it.
fn remove_leftovers(cache: &Utf8Path) -> Result<()> {
    for entry in cache.read_dir_utf8().with_context(|| format!("read {cache}"))?.flatten() {
        if entry.file_name().starts_with(".boot-") || entry.file_name().starts_with(".kernel-") {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("remove the leftover {}", entry.path()))?;
        }
    }
    Ok(())
}

fn key(package: &str, guest: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(FORMAT);
    hash.update(package);
    hash.update(module_list());
    hash.update(guest);
    hex::encode(&hash.finalize()[..8])
}

/// `/lib/modules/order`: a file name a line, groups apart by an empty line.
fn module_list() -> String {
    let groups = kernel::MODULES.map(|group| group.iter().map(|m| format!("{m}.ko\n")).collect::<String>());
    groups.join("\n")
}

/// An initramfs like that of VMs, in which `first` is the first user process and the guest program an idle file: what a kernel
/// needs by itself until user space.
///
/// # Errors
/// When the guest program or the kernel's package can't be read.
pub fn bare_initramfs(guest_binary: &Utf8Path, first: &[u8]) -> Result<Vec<u8>> {
    let guest = fs::read(guest_binary).with_context(|| format!("read the guest program {guest_binary}"))?;
    ensure(guest_binary)?;
    let package = kernel::Package::current()?;
    let mut cpio = start_initramfs(&kernel_dir(&cache_dir()?.join("boot"), &package), &guest)?;
    cpio.file("idle", 0o755, &guest)?;
    cpio.file("init", 0o755, first)?;
    Ok(cpio.finish()?)
}

fn initramfs(kernel_dir: &Utf8Path, guest: &[u8]) -> Result<Vec<u8>> {
    let mut cpio = start_initramfs(kernel_dir, guest)?;
    cpio.file("init", 0o755, guest)?;
    Ok(cpio.finish()?)
}

/// Everything but the programs.
fn start_initramfs(kernel_dir: &Utf8Path, guest: &[u8]) -> Result<Cpio<Vec<u8>>> {
    let mut cpio = Cpio::new(Vec::with_capacity(guest.len() + (2 << 20)));
    for dir in ["dev", "lib", "lib/modules", "newroot", "proc", "run", "sys", "tmp"] {
        cpio.directory(dir, 0o755)?;
    }
    // Opened by the kernel as /init's standard streams before anything is mounted.
    cpio.character_device("dev/console", 0o600, 5, 1)?;
    cpio.file("lib/modules/order", 0o644, module_list().as_bytes())?;
    for name in kernel::MODULES.iter().copied().flatten() {
        let module = kernel_dir.join(format!("{name}.ko"));
        let data = fs::read(&module).with_context(|| format!("read {module}"))?;
        cpio.file(&format!("lib/modules/{name}.ko"), 0o644, &data)?;
    }
    Ok(cpio)
}

/// Writes a new file and forces it to the disk, so that the rename that publishes it never shows an empty one.
fn write_durably(path: &Utf8Path, data: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create_new(path)?;
        file.write_all(data)?;
        file.sync_all()
    };
    write().with_context(|| format!("write {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_list_keeps_order_and_groups() {
        let list = module_list();
        let groups: Vec<&str> = list.split("\n\n").collect();
        assert_eq!(groups.len(), 3);
        assert!(groups[0].starts_with("virtio_ring.ko\nvirtio.ko"), "virtio needs symbols of virtio_ring");
        assert!(list.ends_with('\n'));
    }

    #[test]
    fn a_missing_guest_program_is_told_with_the_command_that_builds_it() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Utf8Path::from_path(dir.path()).unwrap();
        let error = ensure_in(dir, &dir.join("absent")).unwrap_err();
        assert!(error.to_string().contains("cargo build -p imp-guest"), "{error}");
    }

    #[test]
    fn boot_files_are_made_once_and_survive_a_killed_maker() {
        let cache = cache_dir().unwrap().join("boot");
        let dir = tempfile::tempdir().unwrap();
        let guest = Utf8Path::from_path(dir.path()).unwrap().join("guest");
        fs::write(&guest, "not a real guest; only the cache is of interest here").unwrap();
        fs::create_dir_all(cache.join(".boot-dead/made")).unwrap();
        let files = ensure_in(&cache, &guest).unwrap();
        assert!(!cache.join(".boot-dead").exists());
        assert!(fs::read(&files.kernel).unwrap().starts_with(b"\x7fELF"));
        assert!(fs::read(&files.initrd).unwrap().starts_with(b"070701"));
        let made = fs::metadata(&files.initrd).unwrap().modified().unwrap();
        assert_eq!(ensure_in(&cache, &guest).unwrap(), files);
        assert_eq!(fs::metadata(&files.initrd).unwrap().modified().unwrap(), made);
        fs::remove_dir_all(files.initrd.parent().unwrap()).unwrap();
    }
}
