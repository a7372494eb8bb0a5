//! Bridges, taps, addresses and NAT of a node's VMs.
//!
//! Everything is idempotent: `Network::attach` makes what is missing and leaves what is there, `Network::detach` removes
//! what is left, and both may be cut short at any point and called again. The nftables rules are one table, rebuilt and
//! replaced in one transaction from the set of attachments.

mod check;
mod dns;
mod error;
mod links;
mod names;
mod network;
mod nft;
mod rules;
mod sys;
mod sysctl;
mod tap;

use ipnet::Ipv4Net;
use std::net::Ipv4Addr;

pub use dns::{host_resolvers, resolvers_from};
pub use error::NetError;
pub use network::{Network, NetworkOptions};

/// A VM's place in a network.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Attachment {
    /// UID of the VM.
    pub vm: String,
    /// Key of the layer-2 network on this node: attachments with the same key share a bridge.
    pub network: String,
    /// Colon-separated hexadecimal.
    pub mac: String,
    /// The VM's address and the network's prefix.
    pub address: Ipv4Net,
    /// The bridge's address.
    pub gateway: Ipv4Addr,
    /// Bytes; 0: the uplink's.
    pub mtu: u32,
    /// Masquerade what leaves the network.
    pub masquerade: bool,
    /// Interface that masquerading is limited to; empty: any.
    pub egress_interface: String,
    /// Ports of the host that lead to the VM.
    pub ports: Vec<PortForward>,
    /// Numeric user that may open the tap.
    pub tap_owner: u32,
}

/// A port of the host that leads to a port of a VM.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PortForward {
    /// None: every address of the host.
    pub host_ip: Option<Ipv4Addr>,
    /// Port on the host.
    pub host_port: u16,
    /// Port in the VM.
    pub guest_port: u16,
    /// UDP instead of TCP.
    pub udp: bool,
}

/// What a VM got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Name of the tap.
    pub tap: String,
    /// Name of the bridge.
    pub bridge: String,
    /// Bytes, to be set in the guest.
    pub mtu: u32,
}
