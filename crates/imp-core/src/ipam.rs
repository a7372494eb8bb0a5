//! Which address and MAC a VM gets in an ImpNetwork.

use ipnet::Ipv4Net;
use std::{collections::BTreeSet, net::Ipv4Addr};

/// Why there is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The subnet has no room for a gateway and a VM.
    #[error("subnet {0} is too small: a gateway and a VM need a /30 or larger")]
    TooSmall(Ipv4Net),
    /// The gateway cannot be one.
    #[error("gateway {gateway} is no host address of {subnet}")]
    BadGateway {
        /// As given.
        gateway: Ipv4Addr,
        /// The network's.
        subnet: Ipv4Net,
    },
    /// Every address is taken.
    #[error("all {0} addresses of the network are taken: delete VMs, or use another network")]
    Exhausted(u32),
}

/// First and last address that a host may have.
fn hosts(subnet: Ipv4Net) -> Result<(u32, u32), AddressError> {
    if subnet.prefix_len() > 30 {
        return Err(AddressError::TooSmall(subnet));
    }
    Ok((subnet.network().to_bits() + 1, subnet.broadcast().to_bits() - 1))
}

/// The gateway: as wanted, else the first host address.
///
/// # Errors
/// When the subnet is too small or the wanted address is none of its hosts.
pub fn gateway(subnet: Ipv4Net, wanted: Option<Ipv4Addr>) -> Result<Ipv4Addr, AddressError> {
    let (first, last) = hosts(subnet)?;
    let gateway = wanted.unwrap_or_else(|| Ipv4Addr::from_bits(first));
    if !(first..=last).contains(&gateway.to_bits()) {
        return Err(AddressError::BadGateway { gateway, subnet });
    }
    Ok(gateway)
}

/// The lowest address that is neither the gateway's nor reserved.
///
/// # Errors
/// When there is none.
pub fn choose(
    subnet: Ipv4Net,
    gateway: Ipv4Addr,
    reserved: &BTreeSet<Ipv4Addr>,
) -> Result<Ipv4Addr, AddressError> {
    let (first, last) = hosts(subnet)?;
    // At most one more than what is reserved has to be looked at.
    (first..=last)
        .map(Ipv4Addr::from_bits)
        .find(|address| *address != gateway && !reserved.contains(address))
        .ok_or(AddressError::Exhausted(last - first))
}

