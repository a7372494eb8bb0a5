//! Which attachments can be made, alone and beside each other.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::{Attachment, NetError, PortForward};

/// Bytes of an ID: with our words in front it has to fit an alias (IFALIASZ, 256).
const LONGEST_ID: usize = 200;
/// Bytes of an interface's name (IFNAMSIZ less the final NUL).
const LONGEST_NAME: usize = 15;
/// What every IPv4 host must take (RFC 791), and the most that a tap can carry (65535 less its header).
const MTUS: std::ops::RangeInclusive<u32> = 576..=65521;

/// Whether `attachment` makes sense by itself, and can go into a rule's text as it stands.
pub(crate) fn alone(attachment: &Attachment) -> Result<(), NetError> {
    let invalid = |field, why: String| Err(NetError::Invalid { vm: attachment.vm.clone(), field, why });
    for (field, id) in [("vm", &attachment.vm), ("network", &attachment.network)] {
        if id.is_empty() || id.len() > LONGEST_ID || !id.bytes().all(|b| b.is_ascii_graphic()) {
            return invalid(field, format!("{id:?} is not 1 to {LONGEST_ID} printable ASCII characters"));
        }
    }
    if !is_unicast_mac(&attachment.mac) {
        return invalid("mac", format!("{:?} is not a unicast hardware address", attachment.mac));
    }
    let subnet = attachment.address.trunc();
    let is_host = |ip: Ipv4Addr| subnet.contains(&ip) && ip != subnet.network() && ip != subnet.broadcast();
    if subnet.prefix_len() > 30 || !is_host(attachment.address.addr()) {
        return invalid("address", format!("{} is not a host's address in its network", attachment.address));
    }
    if !is_host(attachment.gateway) || attachment.gateway == attachment.address.addr() {
        return invalid(
            "gateway",
            format!("{} is not another host's address in {subnet}", attachment.gateway),
        );
    }
    if attachment.mtu != 0 && !MTUS.contains(&attachment.mtu) {
        return invalid("mtu", format!("{} is not 0 or {} to {}", attachment.mtu, MTUS.start(), MTUS.end()));
    }
    let egress = &attachment.egress_interface;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-@:".contains(&b);
    if egress.len() > LONGEST_NAME || !egress.bytes().all(plain) {
        return invalid("egress_interface", format!("{egress:?} is not an interface's name"));
    }
    if attachment.ports.iter().any(|port| port.host_port == 0 || port.guest_port == 0) {
        return invalid("ports", "name port 0; ports are 1 to 65535".to_owned());
    }
    Ok(())
}

/// Whether `attachment` can live beside `other`.
pub(crate) fn beside(attachment: &Attachment, other: &Attachment) -> Result<(), NetError> {
    let conflict =
        |what: String| Err(NetError::Conflict { vm: attachment.vm.clone(), other: other.vm.clone(), what });
    for port in &attachment.ports {
        if other.ports.iter().any(|theirs| overlap(port, theirs)) {
            let protocol = if port.udp { "UDP" } else { "TCP" };
            return conflict(format!("{protocol} port {} of the node", port.host_port));
        }
    }
    let (subnet, theirs) = (attachment.address.trunc(), other.address.trunc());
    if attachment.network != other.network {
        // Two bridges with one route between them: the kernel would send one network's answers to the other.
        if subnet.contains(&theirs) || theirs.contains(&subnet) {
            return conflict(format!("subnet {theirs} (of network {})", other.network));
        }
        return Ok(());
    }
    if attachment.address.addr() == other.address.addr() {
        return conflict(format!("address {}", other.address.addr()));
    }
    if attachment.mac.eq_ignore_ascii_case(&other.mac) {
        return conflict(format!("hardware address {}", other.mac));
    }
    let same =
        (subnet, attachment.gateway, attachment.mtu, attachment.masquerade, &attachment.egress_interface)
            == (theirs, other.gateway, other.mtu, other.masquerade, &other.egress_interface);
    if !same {
        return conflict(format!(
            "network {} with another subnet, gateway, MTU or masquerading",
            attachment.network
        ));
    }
    Ok(())
}

/// The attachments that rules can be made of. A later one that clashes with an earlier one is left out, with a warning:
/// one VM's mistake must not take the rules away from all others.
pub(crate) fn sound(all: &[Attachment]) -> Vec<&Attachment> {
    let mut kept: BTreeMap<&str, &Attachment> = BTreeMap::new();
    for attachment in all {
        let fits = alone(attachment).and_then(|()| {
            kept.values()
                .filter(|other| other.vm != attachment.vm)
                .try_for_each(|other| beside(attachment, other))
        });
        match fits {
            // A VM that is named twice counts as it is named last.
            Ok(()) => drop(kept.insert(&attachment.vm, attachment)),
            Err(error) => {
                tracing::warn!(vm = attachment.vm, %error, "attachment left out of the node's rules");
            }
        }
    }
    kept.into_values().collect()
}

