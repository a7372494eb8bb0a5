//! The network of local VMs: one masqueraded subnet, addresses handed out by whoever starts a VM.

use anyhow::Context as _;
use camino::Utf8Path;
use imp_proto::v1 as pb;
use std::{collections::BTreeSet, fs::File, net::Ipv4Addr};

/// Subnet of local VMs. The first address is the bridge's.
const SUBNET: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 0);
const PREFIX: u8 = 16;
/// Addresses below are kept for the bridge and for later.
const FIRST_OFFSET: u32 = 16;

/// Held from the choice of an address until the VM that has it is known to the runtime, so that two commands at once
/// don't choose the same.
#[derive(Debug)]
pub(super) struct Reservation {
    _lock: File,
    address: Ipv4Addr,
}

/// Waits for the lock over addresses and names.
///
/// # Errors
/// When the lock file cannot be made.
pub(super) fn lock(run_dir: &Utf8Path) -> anyhow::Result<File> {
    std::fs::create_dir_all(run_dir).with_context(|| format!("cannot make {run_dir}"))?;
    let path = run_dir.join("addresses.lock");
    let file = File::create(&path).with_context(|| format!("cannot make {path}"))?;
    file.lock().with_context(|| format!("cannot lock {path}"))?;
    Ok(file)
}

/// Chooses the lowest address that no VM of `specs` has.
///
/// # Errors
/// When the subnet is used up.
pub(super) fn reserve(lock: File, specs: &[pb::VmSpec]) -> anyhow::Result<Reservation> {
    let used: BTreeSet<Ipv4Addr> = specs
        .iter()
        .filter_map(|spec| spec.network.as_ref()?.address.split('/').next()?.parse().ok())
        .collect();
    let last = (1u32 << (32 - PREFIX)) - 2;
    let address = (FIRST_OFFSET..=last)
        .map(|offset| Ipv4Addr::from_bits(SUBNET.to_bits() + offset))
        .find(|address| !used.contains(address))
        .context("no address is left in the local network: remove VMs with `imp rm`")?;
    Ok(Reservation { _lock: lock, address })
}

impl Reservation {
    /// The VM's part of the network.
    pub(super) fn network(&self, ports: Vec<pb::PortForward>) -> pb::Network {
        let [_, _, c, d] = self.address.octets();
        pb::Network {
            id: "imp-local".to_owned(),
            // Locally administered, and unique because the address is.
            mac: format!("02:69:6d:70:{c:02x}:{d:02x}"),
            address: format!("{}/{PREFIX}", self.address),
            gateway: Ipv4Addr::from_bits(SUBNET.to_bits() + 1).to_string(),
            // Empty: the runtime gives the host's own resolvers.
            dns: Vec::new(),
            search: Vec::new(),
            mtu: 0,
            masquerade: true,
            egress_interface: String::new(),
            ports,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_address_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(dir.path()).unwrap();
        let with = |address: &str| pb::VmSpec {
            network: Some(pb::Network { address: address.to_owned(), ..Default::default() }),
            ..Default::default()
        };
        let specs = [with("10.213.0.16/16"), with("10.213.0.18/16")];
        let reservation = reserve(lock(path).unwrap(), &specs).unwrap();
        let network = reservation.network(Vec::new());
        assert_eq!(network.address, "10.213.0.17/16");
        assert_eq!(network.mac, "02:69:6d:70:00:11");
    }
}
