//! The packet filter's rules of a node, as text for nft(8).
//!
//! Two tables, each replaced as a whole in one transaction: `inet imp` routes, translates and guards, `bridge imp` keeps
//! a VM to its own addresses. What guards goes by the prefix of our devices' names, so that a bridge or tap that no rule
//! names yet can't do anything; what allows goes by sets of exact names and addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use ipnet::Ipv4Net;

use crate::names::{self, BRIDGE_PREFIX};
use crate::{Attachment, PortForward};

/// Set-up of the chains that do not depend on the VMs. They run before other tables' filters (priority below `filter`):
/// nothing that another program accepts undoes a drop of ours. Sources of the single rules:
/// - 127.0.0.0/8 from a guest: bridges with published ports route it (`route_localnet`), which must not open the node's
///   loopback (CVE-2020-8558);
/// - 169.254.0.0/16: the clouds' metadata services (RFC 3927 link-local), before and after other programs' translation;
/// - maximum segment size: as nft(8) advises for links that narrow, since path MTU discovery is often filtered.
const GUARDS: &str = r#"
    chain arriving {
        type filter hook prerouting priority raw; policy accept;
        iifname "imp-*" meta nfproto ipv6 drop
        iifname "imp-*" ip daddr { 127.0.0.0/8, 169.254.0.0/16 } drop
        iifname "imp-*" ip saddr 127.0.0.0/8 drop
    }
    chain to_node {
        type filter hook input priority filter - 10; policy accept;
        iifname != "imp-*" accept
        ct state established,related accept
        iifname . ip daddr @gateways icmp type echo-request accept
        drop
    }
    chain through_node {
        type filter hook forward priority filter - 10; policy accept;
        iifname "imp-*" ip daddr 169.254.0.0/16 drop
        iifname . oifname @within accept
        iifname "imp-*" oifname "imp-*" drop
        iifname "imp-*" ct state invalid drop
        iifname "imp-*" tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
        oifname "imp-*" tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
        iifname "imp-*" accept
        oifname "imp-*" accept
    }
"#;

/// A VM sends IPv4 and ARP, from its own addresses, or nothing. Before br_netfilter(8)'s and others' hooks.
const SENDERS: &str = r#"
    chain arriving {
        type filter hook prerouting priority -300; policy accept;
        iifname != "imt-*" accept
        ether type ip iifname . ether saddr . ip saddr @senders accept
        ether type arp iifname . ether saddr . arp saddr ip @senders iifname . arp saddr ether . arp saddr ip @senders accept
        drop
    }
"#;

/// Deletes both tables, whether or not they exist: adding first makes deleting sure to succeed.
const CLEAR: &str = "table inet imp\ndelete table inet imp\ntable bridge imp\ndelete table bridge imp\n";

