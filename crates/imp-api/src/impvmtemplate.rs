//! ImpVMTemplate: what VMs have in common.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{
    ClusterObjectRef, DurationString, GuestAgentConfig, LocalObjectRef, ProbeSpec, RestartPolicy, patterns,
};

/// What VMs with a templateRef take from here unless they set it themselves.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpVMTemplate",
    plural = "impvmtemplates",
    singular = "impvmtemplate",
    shortname = "impvmt",
    category = "imp",
    category = "all",
    namespaced,
    derive = "PartialEq",
    doc = "What VMs that refer to it have in common.",
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.classRef.name"),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.networkRef.name"),
    printcolumn(name = "Image", type_ = "string", json_path = ".spec.image"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMTemplateSpec {
    /// ImpVMClass of the VMs.
    pub class_ref: ClusterObjectRef,
    /// ImpNetwork of the same namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_ref: Option<LocalObjectRef>,
    /// OCI image of the root disk and the workload.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub image: Option<String>,
    /// Probes; replaced as a whole by a VM's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbeSpec>,
    /// The agent inside the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_agent: Option<GuestAgentConfig>,
    /// What happens after a failure; replaced as a whole by a VM's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<RestartPolicy>,
    /// Group of the ImpNetwork to join. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub network_group: Option<String>,
    /// OCI image laid over the root disk, with a CI runner in it. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub runner_layer: Option<String>,
    /// OCI image laid over the root disk after runnerLayer, with a network agent in it. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub cilium_layer: Option<String>,
    /// Delete VMs this long after they first ran, e.g. 2h. 0: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) == duration('0s') || duration(self) >= duration('60s')").message("must be 0 or at least 60s"))]
    pub expire_after: Option<DurationString>,
}
