//! From a wish to a VMM: image, disk, network, control group, launch.

use super::{
    failure::{self, Fault},
    finish,
};
use crate::{
    journal::Progress,
    vm::{Vm, now},
};
use camino::Utf8Path;
use imp_image::{EnsureRequest, ImageSource, PullPolicy, RootDisk, host_architecture};
use imp_killpoint::runtime as killpoint;
use imp_net::{Attachment, PortForward};
use imp_proto::v1::{self as pb, FailureReason};
use imp_vmm::{
    Accelerator, Drive, Instance, LAUNCH_MARKER, LaunchConfig, Nic,
    cgroup::{Cgroup, Limits},
};
use std::{process::Stdio, sync::Arc, time::Duration};
use tokio::sync::watch;

/// First and longest pause between two tries at an image, as the kubelet's ImagePullBackOff.
const PULL_RETRY: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));
/// mke2fs takes milliseconds for a sparse disk.
const DISK_DEADLINE: Duration = Duration::from_secs(60);
/// What a VMM needs beside the guest's memory, in MiB; `imp-core` counts it when a VM is placed.
const OVERHEAD_MIB: u64 = 64;
/// Software emulation's translation cache comes on top.
const EMULATION_MIB: u64 = 192;
/// Thousandths of a CPU for the VMM's own threads.
const OVERHEAD_CPU_MILLIS: u64 = 250;

/// What a VM was given.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) image: RootDisk,
    pub(super) launch: LaunchConfig,
}

/// Makes everything that the VMM needs. Idempotent; may be dropped at any await.
pub(super) async fn prepare(vm: &Vm) -> Result<Prepared, Fault> {
    let spec = vm.spec();
    refuse(&spec)?;
    // Pull secrets and environment alike; without them nothing would come of the rest.
    let secrets = vm.secrets().await;
    let credentials = secrets.map(|s| s.0.docker_config_json.iter().map(|d| d.to_vec()).collect());
    let image = image(vm, &spec, credentials.unwrap_or_default()).await?;
    killpoint("image-ready");
    vm.update(|status| status.state = pb::VmState::Preparing.into());
    let resources = spec.resources.unwrap_or_default();
    let read_only = spec.root_disk.is_some_and(|r| r.read_only);
    let mut drives = vec![Drive { path: image.path.clone(), read_only: true }];
    if !read_only {
        disk(&vm.disk(), resources.disk_gib).await?;
        drives.push(Drive { path: vm.disk(), read_only: false });
    }
    killpoint("disk-made");
    let nic = match &spec.network {
        Some(network) => Some(attach(vm, network).await?),
        None => None,
    };
    vm.update(|status| status.network = Some(pb::NetworkStatus { ready: true, message: String::new() }));
    let accelerator = vm.shared.accelerator().await;
    let cgroup = cgroup(vm, resources, accelerator)?;
    killpoint("cgroup-made");
    let run_dir = vm.run_dir();
    make_private(&run_dir)
        .map_err(|e| Fault::new(FailureReason::VmmStartFailed, format!("cannot make {run_dir}: {e}")))?;
    let config = &vm.shared.config;
    let launch = LaunchConfig {
        uid: vm.uid.clone(),
        run_dir,
        kernel: config.kernel.clone(),
        initrd: config.initrd.clone(),
        vcpus: resources.vcpus,
        memory_mib: resources.memory_mib,
        drives,
        nic,
        accelerator,
        ids: (vm.user(), vm.user()),
        cgroup: cgroup.dirs().to_vec(),
    };
    Ok(Prepared { image, launch })
}

/// What this version cannot do is said before anything is made.
fn refuse(spec: &pb::VmSpec) -> Result<(), Fault> {
    let invalid = |message: &str| Err(Fault::new(FailureReason::InvalidSpec, message));
    if spec.root_disk.is_some_and(|r| r.mode() == pb::root_disk::Mode::Flat) {
        return invalid("rootDisk.mode Flat is not there in this version: use Overlay");
    }
    if let Some(image) = &spec.image
        && !image.architecture.is_empty()
        && image.architecture != host_architecture()
    {
        let text = format!("this node runs {} and not {} guests", host_architecture(), image.architecture);
        return invalid(&text);
    }
    Ok(())
}

