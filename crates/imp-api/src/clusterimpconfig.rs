//! ClusterImpConfig: settings of the whole cluster.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{HttpCheckSpec, patterns};

/// Settings of the whole cluster. There is one object, named `cluster`.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ClusterImpConfig",
    plural = "clusterimpconfigs",
    singular = "clusterimpconfig",
    shortname = "impcfg",
    category = "imp",
    derive = "PartialEq",
    doc = "Settings of the whole cluster. There is one, named cluster.",
    validation = Rule::new("self.metadata.name == 'cluster'").message("there is one ClusterImpConfig, and its name is cluster"),
    printcolumn(name = "CNI", type_ = "string", json_path = ".spec.networking.cni.provider"),
    printcolumn(name = "DefaultFraction", type_ = "string", json_path = ".spec.capacity.defaultFraction"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterImpConfigSpec {
    /// Networks of VMs and of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub networking: Option<NetworkingConfig>,
    /// How much of a node VMs may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<CapacityConfig>,
    /// Metrics and traces. Not honoured yet: flags and the chart decide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observability: Option<ObservabilityConfig>,
    /// HTTP check of VMs that have none themselves. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_http_check: Option<HttpCheckSpec>,
    /// Sandboxes. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxConfig>,
}

/// Networks of VMs and of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkingConfig {
    /// The cluster's network plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cni: Option<CniConfig>,
    /// Where addresses of VMs come from by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ipam: Option<ClusterIpamConfig>,
    /// Local networks that VMs may be attached to. Not honoured yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub lan_attachments: Vec<LanAttachment>,
}

/// The cluster's network plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CniConfig {
    /// Find out which plugin there is. Not honoured yet.
    #[serde(default = "yes")]
    pub auto_detect: bool,
    /// cilium-kubeproxy-free, cilium, flannel, calico or unknown. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub provider: Option<String>,
    /// How address translation is done. Imp uses nftables; iptables is not honoured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat_backend: Option<NatBackend>,
}

/// How address translation is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(description = "")] // a description of the type would hide those of optional fields
pub enum NatBackend {
    /// nftables.
    Nftables,
    /// iptables.
    Iptables,
}

/// Where addresses of VMs come from by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterIpamConfig {
    /// Only internal.
    #[serde(default)]
    pub provider: ClusterIpamProvider,
}

/// Who hands out addresses by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ClusterIpamProvider {
    /// Imp.
    #[default]
    Internal,
}

/// A local network that VMs may be attached to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LanAttachment {
    /// Name of the attachment.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// VLAN; 0: untagged.
    #[serde(rename = "vlanID", default)]
    #[schemars(range(min = 0, max = 4094))]
    pub vlan_id: i32,
    /// IPv4 network in CIDR notation.
    #[serde(rename = "subnetCIDR", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 18), regex(pattern = patterns::IPV4_CIDR))]
    pub subnet_cidr: Option<String>,
    /// VMs may ask for an address by DHCP.
    #[serde(rename = "allowDHCP", skip_serializing_if = "Option::is_none")]
    pub allow_dhcp: Option<bool>,
    /// Who may attach VMs: user:NAME or group:NAME.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub allowed_subjects: Vec<String>,
}

/// How much of a node VMs may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CapacityConfig {
    /// Fraction of a node's allocatable CPU and memory that VMs may use, from 0 to 1.
    #[serde(default = "default_fraction")]
    #[schemars(length(max = 16), regex(pattern = patterns::FRACTION))]
    pub default_fraction: String,
}

/// Metrics and traces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObservabilityConfig {
    /// Metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<MetricsConfig>,
    /// Traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracing: Option<TracingConfig>,
}

/// Metrics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricsConfig {
    /// Serve metrics.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// TCP port of metrics.
    #[serde(default = "metrics_port")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
}

/// Traces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TracingConfig {
    /// Send traces.
    #[serde(default)]
    pub enabled: bool,
    /// OTLP endpoint, host:port.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub endpoint: Option<String>,
}

/// Sandboxes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxConfig {
    /// Least isolation that sandboxes may ask for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor_tenancy: Option<Tenancy>,
}

/// Isolation of sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(description = "")] // a description of the type would hide those of optional fields
pub enum Tenancy {
    /// The usual.
    Standard,
    /// Stricter network isolation.
    Hard,
}

fn yes() -> bool {
    true
}

fn default_fraction() -> String {
    "0.9".into()
}

fn metrics_port() -> i32 {
    9090
}