/// The rules for `attachments`, which have been [checked](crate::check). The same set gives the same text in any order.
pub(crate) fn script(attachments: &[&Attachment]) -> String {
    let mut sorted = attachments.to_vec();
    sorted.sort_by(|a, b| a.vm.cmp(&b.vm));

    let mut gateways = BTreeSet::new();
    let mut within = BTreeSet::new();
    let mut senders = BTreeSet::new();
    let mut masqueraded = BTreeMap::new();
    let mut arriving = String::new();
    let mut leaving = String::new();
    for attachment in sorted {
        let bridge = names::bridge(&attachment.network).name;
        let tap = names::tap(&attachment.vm).name;
        gateways.insert(format!("\"{bridge}\" . {}", attachment.gateway));
        within.insert(format!("\"{bridge}\" . \"{bridge}\""));
        senders.insert(format!("\"{tap}\" . {} . {}", attachment.mac, attachment.address.addr()));
        if attachment.masquerade {
            masqueraded.insert(attachment.network.as_str(), attachment);
        }
        for port in &attachment.ports {
            let rule = forward(port, attachment.address);
            // Nobody reaches a loopback address from outside; without this, a neighbour on the wire could, since the
            // translation comes before the kernel's own check.
            if port.host_ip.is_none_or(|ip| !ip.is_loopback()) {
                arriving.push_str(&rule);
            }
            leaving.push_str(&rule);
        }
    }

    let mut text = String::from(CLEAR);
    if attachments.is_empty() {
        // No VM, no rule: a node from which Imp is gone is as it was.
        return text;
    }
    text.push_str("table inet imp {\n");
    set(&mut text, "gateways", "ifname . ipv4_addr", &gateways);
    set(&mut text, "within", "ifname . ifname", &within);
    text.push_str(GUARDS);
    text.push_str("    chain publish {\n        type nat hook prerouting priority dstnat; policy accept;\n");
    // A guest does not reach the node, hence not by the node's ports either.
    line(&mut text, &format!("iifname \"{BRIDGE_PREFIX}*\" accept"));
    text.push_str(&arriving);
    text.push_str(
        "    }\n    chain publish_here {\n        type nat hook output priority -100; policy accept;\n",
    );
    text.push_str(&leaving);
    text.push_str(
        "    }\n    chain leaving {\n        type nat hook postrouting priority srcnat; policy accept;\n",
    );
    // A program of the node that dialled the loopback: the guest's answer must find its way back.
    line(&mut text, &format!("oifname \"{BRIDGE_PREFIX}*\" ip saddr 127.0.0.0/8 masquerade"));
    for attachment in masqueraded.values() {
        let subnet = attachment.address.trunc();
        let egress = match attachment.egress_interface.as_str() {
            "" => String::new(),
            name => format!("oifname \"{name}\" "),
        };
        line(&mut text, &format!("ip saddr {subnet} ip daddr != {subnet} {egress}masquerade"));
    }
    text.push_str("    }\n}\ntable bridge imp {\n");
    set(&mut text, "senders", "ifname . ether_addr . ipv4_addr", &senders);
    text.push_str(SENDERS);
    text.push_str("}\n");
    text
}

/// One port of the node that leads to a guest. Only for the node's own addresses: a VM does not get to catch the
/// traffic of others by naming their address.
fn forward(port: &PortForward, address: Ipv4Net) -> String {
    let host = port.host_ip.map(|ip| format!("ip daddr {ip} ")).unwrap_or_default();
    let protocol = if port.udp { "udp" } else { "tcp" };
    format!(
        "        meta nfproto ipv4 {host}fib daddr type local {protocol} dport {} dnat ip to {}:{}\n",
        port.host_port,
        address.addr(),
        port.guest_port
    )
}

fn set(text: &mut String, name: &str, kind: &str, elements: &BTreeSet<String>) {
    // Writing to a string can't fail.
    let _ = writeln!(text, "    set {name} {{\n        type {kind};");
    if !elements.is_empty() {
        let list: Vec<&str> = elements.iter().map(String::as_str).collect();
        let _ = writeln!(text, "        elements = {{ {} }};", list.join(", "));
    }
    text.push_str("    }\n");
}

