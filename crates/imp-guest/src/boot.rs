//! From the kernel's start of `/init` to an open channel, and what `Configure` sets up.

pub(crate) mod files;
pub(crate) mod network;
pub(crate) mod random;
pub(crate) mod root;

use std::fs::File;
use std::path::Path;
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, anyhow};
use rustix::mount::{MountFlags, mount};

/// Where the initramfs keeps the modules and their order.
const MODULES: &str = "/lib/modules";

/// The loading of the modules that the channel does not need, under way.
pub(crate) type Devices = JoinHandle<Result<()>>;

/// Mounts the kernel's file systems and loads the channel's modules; the other modules follow in a thread.
pub(crate) fn early() -> Result<Devices> {
    let private = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    for (kind, target, flags) in [
        ("proc", "/proc", private),
        ("sysfs", "/sys", private),
        ("devtmpfs", "/dev", MountFlags::NOSUID),
        ("cgroup2", "/sys/fs/cgroup", private),
        ("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV),
    ] {
        mount(kind, target, kind, flags, None).with_context(|| format!("mount {kind} on {target}"))?;
    }
    let order = std::fs::read_to_string(Path::new(MODULES).join("order"))
        .with_context(|| format!("read {MODULES}/order: the initramfs was not made for this program"))?;
    let (first, rest) = order.split_once("\n\n").unwrap_or((&order, ""));
    load(first)?;
    let rest = rest.to_owned();
    std::thread::Builder::new().name("modules".into()).spawn(move || load(&rest)).context("start a thread")
}

/// Loads modules, a file name a line.
fn load(names: &str) -> Result<()> {
    for name in names.lines().filter(|l| !l.is_empty()) {
        let path = Path::new(MODULES).join(name);
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        match rustix::system::finit_module(&file, c"", 0) {
            // Built into this kernel, or loaded already.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e).with_context(|| format!("load the module {name}")),
        }
    }
    Ok(())
}

/// Waits for the modules of [`early`]. Blocks.
pub(crate) fn wait_for(devices: Devices) -> Result<()> {
    devices.join().map_err(|_| anyhow!("the thread that loads modules panicked"))?
}
