//! ImpVMSnapshot: saved state of a VM.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::patterns;

/// Which VM is saved, when, and where to. Each execution becomes a child object of the same kind.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpVMSnapshot",
    plural = "impvmsnapshots",
    singular = "impvmsnapshot",
    shortname = "impsnap",
    category = "imp",
    category = "all",
    namespaced,
    status = "ImpVMSnapshotStatus",
    derive = "PartialEq",
    doc = "Saved memory and disk of a VM, once or on a schedule. Not acted on yet.",
    printcolumn(name = "Source", type_ = "string", json_path = ".spec.sourceVMName"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Schedule", type_ = "string", json_path = ".spec.schedule"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMSnapshotSpec {
    /// Name of the VM.
    #[serde(rename = "sourceVMName")]
    #[schemars(length(max = 253))]
    pub source_vm_name: String,
    /// Namespace of the VM.
    #[serde(rename = "sourceVMNamespace")]
    #[schemars(length(max = 63))]
    pub source_vm_namespace: String,
    /// Five-field cron expression for recurring snapshots. Unset: one snapshot, now.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub schedule: Option<String>,
    /// How many executions are kept.
    #[serde(default = "retention")]
    #[schemars(range(min = 1, max = 10))]
    pub retention: i32,
    /// Where snapshots are kept.
    pub storage: SnapshotStorage,
    /// Name of the execution that warm pools start from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub base_snapshot: Option<String>,
}

/// Where snapshots are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotStorage {
    /// On the node, or in a registry.
    #[serde(rename = "type")]
    pub type_: SnapshotStorageType,
    /// Settings of type node-local.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_local: Option<NodeLocalStorage>,
    /// Settings of type oci-registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci_registry: Option<OciRegistryStorage>,
}

/// Kind of storage of snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotStorageType {
    /// A directory of the node.
    NodeLocal,
    /// An OCI registry.
    OciRegistry,
}

/// A directory of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeLocalStorage {
    /// Base directory.
    #[serde(default = "path")]
    #[schemars(length(max = 4096), regex(pattern = patterns::ABSOLUTE_PATH))]
    pub path: String,
}

/// An OCI registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct OciRegistryStorage {
    /// Repository, e.g. registry.example.org/snapshots.
    #[schemars(length(max = 1024))]
    pub repository: String,
    /// Secret of the same namespace with credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull_secret_ref: Option<OptionalNameRef>,
}

/// Reference whose name may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct OptionalNameRef {
    /// Name of the object.
    #[serde(default)]
    #[schemars(length(max = 253))]
    pub name: String,
}

/// What is true of the snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMSnapshotStatus {
    /// metadata.generation that the status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pending, Running, Succeeded or Failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Digest of the manifest in the registry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Directory on the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_path: Option<String>,
    /// When it succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<Time>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terminated_at: Option<Time>,
    /// When the next one is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_scheduled_at: Option<Time>,
    /// The newest execution.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_execution_ref: Option<OptionalNameRef>,
    /// The execution that warm pools start from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_snapshot: Option<String>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

fn retention() -> i32 {
    3
}

fn path() -> String {
    "/var/lib/imp/snapshots".into()
}
