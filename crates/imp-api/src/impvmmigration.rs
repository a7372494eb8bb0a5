//! ImpVMMigration: moving a VM.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// Which VM moves, and where to.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpVMMigration",
    plural = "impvmmigrations",
    singular = "impvmmigration",
    shortname = "impmig",
    category = "imp",
    category = "all",
    namespaced,
    status = "ImpVMMigrationStatus",
    derive = "PartialEq",
    doc = "A move of a VM to another node. Not acted on yet.",
    printcolumn(name = "Source", type_ = "string", json_path = ".spec.sourceVMName"),
    printcolumn(name = "Target", type_ = "string", json_path = ".spec.targetNode"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMMigrationSpec {
    /// Name of the VM.
    #[serde(rename = "sourceVMName")]
    #[schemars(length(max = 253))]
    pub source_vm_name: String,
    /// Namespace of the VM.
    #[serde(rename = "sourceVMNamespace")]
    #[schemars(length(max = 63))]
    pub source_vm_namespace: String,
    /// Node to move to. Unset: one is chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub target_node: Option<String>,
}

/// What is true of the migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMMigrationStatus {
    /// metadata.generation that the status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pending, Snapshotting, Restoring, Succeeded or Failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Node that was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selected_node: Option<String>,
    /// Snapshot that carries the state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_ref: Option<String>,
    /// The VM on the target node.
    #[serde(rename = "targetVMName", skip_serializing_if = "Option::is_none")]
    pub target_vm_name: Option<String>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<Time>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