fn overlap(a: &PortForward, b: &PortForward) -> bool {
    let both = a.host_ip.zip(b.host_ip);
    a.host_port == b.host_port && a.udp == b.udp && both.is_none_or(|(a, b)| a == b)
}

fn is_unicast_mac(text: &str) -> bool {
    let octets: Vec<Option<u8>> = text
        .split(':')
        .map(|octet| {
            u8::from_str_radix(octet, 16).ok().filter(|_| octet.len() == 2 && !octet.starts_with('+'))
        })
        .collect();
    octets.len() == 6
        && octets.iter().all(Option::is_some)
        && octets[0].is_some_and(|first| first & 1 == 0)
        && octets.iter().any(|octet| *octet != Some(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(vm: &str, address: &str) -> Attachment {
        Attachment {
            vm: vm.to_owned(),
            network: "n".to_owned(),
            mac: format!("02:00:00:00:00:0{}", vm.len()),
            address: address.parse().unwrap(),
            gateway: "10.0.0.1".parse().unwrap(),
            mtu: 0,
            masquerade: true,
            egress_interface: String::new(),
            ports: Vec::new(),
            tap_owner: 0,
        }
    }

    fn field(attachment: &Attachment) -> Option<&'static str> {
        match alone(attachment) {
            Err(NetError::Invalid { field, .. }) => Some(field),
            Ok(()) => None,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn every_field_that_reaches_a_rule_is_checked() {
        let good = attachment("a", "10.0.0.2/24");
        assert_eq!(field(&good), None);
        let cases: [(&'static str, Attachment); 12] = [
            ("vm", Attachment { vm: "a\nb".into(), ..good.clone() }),
            ("network", Attachment { network: "n".repeat(201), ..good.clone() }),
            ("mac", Attachment { mac: "01:00:00:00:00:01".into(), ..good.clone() }),
            ("mac", Attachment { mac: "02:00:00:00:00:+1".into(), ..good.clone() }),
            ("mac", Attachment { mac: "02:00:00:00:01".into(), ..good.clone() }),
            ("address", Attachment { address: "10.0.0.255/24".parse().unwrap(), ..good.clone() }),
            ("address", Attachment { address: "10.0.0.2/31".parse().unwrap(), ..good.clone() }),
            ("gateway", Attachment { gateway: "10.0.1.1".parse().unwrap(), ..good.clone() }),
            ("gateway", Attachment { gateway: "10.0.0.2".parse().unwrap(), ..good.clone() }),
            ("mtu", Attachment { mtu: 100, ..good.clone() }),
            ("egress_interface", Attachment { egress_interface: "e\" accept".into(), ..good.clone() }),
            (
                "ports",
                Attachment {
                    ports: vec![PortForward { host_ip: None, host_port: 0, guest_port: 1, udp: false }],
                    ..good.clone()
                },
            ),
        ];
        for (expected, case) in cases {
            assert_eq!(field(&case), Some(expected), "{case:?}");
        }
    }

    #[test]
    fn what_two_vms_can_not_share() {
        let port = |host_ip: Option<&str>, udp| PortForward {
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
            host_port: 80,
            guest_port: 80,
            udp,
        };
        let a = Attachment { ports: vec![port(None, false)], ..attachment("a", "10.0.0.2/24") };
        let b = attachment("bb", "10.0.0.3/24");
        beside(&b, &a).unwrap();
        beside(&Attachment { ports: vec![port(None, true)], ..b.clone() }, &a).unwrap();
        for case in [
            Attachment { ports: vec![port(Some("192.0.2.1"), false)], ..b.clone() },
            Attachment { address: a.address, ..b.clone() },
            Attachment { mac: a.mac.clone(), ..b.clone() },
            Attachment { masquerade: false, ..b.clone() },
            Attachment { network: "other".into(), address: "10.0.0.9/28".parse().unwrap(), ..b.clone() },
        ] {
            let error = beside(&case, &a).unwrap_err();
            assert!(
                matches!(&error, NetError::Conflict { vm, other, .. } if vm == "bb" && other == "a"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_unsound_attachment_is_left_out_and_the_others_stay() {
        let a = attachment("a", "10.0.0.2/24");
        let bad = Attachment { mac: "nonsense".into(), ..attachment("bb", "10.0.0.3/24") };
        let late = Attachment { address: a.address, ..attachment("ccc", "10.0.0.4/24") };
        let all = [a, bad, late];
        assert_eq!(sound(&all), [&all[0]]);
    }
}
