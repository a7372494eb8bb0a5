//! ImpVMClass: a size of VM.

use k8s_openapi::api::core::v1::Toleration;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{Arch, GuestAgentConfig, ProbeSpec, RestartPolicy};

/// Size of a VM, and defaults for VMs of the class.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpVMClass",
    plural = "impvmclasses",
    singular = "impvmclass",
    shortname = "impcls",
    category = "imp",
    derive = "PartialEq",
    doc = "A size of VM (CPUs, memory, disk) and defaults for VMs of the class.",
    printcolumn(name = "VCPU", type_ = "integer", json_path = ".spec.vcpu"),
    printcolumn(name = "Memory", type_ = "integer", json_path = ".spec.memoryMiB", description = "MiB"),
    printcolumn(name = "Disk", type_ = "integer", json_path = ".spec.diskGiB", description = "GiB"),
    printcolumn(name = "Arch", type_ = "string", json_path = ".spec.arch"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMClassSpec {
    /// Virtual CPUs.
    #[schemars(range(min = 1, max = 256))]
    pub vcpu: i32,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB")]
    #[schemars(range(min = 128))]
    pub memory_mib: i32,
    /// Size of the VM's writable disk in GiB.
    #[serde(rename = "diskGiB")]
    #[schemars(range(min = 1, max = 65536))]
    pub disk_gib: i32,
    /// CPU architecture that VMs of the class need. multi: any.
    #[serde(default)]
    pub arch: Arch,
    /// Probes of VMs that have none themselves or from their template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbeSpec>,
    /// The agent inside the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_agent: Option<GuestAgentConfig>,
    /// Restart policy of VMs that have none themselves or from their template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<RestartPolicy>,
    /// Taints of nodes that VMs of the class tolerate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
}
