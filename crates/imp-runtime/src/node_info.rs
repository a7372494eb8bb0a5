//! What the runtime knows of its node.

use crate::shared::Shared;
use imp_proto::v1 as pb;

/// Collects it; waits for the answer on hardware virtualisation, which is found out once.
pub(crate) async fn collect(shared: &Shared) -> pb::NodeInfoResponse {
    let kvm = shared.kvm().await;
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let memory = read("/proc/meminfo");
    let kib = memory
        .lines()
        .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let free =
        rustix::fs::statvfs(shared.config.state_dir.as_std_path()).map_or(0, |s| s.f_bavail * s.f_frsize);
    let capabilities = shared.vmm.capabilities();
    pb::NodeInfoResponse {
        runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: shared.boot_id.clone(),
        architecture: imp_image::host_architecture().to_owned(),
        cpu_model: model.map(|(_, name)| name.trim().to_owned()).unwrap_or_default(),
        cpus: std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
        memory_bytes: kib.unwrap_or(0) << 10,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        vmms: vec![pb::VmmInfo {
            driver: capabilities.driver.to_owned(),
            version: capabilities.version.clone(),
            hardware_virtualization: kvm.usable,
            message: kvm.reason.clone(),
        }],
        disk_free_bytes: free,
    }
}