/// The image's disk, however long its registry takes; what may help by itself (or by a new secret) is tried again.
async fn image(vm: &Vm, spec: &pb::VmSpec, credentials: Vec<Vec<u8>>) -> Result<RootDisk, Fault> {
    vm.update(|status| status.state = pb::VmState::Pulling.into());
    let wanted = spec.image.clone().unwrap_or_default();
    let source: ImageSource = wanted.reference.parse().map_err(|e| failure::image(&e).0)?;
    let policy = match wanted.pull_policy() {
        pb::PullPolicy::Always => PullPolicy::Always,
        pb::PullPolicy::IfNotPresent => PullPolicy::IfNotPresent,
        pb::PullPolicy::Never => PullPolicy::Never,
        pb::PullPolicy::Unspecified => source.default_pull_policy(),
    };
    let request = EnsureRequest {
        source,
        policy,
        architecture: host_architecture().to_owned(),
        docker_config_json: credentials,
    };
    let mut pause = PULL_RETRY.0;
    let mut secrets = vm.secret_changes();
    loop {
        let (progress, mut told) = watch::channel(imp_image::Progress::default());
        let ensure = vm.shared.images.ensure(&request, progress);
        tokio::pin!(ensure);
        let result = loop {
            tokio::select! {
                result = &mut ensure => break result,
                Ok(()) = told.changed() => {
                    let now = *told.borrow_and_update();
                    vm.update(|status| {
                        let image = status.image.get_or_insert_default();
                        (image.pulled_bytes, image.total_bytes) = (now.pulled_bytes, now.total_bytes);
                    });
                }
            }
        };
        let (fault, again) = match result {
            Ok(disk) => {
                vm.update(|status| {
                    status.failure = None;
                    let image = status.image.get_or_insert_default();
                    image.digest.clone_from(&disk.digest);
                    image.ready = true;
                    status.timings.get_or_insert_default().image_ready = Some(now());
                });
                return Ok(disk);
            }
            Err(error) => failure::image(&error),
        };
        if !again {
            return Err(fault);
        }
        tracing::warn!(%fault, retry_in = ?pause, "the image is not there");
        vm.update(|status| status.failure = Some(fault.retrying()));
        // New secrets are a reason to try at once.
        secrets.mark_unchanged();
        let _ = tokio::time::timeout(pause, secrets.changed()).await;
        pause = (pause * 2).min(PULL_RETRY.1);
    }
}

