//! The node's networks in network namespaces that these tests make and remove. They need root.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not see as tests")]

mod devices;
mod traffic;
mod world;

use imp_net::Attachment;

/// VM number `last` of the network 10.`network`.0.0/24.
fn attachment(network: u8, last: u8) -> Attachment {
    Attachment {
        vm: format!("5f0c9c1e-0000-4000-8000-{network:04}0000{last:04}"),
        network: format!("default/net{network}"),
        mac: format!("02:00:00:00:{network:02x}:{last:02x}"),
        address: format!("10.{network}.0.{last}/24").parse().unwrap(),
        gateway: format!("10.{network}.0.1").parse().unwrap(),
        mtu: 0,
        masquerade: true,
        egress_interface: String::new(),
        ports: Vec::new(),
        tap_owner: 0,
    }
}
