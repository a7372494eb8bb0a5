//! How an engine is run.

use camino::Utf8PathBuf;
use imp_image::{Converter, StoreOptions};
use imp_net::NetworkOptions;
use std::time::Duration;

/// Users from here on belong to nobody on a usual host; the one before is for what lays images out.
const FIRST_USER: u32 = 2_000_000_000;

/// Settings of an [`crate::Engine`]. The program that has one begins its `main` with [`imp_image::converter::run_if_asked`].
#[derive(Clone, Debug)]
pub struct Config {
    /// Journal, disks, logs, images. One engine at a time.
    pub state_dir: Utf8PathBuf,
    /// Sockets of VMs; short, and emptied by a reboot.
    pub run_dir: Utf8PathBuf,
    /// Linux kernel image.
    pub kernel: Utf8PathBuf,
    /// Initial RAM disk with `imp-guest`.
    pub initrd: Utf8PathBuf,
    /// QEMU's program.
    pub qemu: Utf8PathBuf,
    /// Name of the parent control group; one for each engine on a host.
    pub cgroup_parent: String,
    /// VMs run as this user number plus a slot from 0.
    pub first_user: u32,
    /// The longest from the start of a VMM to the guest's hello.
    pub hello_deadline: Duration,
    /// How images are fetched.
    pub images: StoreOptions,
    /// How networks are made.
    pub network: NetworkOptions,
}

impl Config {
    /// Settings for a state and run directory and boot files, with defaults for the rest.
    #[must_use]
    pub fn new(state_dir: Utf8PathBuf, run_dir: Utf8PathBuf, boot_dir: &camino::Utf8Path) -> Self {
        Self {
            state_dir,
            run_dir,
            kernel: boot_dir.join("vmlinux"),
            initrd: boot_dir.join("initramfs.cpio"),
            qemu: Utf8PathBuf::from(imp_vmm::qemu::PROGRAM),
            cgroup_parent: "imp".to_owned(),
            first_user: FIRST_USER,
            hello_deadline: Duration::from_secs(120),
            images: StoreOptions {
                converter: Converter::Process { user: FIRST_USER - 1 },
                ..StoreOptions::default()
            },
            network: NetworkOptions::default(),
        }
    }
}