/// The VM's writable disk: sparse, made once, kept over attempts.
async fn disk(path: &Utf8Path, gib: u64) -> Result<(), Fault> {
    if path.exists() {
        return Ok(());
    }
    let fault = |message: String| Fault::new(FailureReason::DiskFailed, message);
    let new = path.with_extension("new");
    let made = async {
        let file = std::fs::File::create(&new)?;
        file.set_len(gib << 30)?;
        let output = tokio::process::Command::new("mke2fs")
            .args([
                "-q",
                "-F",
                "-t",
                "ext4",
                "-m",
                "0",
                "-E",
                "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
            ])
            .arg(&new)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(DISK_DEADLINE, output).await.map_err(std::io::Error::from)??;
        if !output.status.success() {
            return Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        file.sync_all()?;
        std::fs::rename(&new, path)
    };
    made.await.map_err(|e| fault(format!("cannot make the disk {path} with mke2fs (package e2fsprogs): {e}")))
}

async fn attach(vm: &Vm, network: &pb::Network) -> Result<Nic, Fault> {
    let fault = |message: String| Fault::new(FailureReason::NetworkFailed, message);
    let attachment = attachment(vm, network)?;
    vm.journal(|record| record.attachment = Some(attachment.clone()))?;
    killpoint("network-journaled");
    let all = vm.shared.with_attachment(&attachment);
    let attached = vm.shared.network.attach(&attachment, &all).await;
    let attached = attached.map_err(|e| Fault::of(FailureReason::NetworkFailed, &e)).map_err(|e| {
        vm.update(|status| {
            status.network = Some(pb::NetworkStatus { ready: false, message: e.message.clone() });
        });
        fault(e.message)
    })?;
    killpoint("network-made");
    Ok(Nic { tap: attached.tap, mac: network.mac.clone() })
}

fn attachment(vm: &Vm, network: &pb::Network) -> Result<Attachment, Fault> {
    let invalid = |what: &str, text: &str| {
        Fault::new(
            FailureReason::InvalidSpec,
            format!("network {}: {what} {text:?} makes no sense", network.id),
        )
    };
    let port = |p: u32| u16::try_from(p).map_err(|_| invalid("port", &p.to_string()));
    let ports = network.ports.iter().map(|p| {
        Ok(PortForward {
            host_ip: if p.host_ip.is_empty() {
                None
            } else {
                Some(p.host_ip.parse().map_err(|_| invalid("host address", &p.host_ip))?)
            },
            host_port: port(p.host_port)?,
            guest_port: port(p.guest_port)?,
            udp: p.protocol() == pb::Protocol::Udp,
        })
    });
    Ok(Attachment {
        vm: vm.uid.clone(),
        network: network.id.clone(),
        mac: network.mac.clone(),
        address: network.address.parse().map_err(|_| invalid("address", &network.address))?,
        gateway: network.gateway.parse().map_err(|_| invalid("gateway", &network.gateway))?,
        mtu: network.mtu,
        masquerade: network.masquerade,
        egress_interface: network.egress_interface.clone(),
        ports: ports.collect::<Result<_, Fault>>()?,
        tap_owner: vm.user(),
    })
}

fn cgroup(vm: &Vm, resources: pb::Resources, accelerator: Accelerator) -> Result<Cgroup, Fault> {
    let emulation = if accelerator == Accelerator::Tcg { EMULATION_MIB } else { 0 };
    let limits = Limits {
        memory_bytes: (resources.memory_mib + OVERHEAD_MIB + emulation) << 20,
        cpu_millis: u64::from(resources.vcpus) * 1000 + OVERHEAD_CPU_MILLIS,
    };
    let made = Cgroup::create(&vm.shared.config.cgroup_parent, &vm.uid, limits);
    made.map_err(|e| Fault::of(FailureReason::VmmStartFailed, &e))
}

fn make_private(dir: &Utf8Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Starts the VMM. Not to be dropped half-way.
pub(super) async fn launch(vm: &Vm, launch: &LaunchConfig) -> Result<Arc<dyn Instance>, Fault> {
    // An old marker would say of this attempt that it ran.
    finish::remove_file(&launch.run_dir.join(LAUNCH_MARKER))?;
    vm.progress(Progress::Launching)?;
    killpoint("launch-journaled");
    let instance = vm.shared.vmm.launch(launch).await;
    let instance = instance.map_err(|e| Fault::of(FailureReason::VmmStartFailed, &e))?;
    killpoint("launched");
    let record = instance.record().clone();
    let (pid, driver, version) = (record.pid, record.driver.clone(), record.version.clone());
    let accelerator = match record.accelerator {
        Accelerator::Kvm => "kvm",
        Accelerator::Tcg => "tcg",
    };
    let started = now();
    vm.update(|status| {
        status.state = pb::VmState::Booting.into();
        status.timings.get_or_insert_default().vmm_started = Some(started);
        status.vmm = Some(pb::VmmStatus {
            driver,
            version,
            accelerator: accelerator.to_owned(),
            pid,
            started_at: Some(started),
        });
    });
    vm.progress(Progress::Launched(record))?;
    killpoint("process-journaled");
    tracing::info!(pid, accelerator, "the VMM runs");
    Ok(instance)
}
