//! From an ordinary process to PID 1 of a node: namespaces, root file system, services.
//!
//! A node is one process tree with network, mount, PID, UTS, IPC and cgroup namespaces of its own. Its root is an overlay over
//! the machine's, so every installed program is there and nothing it writes touches the machine. Killing PID 1 ends all of it,
//! which is also how a power cut is played; starting it again on the same data is a reboot.
//!
//! The stages are one program run thrice, because a PID namespace takes in children only:
//! [`Stage::Network`] enters the network namespace and becomes `unshare`, whose child is [`Stage::Cgroup`], already PID 1; that
//! joins the node's cgroup and becomes, with the cgroup namespace rooted there, [`Stage::Root`].

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::{CWD, FileType, Mode};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use crate::cgroups::{self, Hierarchy};
use crate::services::{self, Service};

/// Everything PID 1 of a node must know; passed as a JSON file.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct InitConfig {
    /// Host name, which is the node's name.
    pub hostname: String,
    /// File of its network namespace.
    pub netns: Utf8PathBuf,
    /// Its cgroup in every hierarchy, as `imp-dev/n1`.
    pub cgroup: Utf8PathBuf,
    /// Where the new root is put together; a directory on a real file system.
    pub root: Utf8PathBuf,
    /// Directories of the machine that are visible in the node at the same place, on their own file system.
    pub shared: Vec<Utf8PathBuf>,
    /// Directories of the node that survive its reboot: (on the machine, in the node).
    pub persistent: Vec<(Utf8PathBuf, Utf8PathBuf)>,
    /// Files written into the node: (path, contents).
    pub files: Vec<(Utf8PathBuf, String)>,
    /// Global sysctls that the kubelet sets; a plain file is bound over each, so that the machine keeps its values: (path below
    /// `/proc/sys`, value shown).
    pub masked_sysctls: Vec<(String, String)>,
    /// Seed of `/etc/machine-id`, 32 hexadecimal digits.
    pub machine_id: String,
    /// What runs on it, in order.
    pub services: Vec<Service>,
}

/// How far a process has come on its way to PID 1.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Stage {
    /// Outside all namespaces.
    Network,
    /// PID 1, in the machine's cgroup.
    Cgroup,
    /// PID 1, in all namespaces.
    Root,
}

impl std::str::FromStr for Stage {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
        Ok(match s {
            "network" => Self::Network,
            "cgroup" => Self::Cgroup,
            "root" => Self::Root,
            _ => bail!("no such stage: {s} (network, cgroup, root)"),
        })
    }
}

/// Runs a stage; returns only with an error. `again` are the arguments that run this program's `node-init` for a given stage
/// and the same configuration.
///
/// # Errors
/// With the step that failed.
pub fn run(config: &InitConfig, stage: Stage, again: &dyn Fn(&str) -> Vec<String>) -> Result<()> {
    match stage {
        Stage::Network => {
            let netns = fs::File::open(&config.netns).with_context(|| format!("open {}", config.netns))?;
            move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
                .with_context(|| format!("enter network namespace {}", config.netns))?;
            let flags =
                ["--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--uts", "--ipc"];
            Err(Command::new("unshare").args(flags).args(again("cgroup")).exec())
                .context("run unshare (Debian package util-linux)")
        }
        Stage::Cgroup => {
            cgroups::join(&config.cgroup)?;
            Err(Command::new("unshare").arg("--cgroup").args(again("root")).exec()).context("run unshare")
        }
        Stage::Root => {
            if std::process::id() != 1 {
                bail!("this stage must be PID 1 of a new PID namespace; it is run by `cargo xtask up`");
            }
            rustix::system::sethostname(config.hostname.as_bytes()).context("set the host name")?;
            enter_root(config)?;
            prepare(config)?;
            services::run(&config.services)
        }
    }
}

/// Mounts a file system of type `fs_type`.
fn mount(source: &str, target: &Utf8Path, fs_type: &str, flags: MountFlags, data: &str) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("make {target}"))?;
    let data = std::ffi::CString::new(data).context("mount options hold a NUL byte")?;
    rustix::mount::mount(source, target.as_str(), fs_type, flags, data.as_c_str())
        .with_context(|| format!("mount {fs_type} on {target}"))
}

/// Shows the directory `source` at `target` too.
fn bind(source: &Utf8Path, target: &Utf8Path) -> Result<()> {
    fs::create_dir_all(source).with_context(|| format!("make {source}"))?;
    fs::create_dir_all(target).with_context(|| format!("make {target}"))?;
    rustix::mount::mount_bind_recursive(source.as_str(), target.as_str())
        .with_context(|| format!("bind {source} to {target}"))
}

