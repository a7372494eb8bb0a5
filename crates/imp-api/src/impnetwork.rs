//! ImpNetwork: a network that VMs share.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::patterns;

/// An IPv4 network for VMs.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpNetwork",
    plural = "impnetworks",
    singular = "impnetwork",
    shortname = "impnet",
    category = "imp",
    category = "all",
    namespaced,
    status = "ImpNetworkStatus",
    derive = "PartialEq",
    doc = "An IPv4 network that VMs of one namespace share.",
    printcolumn(name = "Subnet", type_ = "string", json_path = ".spec.subnet"),
    printcolumn(name = "NAT", type_ = "boolean", json_path = ".spec.nat.enabled"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Gateway", type_ = "string", json_path = ".spec.gateway", priority = 1),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.gateway) || self.gateway == '' || cidr(self.subnet).containsIP(ip(self.gateway))").message("gateway must be an address of subnet").field_path(".gateway"))]
pub struct ImpNetworkSpec {
    /// IPv4 network in CIDR notation, /8 to /30, e.g. 192.168.100.0/24.
    #[schemars(length(max = 18), regex(pattern = patterns::IPV4_CIDR))]
    #[x_kube(validation = Rule::new("cidr(self).prefixLength() >= 8 && cidr(self).prefixLength() <= 30").message("prefix length must be from 8 to 30"))]
    pub subnet: String,
    /// Address of the gateway, which the node itself answers. Unset: the first of the subnet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 15), regex(pattern = patterns::IPV4))]
    pub gateway: Option<String>,
    /// Address translation for what leaves the network. Unset: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nat: Option<NatSpec>,
    /// Name servers of the VMs. Empty: those of the node (never a loopback address).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 15), regex(pattern = patterns::IPV4)))]
    pub dns: Vec<String>,
    /// Integration with Cilium. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cilium: Option<CiliumSpec>,
    /// Where addresses come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ipam: Option<NetworkIpamSpec>,
    /// Parts of the network that are kept apart. Not honoured yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub groups: Vec<NetworkGroup>,
    /// What VMs of the network may not reach. Not honoured yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firewall: Option<FirewallSpec>,
}

/// Address translation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NatSpec {
    /// Masquerade what leaves the network.
    pub enabled: bool,
    /// Interface of the node by which traffic leaves. Unset: whichever the node's routes say.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 15), regex(pattern = patterns::INTERFACE))]
    pub egress_interface: Option<String>,
}

/// Integration with Cilium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CiliumSpec {
    /// Keep the subnet out of Cilium's own address pools.
    #[serde(rename = "excludeFromIPAM", skip_serializing_if = "Option::is_none")]
    pub exclude_from_ipam: Option<bool>,
    /// Let Cilium masquerade.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub masquerade_via_cilium: Option<bool>,
}

/// Where addresses come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkIpamSpec {
    /// internal: addresses are handed out by Imp. cilium is not honoured yet.
    #[serde(default)]
    pub provider: IpamProvider,
    /// Settings of provider cilium.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cilium: Option<CiliumIpamSpec>,
}

/// Who hands out addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IpamProvider {
    /// Imp.
    #[default]
    Internal,
    /// A pool of Cilium. Not honoured yet.
    Cilium,
}

/// Addresses from a pool of Cilium.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CiliumIpamSpec {
    /// Name of the CiliumPodIPPool.
    #[schemars(length(max = 253))]
    pub pool_ref: String,
    /// IPv4 network of the pool. Unset: spec.subnet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 18), regex(pattern = patterns::IPV4_CIDR))]
    pub cidr: Option<String>,
}

/// A part of a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkGroup {
    /// Name of the group.
    #[schemars(length(max = 253))]
    pub name: String,
    /// subnet: VMs of the group are neighbours. policy-only: they are reached by routing.
    #[serde(default)]
    pub connectivity: GroupConnectivity,
    /// How many VMs the group will have.
    #[serde(default = "expected_size")]
    #[schemars(range(min = 1))]
    pub expected_size: i32,
}

/// How VMs of a group reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupConnectivity {
    /// On one layer-2 segment.
    #[default]
    Subnet,
    /// By policy alone.
    PolicyOnly,
}

/// What VMs may not reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct FirewallSpec {
    /// IPv4 networks that VMs may not reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(max = 18), regex(pattern = patterns::IPV4_CIDR)))]
    pub deny_cidrs: Vec<String>,
}

/// What is true of the network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImpNetworkStatus {
    /// metadata.generation that the status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Addresses in use. Reservations stand on the VMs themselves (status.ip); kept for compatibility.
    #[serde(rename = "allocatedIPs", default, skip_serializing_if = "Vec::is_empty")]
    pub allocated_ips: Vec<String>,
    /// Which node carries which VM of the network.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["vmIP"]))]
    pub vtep_table: Vec<VtepEntry>,
    /// Networks of the groups.
    #[serde(rename = "groupCIDRs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub group_cidrs: Vec<GroupCidr>,
    /// Conditions: Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Which node carries a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
pub struct VtepEntry {
    /// Address of the node.
    #[serde(rename = "nodeIP")]
    pub node_ip: String,
    /// Address of the VM.
    #[serde(rename = "vmIP")]
    pub vm_ip: String,
    /// MAC address of the VM.
    #[serde(rename = "vmMAC")]
    pub vm_mac: String,
}

/// Network of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupCidr {
    /// Name of the group.
    pub name: String,
    /// IPv4 network in CIDR notation.
    pub cidr: String,
}

fn expected_size() -> i32 {
    14
}
