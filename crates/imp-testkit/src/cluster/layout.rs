//! Names, addresses and paths of a cluster: everything that `down` must find again follows from its name and directory.

use std::net::{Ipv4Addr, SocketAddr};

use camino::{Utf8Path, Utf8PathBuf};

use crate::netns::NetNs;

/// Address of the control plane, in the network of the nodes. All addresses are of 198.18.0.0/15, which is set aside for tests of
/// networks (RFC 2544) and never routed. An API server can't advertise a loopback address.
pub const HUB_IP: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Addresses of Services.
pub const SERVICE_CIDR: &str = "198.19.0.0/24";
/// Address of Service `default/kubernetes`.
pub const KUBERNETES_SERVICE_IP: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 1);
/// Addresses of pods, one /24 for each node.
pub const POD_CIDR: &str = "198.18.64.0/18";
/// The API server's port in the hub.
pub const API_PORT: u16 = 6443;
/// The dev registry's port in the hub.
pub const REGISTRY_PORT: u16 = 5000;
/// The dev registry's name in the hub and on the nodes.
pub const REGISTRY_HOST: &str = "registry.imp-dev.local";
/// The greatest number of nodes: one octet of [`POD_CIDR`] each.
pub const MAX_NODES: u8 = 32;

/// Where a cluster is.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Its name: prefix of network namespaces, parent of cgroups.
    pub name: String,
    /// Its data, on a real file system (overlay snapshots can't stand on an overlay).
    pub dir: Utf8PathBuf,
}

impl Layout {
    /// The network namespace of the control plane.
    #[must_use]
    pub fn hub(&self) -> NetNs {
        NetNs::named(format!("{}-hub", self.name))
    }

    /// The network namespace of node `index`, from 1.
    #[must_use]
    pub fn node_netns(&self, index: u8) -> NetNs {
        NetNs::named(format!("{}-{}", self.name, node_name(index)))
    }

    /// The cgroup of a node, relative to each hierarchy.
    #[must_use]
    pub fn node_cgroup(&self, index: u8) -> Utf8PathBuf {
        Utf8Path::new(&self.name).join(node_name(index))
    }

    /// Keys and certificates.
    #[must_use]
    pub fn pki(&self) -> Utf8PathBuf {
        self.dir.join("pki")
    }

    /// Output of the programs.
    #[must_use]
    pub fn logs(&self) -> Utf8PathBuf {
        self.dir.join("log")
    }

    /// Data of a node.
    #[must_use]
    pub fn node_dir(&self, index: u8) -> Utf8PathBuf {
        self.dir.join("nodes").join(node_name(index))
    }

    /// The API server inside the cluster's network.
    #[must_use]
    pub fn api_server(&self) -> SocketAddr {
        (HUB_IP, API_PORT).into()
    }
}

/// Name of node `index`, from 1.
#[must_use]
pub fn node_name(index: u8) -> String {
    format!("n{index}")
}

/// Address of node `index`, from 1.
#[must_use]
pub fn node_ip(index: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, 10 + index)
}

/// The /24 of the pods of node `index`, from 1.
#[must_use]
pub fn pod_subnet(index: u8) -> String {
    format!("198.18.{}.0/24", 63 + index)
}