/// Puts the new root together and makes it `/`.
fn enter_root(config: &InitConfig) -> Result<()> {
    let hierarchies = cgroups::hierarchies()?;
    let (work, root) = (config.root.join("overlay"), config.root.join("root"));
    mount("node", &work, "tmpfs", MountFlags::empty(), "size=2g,mode=755")?;
    for dir in ["upper", "work"] {
        fs::create_dir(work.join(dir)).with_context(|| format!("make {work}/{dir}"))?;
    }
    mount(
        "node",
        &root,
        "overlay",
        MountFlags::empty(),
        &format!("lowerdir=/,upperdir={work}/upper,workdir={work}/work"),
    )?;
    for dir in &config.shared {
        bind(dir, &in_root(&root, dir))?;
    }
    mount("run", &root.join("run"), "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, "mode=755")?;
    for (outside, inside) in &config.persistent {
        bind(outside, &in_root(&root, inside))?;
    }
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", &root.join("proc"), "proc", quiet, "")?;
    mount("sysfs", &root.join("sys"), "sysfs", quiet, "")?;
    devices(&root.join("dev"))?;
    mount_cgroups(&root, &hierarchies)?;
    let old = root.join(".old");
    fs::create_dir_all(&old).with_context(|| format!("make {old}"))?;
    rustix::process::pivot_root(root.as_str(), old.as_str()).context("pivot_root")?;
    rustix::process::chdir("/").context("chdir /")?;
    rustix::mount::unmount("/.old", UnmountFlags::DETACH).context("unmount the machine's root")?;
    fs::remove_dir("/.old").context("remove /.old")?;
    // Mounts of pods with Bidirectional propagation must reach the node and other pods.
    rustix::mount::mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .context("share mounts")
}

fn in_root(root: &Utf8Path, path: &Utf8Path) -> Utf8PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A `/dev` with what a node needs; devices that the machine lacks are left out.
fn devices(dev: &Utf8Path) -> Result<()> {
    mount("dev", dev, "tmpfs", MountFlags::NOSUID, "mode=755")?;
    let names = [
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "tty",
        "kmsg",
        "fuse",
        "kvm",
        "net/tun",
        "vhost-net",
        "vhost-vsock",
        "userfaultfd",
        "loop-control",
    ];
    for name in names {
        let source = Utf8Path::new("/dev").join(name);
        let Ok(stat) = rustix::fs::stat(source.as_str()) else { continue };
        let target = dev.join(name);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).with_context(|| format!("make {parent}"))?;
        }
        rustix::fs::mknodat(CWD, target.as_str(), FileType::CharacterDevice, Mode::empty(), stat.st_rdev)
            .with_context(|| format!("make device {target}"))?;
        rustix::fs::chmod(target.as_str(), Mode::from_raw_mode(stat.st_mode & 0o777))
            .with_context(|| format!("set the mode of {target}"))?;
    }
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("devpts", &dev.join("pts"), "devpts", quiet, "newinstance,ptmxmode=0666,mode=620")?;
    mount("shm", &dev.join("shm"), "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, "mode=1777")?;
    mount("mqueue", &dev.join("mqueue"), "mqueue", quiet | MountFlags::NODEV, "")?;
    let links = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ];
    for (name, target) in links {
        std::os::unix::fs::symlink(target, dev.join(name)).with_context(|| format!("link {dev}/{name}"))?;
    }
    Ok(())
}

/// The machine's hierarchies again, seen from the node's cgroup namespace: its own cgroup is their root.
fn mount_cgroups(root: &Utf8Path, hierarchies: &[Hierarchy]) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let base = Utf8Path::new("/sys/fs/cgroup");
    if !hierarchies.iter().any(|h| h.mount_point == base) {
        mount("cgroup", &in_root(root, base), "tmpfs", flags, "mode=755")?;
    }
    for h in hierarchies {
        let target = in_root(root, &h.mount_point);
        mount("cgroup", &target, &h.fs_type, flags, if h.fs_type == "cgroup2" { "" } else { &h.options })?;
        if h.fs_type == "cgroup2" && h.mount_point == base {
            // A cgroup with controllers for its children must hold no process itself (cgroups(7), "no internal processes").
            let init = target.join("init");
            // It is there already after a reboot.
            fs::create_dir_all(&init).with_context(|| format!("make cgroup {init}"))?;
            fs::write(init.join("cgroup.procs"), "0").with_context(|| format!("join cgroup {init}"))?;
            cgroups::delegate(&target)?;
        }
        if let Some(name) = h.mount_point.file_name().filter(|n| n.contains(',')) {
            for single in name.split(',') {
                let link = target.with_file_name(single);
                std::os::unix::fs::symlink(name, &link).with_context(|| format!("link {link}"))?;
            }
        }
    }
    Ok(())
}

/// Files, sysctls and identity, after the root was entered.
fn prepare(config: &InitConfig) -> Result<()> {
    for (path, text) in &config.files {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(|| format!("make {dir}"))?;
        }
        // What the machine keeps there may be a link to elsewhere (/etc/resolv.conf often is).
        let _ = fs::remove_file(path);
        fs::write(path, text).with_context(|| format!("write {path}"))?;
    }
    fs::create_dir_all("/run/lock").context("make /run/lock")?;
    for (key, value) in &config.masked_sysctls {
        mask(&format!("/proc/sys/{key}"), &key.replace('/', "."), value)?;
    }
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/uuid").context("read a random UUID")?;
    mask("/proc/sys/kernel/random/boot_id", "boot_id", boot_id.trim())?;
    fs::write("/etc/machine-id", format!("{}\n", config.machine_id)).context("write /etc/machine-id")?;
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("turn on forwarding")
}

/// Binds a plain file that holds `value` over a file of `/proc`.
fn mask(target: &str, name: &str, value: &str) -> Result<()> {
    fs::create_dir_all("/run/sysctl").context("make /run/sysctl")?;
    let source = format!("/run/sysctl/{name}");
    fs::write(&source, format!("{value}\n")).with_context(|| format!("write {source}"))?;
    rustix::mount::mount_bind(source.as_str(), target).with_context(|| format!("bind {source} to {target}"))
}
