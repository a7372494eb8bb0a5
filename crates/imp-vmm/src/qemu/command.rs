//! QEMU's command line: a minimal machine, everything handed over as open files.

use super::tsc;
use crate::{Accelerator, LaunchConfig, process};

/// QMP's socket in the VM's run directory.
pub(super) const QMP_SOCKET: &str = "qmp.sock";
/// The guest channel's socket.
pub(super) const GUEST_SOCKET: &str = "guest.sock";
/// The serial console's socket.
pub(super) const CONSOLE_SOCKET: &str = "console.sock";
/// What QEMU prints.
pub(super) const LOG_FILE: &str = "vmm.log";
/// The translation cache is bounded (in MiB): it counts against the VM's cgroup, and its default is a gigabyte.
const TCG: &str = "tcg,tb-size=64";
/// Name of the virtio-serial port that the guest's agent looks for.
const GUEST_PORT: &str = "imp.guest.0";

/// File descriptors that QEMU inherits: its user needs no permission on any path.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) qmp: i32,
    pub(super) guest: i32,
    pub(super) console: i32,
    pub(super) kernel: i32,
    pub(super) initrd: i32,
    /// Descriptor and whether it is read-only, in guest order.
    pub(super) drives: Vec<(i32, bool)>,
    /// Descriptor of the tap and the guest's MAC.
    pub(super) nic: Option<(i32, String)>,
}

/// The whole command line.
pub(super) fn arguments(config: &LaunchConfig, handed: &Handed) -> Vec<String> {
    let mut args = Vec::new();
    let mut arg = |name: &str, value: String| args.extend([name.to_owned(), value]);
    let (accel, cpu) = match config.accelerator {
        Accelerator::Kvm => ("kvm", "host"),
        // The oldest model that Debian's user space and the kernel's fast paths are content with: emulating more costs.
        Accelerator::Tcg => (TCG, "Nehalem-v1"),
    };
    arg("-name", process::marker(&config.uid));
    arg("-M", "microvm,acpi=on,rtc=on".to_owned());
    arg("-accel", accel.to_owned());
    arg("-cpu", cpu.to_owned());
    arg("-smp", config.vcpus.to_string());
    arg("-m", format!("{}M", config.memory_mib));
    arg("-display", "none".to_owned());
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    arg("-sandbox", sandbox.to_owned());
    arg("-kernel", format!("/proc/self/fd/{}", handed.kernel));
    arg("-initrd", format!("/proc/self/fd/{}", handed.initrd));
    arg("-append", kernel_arguments(config.accelerator));
    for (id, fd) in [("qmp", handed.qmp), ("guest", handed.guest), ("console", handed.console)] {
        arg("-chardev", format!("socket,id={id},fd={fd},server=on,wait=off"));
    }
    arg("-mon", "chardev=qmp,mode=control".to_owned());
    arg("-serial", "chardev:console".to_owned());
    let mut devices = Vec::new();
    for (n, (fd, read_only)) in handed.drives.iter().enumerate() {
        let mode = if *read_only { "on" } else { "off" };
        arg("-add-fd", format!("fd={fd},set={n}"));
        let locking = if *read_only { "off" } else { "auto" };
        arg(
            "-blockdev",
            format!(
                "driver=file,node-name=file{n},filename=/dev/fdset/{n},read-only={mode},locking={locking}"
            ),
        );
        arg("-blockdev", format!("driver=raw,node-name=disk{n},file=file{n},read-only={mode}"));
        devices.push(format!("virtio-blk-device,drive=disk{n}"));
    }
    devices.push("virtio-serial-device,max_ports=2,id=serial".to_owned());
    if let Some((fd, mac)) = &handed.nic {
        arg("-netdev", format!("tap,id=net0,fd={fd}"));
        devices.push(format!("virtio-net-device,netdev=net0,mac={mac}"));
    }
    // QEMU hands out its slots from the top, and the guest finds the top one first: the order stays. (A slot that is named
    // is no way to be sure: the lowest does not work under emulation.)
    for device in devices {
        arg("-device", device);
    }
    arg("-device", format!("virtserialport,bus=serial.0,chardev=guest,name={GUEST_PORT}"));
    args.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    args
}

/// Kernel parameters: the same for every VM of an accelerator, nothing of the VM's own.
fn kernel_arguments(accelerator: Accelerator) -> String {
    let mut text = "console=ttyS0 quiet panic=-1 rdinit=/init".to_owned();
    if accelerator == Accelerator::Tcg {
        // Mitigations protect nothing in an emulated CPU and cost half a second of boot.
        text += &format!(" tsc_early_khz={} mitigations=off cryptomgr.notests no_timer_check", tsc::khz());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(accelerator: Accelerator) -> LaunchConfig {
        LaunchConfig {
            uid: "u1".into(),
            run_dir: "/run/imp/vms/u1".into(),
            kernel: "/k".into(),
            initrd: "/i".into(),
            vcpus: 2,
            memory_mib: 256,
            drives: Vec::new(),
            nic: None,
            accelerator,
            ids: (1, 1),
            cgroup: Vec::new(),
        }
    }

    fn handed() -> Handed {
        Handed {
            qmp: 3,
            guest: 4,
            console: 5,
            kernel: 6,
            initrd: 7,
            drives: vec![(8, true), (9, false)],
            nic: None,
        }
    }

    #[test]
    fn fr9_nothing_of_the_vm_is_on_the_kernels_command_line() {
        let args = arguments(&config(Accelerator::Tcg), &handed());
        let append = &args[args.iter().position(|a| a == "-append").unwrap() + 1];
        assert!(append.is_ascii() && append.len() < 2048 && !append.contains("u1"), "{append}");
    }

    #[test]
    fn mitigations_stay_on_where_the_cpu_is_real() {
        assert!(!kernel_arguments(Accelerator::Kvm).contains("mitigations"));
        assert!(kernel_arguments(Accelerator::Tcg).contains("mitigations=off"));
    }

    #[test]
    fn the_marker_is_an_argument_of_its_own() {
        assert!(arguments(&config(Accelerator::Kvm), &handed()).contains(&"imp:u1".to_owned()));
    }
}