fn line(text: &mut String, rule: &str) {
    let _ = writeln!(text, "        {rule}");
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn attachment(vm: &str, network: &str, last: u8) -> Attachment {
        Attachment {
            vm: vm.to_owned(),
            network: network.to_owned(),
            mac: format!("02:00:00:00:00:{last:02x}"),
            address: Ipv4Net::new(Ipv4Addr::new(10, 0, 0, last), 24).unwrap(),
            gateway: Ipv4Addr::new(10, 0, 0, 1),
            mtu: 0,
            masquerade: true,
            egress_interface: String::new(),
            ports: Vec::new(),
            tap_owner: 0,
        }
    }

    fn rules_of<'a>(text: &'a str, chain: &str) -> Vec<&'a str> {
        let start = text.find(&format!("chain {chain} {{")).unwrap();
        let body = &text[start..];
        let body = &body[..body.find("\n    }").unwrap()];
        body.lines().skip(2).map(str::trim).collect()
    }

    #[test]
    fn order_of_the_attachments_does_not_matter() {
        let (a, b) = (attachment("a", "n", 2), attachment("b", "n", 3));
        assert_eq!(script(&[&a, &b]), script(&[&b, &a]));
    }

    #[test]
    fn guards_go_by_the_prefixes_that_our_devices_have() {
        assert!(GUARDS.contains(&format!("\"{BRIDGE_PREFIX}*\"")));
        assert!(SENDERS.contains(&format!("\"{}*\"", names::TAP_PREFIX)));
    }

    #[test]
    fn both_tables_are_replaced_in_one_transaction() {
        let text = script(&[&attachment("a", "n", 2)]);
        assert!(text.starts_with(CLEAR));
        assert_eq!(text.matches("\ntable inet imp {").count(), 1);
        assert_eq!(text.matches("\ntable bridge imp {").count(), 1);
    }

    #[test]
    fn masquerading_is_once_a_network_never_inside_and_may_be_limited() {
        let (a, b) = (attachment("a", "n", 2), attachment("b", "n", 3));
        let all = script(&[&a, &b]);
        assert_eq!(
            rules_of(&all, "leaving")[1..],
            ["ip saddr 10.0.0.0/24 ip daddr != 10.0.0.0/24 masquerade"]
        );

        let limited = Attachment { egress_interface: "eth0".into(), ..a.clone() };
        let text = script(&[&limited]);
        assert_eq!(
            rules_of(&text, "leaving")[1..],
            ["ip saddr 10.0.0.0/24 ip daddr != 10.0.0.0/24 oifname \"eth0\" masquerade"]
        );

        let routed = Attachment { masquerade: false, ..a };
        assert_eq!(rules_of(&script(&[&routed]), "leaving").len(), 1);
    }

    #[test]
    fn ports_are_published_to_outside_and_to_the_node() {
        let port = |host_ip, udp| PortForward { host_ip, host_port: 8080, guest_port: 80, udp };
        let mut a = attachment("a", "n", 2);
        a.ports = vec![
            port(None, false),
            port(Some(Ipv4Addr::new(192, 0, 2, 1)), true),
            port(Some(Ipv4Addr::LOCALHOST), false),
        ];
        let text = script(&[&a]);
        let any = "meta nfproto ipv4 fib daddr type local tcp dport 8080 dnat ip to 10.0.0.2:80";
        let one =
            "meta nfproto ipv4 ip daddr 192.0.2.1 fib daddr type local udp dport 8080 dnat ip to 10.0.0.2:80";
        let own =
            "meta nfproto ipv4 ip daddr 127.0.0.1 fib daddr type local tcp dport 8080 dnat ip to 10.0.0.2:80";
        assert_eq!(rules_of(&text, "publish"), ["iifname \"imp-*\" accept", any, one]);
        assert_eq!(rules_of(&text, "publish_here"), [any, one, own]);
    }

    #[test]
    fn fr51_without_vms_there_are_no_rules() {
        assert_eq!(script(&[]), CLEAR);
    }

    #[test]
    fn fr27_drops_stand_before_what_accepts() {
        let text = script(&[&attachment("a", "n", 2)]);
        let rules = rules_of(&text, "through_node");
        let at = |needle: &str| rules.iter().position(|rule| rule.contains(needle)).unwrap();
        assert!(at("169.254.0.0/16 drop") < at("accept"));
        assert!(at("\"imp-*\" oifname \"imp-*\" drop") < at("iifname \"imp-*\" accept"));
        assert_eq!(rules_of(&text, "to_node").last(), Some(&"drop"));
    }

    #[test]
    fn a_vm_may_send_from_its_own_addresses_only() {
        let text = script(&[&attachment("a", "n", 2)]);
        let tap = names::tap("a").name;
        assert!(
            text.contains(&format!("elements = {{ \"{tap}\" . 02:00:00:00:00:02 . 10.0.0.2 }}")),
            "{text}"
        );
    }
}
