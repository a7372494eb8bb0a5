//! What VMs may use of a development node: more CPUs than the machine has, since its VMs idle most of the time.

use std::fs;

use anyhow::{Context as _, Result};
use imp_api::ClusterImpNodeProfile;
use imp_testkit::cluster::layout::node_name;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;

/// Virtual CPUs for each CPU of the machine.
const VCPUS_PER_CPU: usize = 8;

/// Gives each node a profile.
pub(super) async fn apply(client: &Client, nodes: u8) -> Result<()> {
    let (cpus, memory_kib) = capacity()?;
    let api: Api<ClusterImpNodeProfile> = Api::all(client.clone());
    for name in (1..=nodes).map(node_name) {
        let profile = json!({
            "apiVersion": "imp.dev/v1alpha1", "kind": "ClusterImpNodeProfile", "metadata": {"name": name},
            // A quarter of the memory is for the rest of the machine.
            "spec": {"vcpuCapacity": cpus * VCPUS_PER_CPU, "memoryMiB": memory_kib / 1024 * 3 / 4},
        });
        let manager = PatchParams::apply("imp-dev").force();
        api.patch(&name, &manager, &Patch::Apply(profile))
            .await
            .with_context(|| format!("make the profile of node {name}"))?;
    }
    Ok(())
}

/// CPUs and KiB of memory of this machine.
pub(super) fn capacity() -> Result<(usize, u64)> {
    let cpus = std::thread::available_parallelism().context("count the CPUs")?.get();
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let memory = text
        .lines()
        .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok())
        .context("/proc/meminfo has no MemTotal")?;
    Ok((cpus, memory))
}
