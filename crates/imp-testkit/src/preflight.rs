//! What a machine must have before anything is started, each told in one line.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileTypeExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use camino::Utf8Path;

/// Debian packages that a cluster needs: (package, a file that it brings).
pub const CLUSTER_PACKAGES: &[(&str, &str)] = &[
    ("containerd", "/usr/bin/containerd"),
    ("runc", "/usr/sbin/runc"),
    ("containernetworking-plugins", "/usr/lib/cni/bridge"),
    ("conntrack", "/usr/sbin/conntrack"),
];

/// Debian packages that every way of running VMs needs.
pub const VM_PACKAGES: &[(&str, &str)] = &[
    ("qemu-system-x86", "/usr/bin/qemu-system-x86_64"),
    ("nftables", "/usr/sbin/nft"),
    ("iproute2", "/bin/ip"),
    ("e2fsprogs", "/sbin/mke2fs"),
    ("busybox-static", "/bin/busybox"),
    ("docker-registry", "/usr/bin/docker-registry"),
    ("skopeo", "/usr/bin/skopeo"),
    ("musl-tools", "/usr/bin/musl-gcc"),
    ("util-linux", "/usr/bin/unshare"),
];

/// Debian packages that only the tests need.
pub const TEST_PACKAGES: &[(&str, &str)] = &[
    ("apache2-utils", "/usr/bin/htpasswd"),
    ("cpio", "/usr/bin/cpio"),
    ("debootstrap", "/usr/sbin/debootstrap"),
    ("erofs-utils", "/usr/bin/fsck.erofs"),
    ("socat", "/usr/bin/socat"),
    ("umoci", "/usr/bin/umoci"),
];

/// Fails unless the caller is root.
///
/// # Errors
/// When it is not.
pub fn root() -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    bail!(
        "this needs root, for network namespaces, mounts and cgroups: run it as root (`sudo -E cargo xtask …`)"
    )
}

/// Fails unless `go` can be run.
///
/// # Errors
/// When it can't.
pub fn go() -> Result<()> {
    match Command::new("go").arg("version").output() {
        Ok(output) if output.status.success() => Ok(()),
        _ => bail!(
            "there is no `go` on PATH, and the control plane is built with it: install Go 1.26 or newer (https://go.dev/dl)"
        ),
    }
}

/// Fails when something listens on `address` already.
///
/// # Errors
/// When the port is taken.
pub fn port_free(address: SocketAddr) -> Result<()> {
    TcpListener::bind(address).map(drop).with_context(|| {
        format!("port {address} is busy: end what uses it (`ss -ltnp`) or set IMP_DEV_PORT to a free one")
    })
}

/// Fails unless the file system of `dir`, or of its nearest parent that exists, has `mib` MiB free.
///
/// # Errors
/// When it has less, or can't be asked.
pub fn disk(dir: &Utf8Path, mib: u64) -> Result<()> {
    let existing = dir.ancestors().find(|d| d.exists()).unwrap_or_else(|| Utf8Path::new("/"));
    let stat = rustix::fs::statvfs(existing.as_str())
        .with_context(|| format!("ask for free space in {existing}"))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize) >> 20;
    if free < mib {
        bail!(
            "{existing} has {free} MiB free and {mib} MiB are needed: make room, or set IMP_DEV_DIR to another disk"
        );
    }
    Ok(())
}

/// Fails unless `dir` is on a file system that overlays can stand on.
///
/// # Errors
/// When it is on tmpfs or an overlay.
pub fn real_file_system(dir: &Utf8Path) -> Result<()> {
    const TMPFS: u64 = 0x0102_1994;
    const OVERLAY: u64 = 0x794c_7630;
    let existing = dir.ancestors().find(|d| d.exists()).unwrap_or_else(|| Utf8Path::new("/"));
    let stat = rustix::fs::statfs(existing.as_str())
        .with_context(|| format!("ask for the file system of {existing}"))?;
    match u64::try_from(stat.f_type) {
        Ok(TMPFS | OVERLAY) => {
            bail!(
                "{existing} is on a tmpfs or overlay, which container images can't be stored on: set IMP_DEV_DIR to a directory on ext4 or xfs"
            )
        }
        _ => Ok(()),
    }
}

