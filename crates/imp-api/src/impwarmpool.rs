//! ImpWarmPool: VMs that wait, ready to be used.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{DurationString, patterns};

/// How many VMs wait, and what they are made from.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpWarmPool",
    plural = "impwarmpools",
    singular = "impwarmpool",
    shortname = "impwp",
    category = "imp",
    category = "all",
    namespaced,
    status = "ImpWarmPoolStatus",
    derive = "PartialEq",
    doc = "VMs restored from a snapshot that wait, ready to be used. Not acted on yet.",
    scale(
        spec_replicas_path = ".spec.size",
        status_replicas_path = ".status.readyCount",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Snapshot", type_ = "string", json_path = ".spec.snapshotRef"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".spec.size"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyCount"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ImpWarmPoolSpec {
    /// ImpVMSnapshot whose elected base snapshot the VMs start from.
    #[schemars(length(max = 253))]
    pub snapshot_ref: String,
    /// How many VMs wait. 0: none.
    #[serde(default = "size")]
    #[schemars(range(min = 0, max = 10000))]
    pub size: i32,
    /// ImpVMTemplate of the same namespace.
    #[schemars(length(max = 253))]
    pub template_name: String,
    /// Delete VMs this long after they first ran, e.g. 1h. 0: never. Overrides the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) == duration('0s') || duration(self) >= duration('60s')").message("must be 0 or at least 60s"))]
    pub expire_after: Option<DurationString>,
}

/// What is true of the pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImpWarmPoolStatus {
    /// metadata.generation that the status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// VMs that run and wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_count: Option<i32>,
    /// Label selector of the pool's VMs, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

fn size() -> i32 {
    2
}