/// A MAC for a VM: locally administered, unicast, from its UID, and none of `reserved` (written as this writes them: lower
/// case, with colons). The same for the same arguments, for ever.
#[must_use]
pub fn mac(uid: &str, reserved: &BTreeSet<String>) -> String {
    let mut hash = uid.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        // FNV-1a: spreads well, and the same for ever (a standard library's hash may change).
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    loop {
        let [_, _, _, b, c, d, e, f] = hash.to_be_bytes();
        let mac = format!("02:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
        if !reserved.contains(&mac) {
            return mac;
        }
        hash = hash.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn network_broadcast_and_gateway_are_no_vms() {
        let subnet: Ipv4Net = "192.168.1.0/30".parse().unwrap();
        let gw = gateway(subnet, None).unwrap();
        assert_eq!(gw, Ipv4Addr::new(192, 168, 1, 1));
        let vm = choose(subnet, gw, &BTreeSet::new()).unwrap();
        assert_eq!(vm, Ipv4Addr::new(192, 168, 1, 2));
        let error = choose(subnet, gw, &BTreeSet::from([vm])).unwrap_err();
        assert_eq!(error, AddressError::Exhausted(1));
        assert!(gateway(subnet, Some(Ipv4Addr::new(192, 168, 1, 3))).is_err());
        assert!(gateway("10.0.0.0/31".parse().unwrap(), None).is_err());
    }

    #[test]
    fn fr30_macs_differ_and_are_local() {
        let mut macs = BTreeSet::new();
        for n in 0..1000 {
            let mac = mac(&format!("uid-{n}"), &macs);
            assert!(mac.starts_with("02:") && mac.len() == 17);
            assert!(macs.insert(mac));
        }
        let first = mac("a", &BTreeSet::new());
        assert_ne!(mac("a", &BTreeSet::from([first.clone()])), first);
    }

    #[test]
    fn a_gateway_is_a_host_of_the_subnet() {
        let subnet: Ipv4Net = "10.1.2.128/25".parse().unwrap();
        for (wanted, good) in [
            ("10.1.2.129", true),
            ("10.1.2.254", true),
            ("10.1.2.128", false),
            ("10.1.2.255", false),
            ("10.1.2.127", false),
            ("0.0.0.0", false),
        ] {
            let wanted = wanted.parse().unwrap();
            let expected =
                if good { Ok(wanted) } else { Err(AddressError::BadGateway { gateway: wanted, subnet }) };
            assert_eq!(gateway(subnet, Some(wanted)), expected);
        }
        let widest: Ipv4Net = "0.0.0.0/0".parse().unwrap();
        let first = gateway(widest, None).unwrap();
        assert_eq!(choose(widest, first, &BTreeSet::new()), Ok(Ipv4Addr::new(0, 0, 0, 2)));
    }

    #[test]
    fn the_gateway_may_stand_anywhere() {
        let subnet: Ipv4Net = "10.0.0.0/29".parse().unwrap();
        let last = Ipv4Addr::new(10, 0, 0, 6);
        let mut taken = BTreeSet::new();
        while let Ok(address) = choose(subnet, last, &taken) {
            assert!(taken.insert(address));
        }
        let expected: BTreeSet<_> = (1..=5).map(|n| Ipv4Addr::new(10, 0, 0, n)).collect();
        assert_eq!(taken, expected);
    }

    proptest! {
        /// Of any subnet with any reservations, the lowest host that is free; an error when, and only when, none is.
        #[test]
        fn the_lowest_free_host(prefix in 20u8..=30, base: u32, gw: prop::sample::Index, taken in prop::collection::vec(0u32..16, 0..20)) {
            let subnet = Ipv4Net::new(Ipv4Addr::from_bits(base), prefix).unwrap().trunc();
            let hosts: Vec<Ipv4Addr> = subnet.hosts().collect();
            let gw = gateway(subnet, Some(hosts[gw.index(hosts.len())])).unwrap();
            let reserved: BTreeSet<Ipv4Addr> =
                taken.iter().map(|n| Ipv4Addr::from_bits(subnet.network().to_bits() + n)).collect();
            let expected = hosts.iter().copied().find(|host| *host != gw && !reserved.contains(host));
            prop_assert_eq!(choose(subnet, gw, &reserved).ok(), expected);
        }

        #[test]
        fn a_mac_is_local_unicast_and_stays(uid in "\\PC{0,40}") {
            let first = mac(&uid, &BTreeSet::new());
            let octets: Vec<u8> = first.split(':').map(|octet| u8::from_str_radix(octet, 16).unwrap()).collect();
            prop_assert_eq!(octets.len(), 6);
            prop_assert_eq!(octets[0] & 0b11, 0b10);
            prop_assert_eq!(mac(&uid, &BTreeSet::new()), first);
        }

        /// A /29 has five VMs; any number of them come and go and none is ever refused or given another's address.
        #[test]
        fn fr23_a_small_pool_never_runs_out(steps in prop::collection::vec(0usize..5, 1..200)) {
            let subnet: Ipv4Net = "10.9.8.0/29".parse().unwrap();
            let gw = gateway(subnet, None).unwrap();
            let mut live: Vec<Ipv4Addr> = Vec::new();
            for which in steps {
                if live.len() == 5 {
                    live.remove(which);
                }
                let reserved: BTreeSet<_> = live.iter().copied().collect();
                let address = choose(subnet, gw, &reserved).unwrap();
                prop_assert!(subnet.contains(&address) && address != gw && !reserved.contains(&address));
                live.push(address);
            }
        }
    }
}
