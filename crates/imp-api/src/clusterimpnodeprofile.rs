//! ClusterImpNodeProfile: settings of one node, and what was seen there.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::patterns;

/// Settings of one node. The object has the node's name.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ClusterImpNodeProfile",
    plural = "clusterimpnodeprofiles",
    singular = "clusterimpnodeprofile",
    shortname = "impnp",
    category = "imp",
    status = "ClusterImpNodeProfileStatus",
    derive = "PartialEq",
    doc = "Settings of one node (the object has the node's name), and what its agent saw there.",
    printcolumn(name = "Fraction", type_ = "string", json_path = ".spec.capacityFraction"),
    printcolumn(name = "MaxVMs", type_ = "integer", json_path = ".spec.maxImpVMs"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "CPUs", type_ = "integer", json_path = ".status.capacity.cpus"),
    printcolumn(name = "VMM", type_ = "string", json_path = ".status.vmms[*].driver"),
    printcolumn(name = "KVM", type_ = "string", json_path = ".status.vmms[*].hardwareVirtualization"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "CPU Model", type_ = "string", json_path = ".status.cpuModel", priority = 1),
    printcolumn(name = "Kernel", type_ = "string", json_path = ".status.kernel", priority = 1),
    printcolumn(name = "Runtime", type_ = "string", json_path = ".status.runtimeVersion", priority = 1),
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agentVersion", priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterImpNodeProfileSpec {
    /// Fraction of the node's allocatable CPU and memory that VMs may use, from 0 to 1. Unset: the cluster's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), regex(pattern = patterns::FRACTION))]
    pub capacity_fraction: Option<String>,
    /// Most VMs on the node. 0: no such limit.
    #[serde(rename = "maxImpVMs", default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub max_imp_vms: i32,
    /// Virtual CPUs that VMs may use, instead of a fraction. 0: the fraction counts.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub vcpu_capacity: i32,
    /// Memory in MiB that VMs may use, with vcpuCapacity.
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "is_zero64")]
    #[schemars(range(min = 0))]
    pub memory_mib: i64,
    /// CPU model that restores and migrations compare. Unset: what the agent saw, status.cpuModel.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub cpu_model: Option<String>,
    /// IPv4 address by which other nodes reach VMs of this one. Not honoured yet.
    #[serde(rename = "vtepIP", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 15), regex(pattern = patterns::IPV4))]
    pub vtep_ip: Option<String>,
    /// Interfaces of the node for local networks. Not honoured yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub lan_bindings: Vec<LanBinding>,
}

/// The node's interface for a local network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LanBinding {
    /// Name in ClusterImpConfig.spec.networking.lanAttachments.
    #[schemars(length(min = 1, max = 253))]
    pub attachment_name: String,
    /// Interface of the node.
    #[schemars(length(min = 1, max = 15), regex(pattern = patterns::INTERFACE))]
    pub parent_interface: String,
}

/// What the node's agent saw.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterImpNodeProfileStatus {
    /// metadata.generation that the status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the agent last wrote this. It writes on change; its heartbeat is the Lease of the same name in imp-system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_at: Option<Time>,
    /// Figures of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<NodeCapacity>,
    /// Virtual machine monitors that work there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["driver"]))]
    pub vmms: Vec<NodeVmm>,
    /// CPU model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// CPU architecture: amd64 or arm64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// Release of the node's kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Boot ID of the node; another one means that it was rebooted.
    #[serde(rename = "bootID", skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// Version of imp-runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_version: Option<String>,
    /// Version of imp-agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Where the agent serves streams to the operator, host:port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_endpoint: Option<String>,
    /// Conditions: Ready (the agent talks to the runtime, which can start VMs).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Figures of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeCapacity {
    /// CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<i32>,
    /// Memory in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<i64>,
    /// Bytes free where disks and images are kept, when last written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_free_bytes: Option<i64>,
}

/// A virtual machine monitor of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeVmm {
    /// qemu or firecracker.
    pub driver: String,
    /// Its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// A guest really ran on hardware virtualisation since the node booted. False: VMs are emulated in software, slowly.
    #[serde(default)]
    pub hardware_virtualization: bool,
    /// Why hardware virtualisation is not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &i32) -> bool {
    *value == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero64(value: &i64) -> bool {
    *value == 0
}
