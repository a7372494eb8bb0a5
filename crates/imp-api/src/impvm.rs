//! ImpVM: one virtual machine.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{EnvFromSource, EnvVar, Toleration};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    ClusterObjectRef, DurationString, GuestAgentConfig, ImpVMStatus, LocalObjectRef, ProbeSpec,
    RestartPolicy, patterns,
};

/// What a user wants of a VM. A running VM takes changes up with its next start.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpVM",
    plural = "impvms",
    singular = "impvm",
    shortname = "impvm",
    category = "imp",
    category = "all",
    namespaced,
    status = "ImpVMStatus",
    derive = "PartialEq",
    doc = "A virtual machine with a kernel of its own that runs one workload from an OCI image.",
    selectable = ".spec.nodeName",
    selectable = ".status.nodeName",
    selectable = ".status.phase",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.nodeName"),
    printcolumn(name = "IP", type_ = "string", json_path = ".status.ip"),
    printcolumn(name = "Image", type_ = "string", json_path = ".spec.image"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.classRef.name", priority = 1),
    printcolumn(name = "Template", type_ = "string", json_path = ".spec.templateRef.name", priority = 1),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.networkRef.name", priority = 1),
    printcolumn(name = "Exit Code", type_ = "integer", json_path = ".status.exitCode", priority = 1),
    printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restartCount", priority = 1),
    printcolumn(name = "Accelerator", type_ = "string", json_path = ".status.vmm.accelerator", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.classRef) && has(self.templateRef))").message("classRef and templateRef exclude each other").field_path(".classRef"))]
#[x_kube(validation = Rule::new("has(self.classRef) || has(self.templateRef)").message("one of classRef and templateRef is required").field_path(".classRef").reason(Reason::FieldValueRequired))]
#[x_kube(validation = Rule::new("!has(self.classRef) || (has(self.image) && size(self.image) > 0)").message("image is required with classRef").field_path(".image").reason(Reason::FieldValueRequired))]
#[x_kube(validation = Rule::new("!has(oldSelf.nodeName) || oldSelf.nodeName == '' || (has(self.nodeName) && self.nodeName == oldSelf.nodeName)").message("nodeName cannot be changed once it is set").field_path(".nodeName").reason(Reason::FieldValueForbidden))]
pub struct ImpVMSpec {
    /// ImpVMTemplate of the same namespace that gives class, image and the rest; what the VM sets itself wins.
    /// Excludes classRef.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<LocalObjectRef>,
    /// ImpVMClass: CPUs, memory, disk. Excludes templateRef.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_ref: Option<ClusterObjectRef>,
    /// ImpNetwork of the same namespace. Unset (and unset in the template): the VM has no network device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_ref: Option<LocalObjectRef>,
    /// OCI image of the root disk and the workload, as in a Pod: registry/repository:tag or @sha256:digest.
    /// Required with classRef; overrides the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub image: Option<String>,
    /// When the image is pulled. Unset: Always for the tag latest or none, else IfNotPresent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Secrets of this namespace, of type kubernetes.io/dockerconfigjson, with credentials for the image's registry.
    /// Tried in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub image_pull_secrets: Vec<LocalObjectRef>,
    /// Program and first arguments; replaces the image's ENTRYPOINT and drops its CMD. No shell is involved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Arguments; replaces the image's CMD.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Working directory of the workload; made when missing. Unset: the image's WORKDIR.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), regex(pattern = patterns::ABSOLUTE_PATH))]
    pub working_dir: Option<String>,
    /// User of the workload as in a Dockerfile: name or number, optionally with ":" and group. Unset: the image's USER.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub user: Option<String>,
    /// What the workload's end means: an ephemeral VM is done (Succeeded or Failed), a persistent one keeps its disk and
    /// is started again by its restart policy.
    #[serde(default)]
    pub lifecycle: VMLifecycle,
    /// Node to run on, whatever the selectors say. Unset: one is chosen. Cannot be changed once it is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node_name: Option<String>,
    /// Name of an execution of an ImpVMSnapshot, of the same namespace, to boot from. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub snapshot_ref: Option<String>,
    /// Labels that the node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints of nodes that the VM tolerates, besides those that its class tolerates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// Environment of the workload, above the image's and envFrom's; the last of a name wins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
    /// ConfigMaps and Secrets of this namespace whose entries become environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env_from: Vec<EnvFromSource>,
    /// Data for the guest's first boot (cloud-init). Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_data: Option<UserDataSource>,
    /// Probes of the workload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbeSpec>,
    /// The agent inside the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_agent: Option<GuestAgentConfig>,
    /// What happens after a failure. Unset: the template's, else the class's, else no restart.
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
    /// Secret of this namespace with the one-time configuration of a CI runner. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub runner_config_secret: Option<String>,
    /// Delete the VM this long after it first ran, e.g. 45m. 0: never, also against the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) == duration('0s') || duration(self) >= duration('60s')").message("must be 0 or at least 60s"))]
    pub expire_after: Option<DurationString>,
    /// Place a persistent VM anew, with an empty disk, when its node is lost. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reschedule_on_node_loss: Option<bool>,
    /// Whether the VM runs. Only Running is honoured yet.
    #[serde(default)]
    pub desired_state: VMDesiredState,
    /// Only for desiredState ScaleToZero: how long a VM must be idle before it is suspended, at least 10s. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('10s')").message("must be at least 10s"))]
    pub idle_timeout: Option<DurationString>,
    /// Seconds from the workload's stop signal to SIGKILL when the VM is deleted or stopped.
    #[serde(default = "termination_grace_period_seconds")]
    #[schemars(range(min = 0, max = 86400))]
    pub termination_grace_period_seconds: i64,
    /// How the image becomes the root disk. Unset: an overlay, writable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_disk: Option<RootDisk>,
}

/// How the image becomes the root disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RootDisk {
    /// Overlay shares the image's disk between VMs; Flat copies it.
    #[serde(default)]
    pub mode: RootDiskMode,
    /// The workload cannot write to the root file system.
    #[serde(default)]
    pub read_only: bool,
}

/// How the image becomes the root disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum RootDiskMode {
    /// The image's disk is shared read-only; the VM's own disk of diskGiB is laid over it in the guest.
    #[default]
    Overlay,
    /// A full private copy of diskGiB.
    Flat,
}

/// When an image is pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(description = "")] // a description of the type would hide those of optional fields
pub enum ImagePullPolicy {
    /// The tag is resolved again at each start; content that is there already is not pulled again.
    Always,
    /// Only when the node has no image of that name.
    IfNotPresent,
    /// Never; the node must have the image.
    Never,
}

/// What the workload's end means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VMLifecycle {
    /// The VM is done when its workload ends.
    #[default]
    Ephemeral,
    /// The VM is meant to stay; its disk survives restarts.
    Persistent,
}

/// Whether a VM runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum VMDesiredState {
    /// The VM runs.
    #[default]
    Running,
    /// Memory is saved and the VM is stopped. Not honoured yet.
    Suspended,
    /// As Suspended whenever the VM was idle for idleTimeout; traffic wakes it. Not honoured yet.
    ScaleToZero,
}

/// Where user data comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct UserDataSource {
    /// ConfigMap of the same namespace.
    pub config_map_ref: LocalObjectRef,
}

pub(crate) fn termination_grace_period_seconds() -> i64 {
    30
}
