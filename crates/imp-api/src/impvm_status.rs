//! What is true of an ImpVM.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is true of the VM. Written by two field managers: `imp-operator` (placement, address, restarts, expiry) and
/// `imp-agent` (what happens on the node).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMStatus {
    /// Where the VM is in its life.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<VMPhase>,
    /// A sentence about the phase, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// metadata.generation that phase and message are about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Node that the VM is bound to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// IPv4 address, reserved for the VM as long as the object exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,
    /// MAC address of the VM's network device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac_address: Option<String>,
    /// Exit code of the workload; 128 + signal when a signal ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Signal that ended the workload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The guest kernel ended the workload because memory ran out.
    #[serde(rename = "oomKilled", skip_serializing_if = "Option::is_none")]
    pub oom_killed: Option<bool>,
    /// Why the VM ended or failed: one word, as in the reason of condition Ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Digest of the image's manifest, sha256:….
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    /// The virtual machine monitor that runs the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vmm: Option<VmmStatus>,
    /// Process ID of the virtual machine monitor on the node; 0 or unset when none runs.
    #[serde(rename = "runtimePID", skip_serializing_if = "Option::is_none")]
    pub runtime_pid: Option<i64>,
    /// What the guest uses, as it says itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<VmUsage>,
    /// How often the VM was started again; the number of its current attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_count: Option<i32>,
    /// Earliest time of the next restart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_retry_after: Option<Time>,
    /// restartCount at which the present budget of retries began: a reset or a cool-down begins a new one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retries_from: Option<i32>,
    /// When all restarts were used up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exhausted_at: Option<Time>,
    /// When the VM was first bound to a node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduled_at: Option<Time>,
    /// When the node began to start the current attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// When the workload of the VM first ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running_at: Option<Time>,
    /// When the last attempt ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// When the VM will be deleted by its expireAfter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Time>,
    /// Where the node keeps the saved memory of a suspended VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspend_snapshot_path: Option<String>,
    /// When the VM was suspended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspended_at: Option<Time>,
    /// When the VM was last busy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_activity_time: Option<Time>,
    /// Identity of the VM in Cilium. Never written.
    #[serde(rename = "ciliumEndpointID", skip_serializing_if = "Option::is_none")]
    pub cilium_endpoint_id: Option<i64>,
    /// The configuration of a CI runner was handed to the guest; it is never handed over twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner_handoff_accepted: Option<bool>,
    /// Exit code of the CI runner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner_exit_code: Option<i32>,
    /// Why the CI runner failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub runner_failure_reason: Option<String>,
    /// Conditions: Scheduled, NodeHealthy, SpecHonored, ImageReady, NetworkReady, GuestReady, Started, Healthy, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Where a VM is in its life.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[schemars(description = "")] // a description of the type would hide those of optional fields
pub enum VMPhase {
    /// Not bound to a node.
    #[default]
    Pending,
    /// Bound to a node, which has not begun.
    Scheduled,
    /// The node pulls the image, makes disk and network, boots.
    Starting,
    /// The workload's program runs.
    Running,
    /// The VM is being deleted.
    Terminating,
    /// The workload ended with exit code 0 and is not started again.
    Succeeded,
    /// The attempt failed. It may be started again, see nextRetryAfter.
    Failed,
    /// All restarts are used up.
    RetryExhausted,
    /// Memory is being saved.
    Suspending,
    /// Saved and stopped.
    Suspended,
    /// Saved memory is being loaded.
    Resuming,
}

impl VMPhase {
    /// The spelling of the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Scheduled => "Scheduled",
            Self::Starting => "Starting",
            Self::Running => "Running",
            Self::Terminating => "Terminating",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::RetryExhausted => "RetryExhausted",
            Self::Suspending => "Suspending",
            Self::Suspended => "Suspended",
            Self::Resuming => "Resuming",
        }
    }
}

impl std::fmt::Display for VMPhase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The virtual machine monitor that runs a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VmmStatus {
    /// qemu or firecracker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// kvm (hardware virtualisation) or tcg (software emulation, slow).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
}

/// What a guest uses, as it says itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VmUsage {
    /// When the figures were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_at: Option<Time>,
    /// CPU time since boot, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_nanoseconds: Option<i64>,
    /// Memory in use, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<i64>,
    /// Memory that the guest sees, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_total_bytes: Option<i64>,
    /// Bytes in use on the root file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_used_bytes: Option<i64>,
    /// Size of the root file system in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_total_bytes: Option<i64>,
    /// Bytes received since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_receive_bytes: Option<i64>,
    /// Bytes sent since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_transmit_bytes: Option<i64>,
}