/// Fails unless `mib` MiB of memory are available.
///
/// # Errors
/// When there is less, or `/proc/meminfo` can't be read.
pub fn memory(mib: u64) -> Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let available = text
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .context("/proc/meminfo has no MemAvailable")?
        >> 10;
    if available < mib {
        bail!(
            "{available} MiB of memory are available and {mib} MiB are needed: end other programs, or use `up --light`"
        );
    }
    Ok(())
}

/// What to know about hardware virtualisation; not an error, since VMs run without it. Whether a `/dev/kvm` that is there
/// truly works is known only after a guest has booted; the runtime tries that and reports it.
#[must_use]
pub fn kvm_note() -> Option<String> {
    let missing = "VMs will run by software emulation: real, and some ten times slower";
    match std::fs::metadata("/dev/kvm") {
        Ok(m) if m.file_type().is_char_device() => match std::fs::File::open("/dev/kvm") {
            Ok(_) => None,
            Err(e) => Some(format!("/dev/kvm can't be opened ({e}); {missing}")),
        },
        _ => Some(format!("there is no /dev/kvm; {missing}")),
    }
}

/// Fails when there is no `/dev/net/tun`.
///
/// # Errors
/// When it is missing.
pub fn tun() -> Result<()> {
    if Utf8Path::new("/dev/net/tun").exists() {
        return Ok(());
    }
    bail!("there is no /dev/net/tun, which VMs' network devices need: `modprobe tun`")
}

/// The packages whose file is missing.
#[must_use]
pub fn missing_packages(groups: &[&[(&'static str, &'static str)]]) -> Vec<&'static str> {
    groups
        .iter()
        .flat_map(|g| g.iter())
        .filter(|(_, file)| !Utf8Path::new(file).exists())
        .map(|(name, _)| *name)
        .collect()
}

/// Installs Debian packages.
///
/// # Errors
/// When apt-get is missing or fails, with its last words.
pub fn install_packages(packages: &[&str]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").args(args);
        crate::netns::run(&mut command)
    };
    let list = packages.join(" ");
    let _quiet = NoServices::new()?;
    // The lists may be old, or empty as on a fresh image; when they can't be had, what is cached may still do.
    let updated = apt(&["update", "-q"]);
    let install = [&["install", "-q", "-y", "--no-install-recommends"], packages].concat();
    apt(&install)
        .or_else(|e| updated.and(Err(e)))
        .with_context(|| format!("install the Debian packages {list}; `apt-get install {list}` shows more"))
}

/// Keeps Debian's packages from starting their services (invoke-rc.d(8)): the programs are wanted, a containerd or a registry of the
/// machine itself is not.
struct NoServices {
    made: bool,
}

/// The script that is asked before a service is started; 101 means no.
const POLICY: &str = "/usr/sbin/policy-rc.d";

impl NoServices {
    fn new() -> Result<Self> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let mut options = std::fs::OpenOptions::new();
        match options.write(true).create_new(true).mode(0o755).open(POLICY) {
            Ok(mut file) => {
                std::io::Write::write_all(&mut file, b"#!/bin/sh\nexit 101\n")
                    .with_context(|| format!("write {POLICY}"))?;
                Ok(Self { made: true })
            }
            // The machine has a policy of its own.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(Self { made: false }),
            Err(e) => Err(e).with_context(|| format!("write {POLICY}")),
        }
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.made {
            // It only keeps services from starting at the next installation.
            let _ = std::fs::remove_file(POLICY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_port_is_named_in_one_line_and_a_free_one_is_fine() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let error = format!("{:#}", port_free(address).unwrap_err());
        assert!(error.contains(&address.to_string()) && !error.contains('\n'), "{error}");
        drop(listener);
        port_free(address).unwrap();
    }

    #[test]
    fn too_little_disk_and_memory_are_told_with_what_is_there() {
        let error = disk(Utf8Path::new("/no/such/directory"), u64::MAX).unwrap_err().to_string();
        assert!(error.contains("MiB free"), "{error}");
        disk(Utf8Path::new("/"), 0).unwrap();
        assert!(memory(u64::MAX).unwrap_err().to_string().contains("available"));
        memory(1).unwrap();
    }

    #[test]
    fn only_missing_packages_are_named() {
        let group: &[(&str, &str)] = &[("here", "/proc/self/stat"), ("not-here", "/no/such/file")];
        assert_eq!(missing_packages(&[group]), ["not-here"]);
    }
}
