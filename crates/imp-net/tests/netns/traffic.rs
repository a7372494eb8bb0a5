//! What gets through and what does not. Each denial has its positive control: the same packet without the rule.

use std::net::Ipv4Addr;

use imp_net::{Attachment, PortForward};

use crate::attachment;
use crate::world::{METADATA, NODE, OUTSIDE, Server, World, assert_dropped, pings, seen_as};

#[test]
fn guests_reach_out_under_the_nodes_address_and_each_other_under_their_own() {
    let world = World::new();
    let (a, b) = (attachment(1, 2), attachment(1, 3));
    let all = [a.clone(), b.clone()];
    let (first, second) = (world.guest(&a, &all[..1]), world.guest(&b, &all));
    let _outside = Server::start(&world.outside, OUTSIDE, 80);
    let _second = Server::start(&second, b.address.addr(), 80);

    assert_eq!(seen_as(&first, OUTSIDE, 80).unwrap(), NODE);
    assert_eq!(seen_as(&first, b.address.addr(), 80).unwrap(), a.address.addr());
    assert_eq!(seen_as(&world.node, b.address.addr(), 80).unwrap(), a.gateway);

    // Without masquerading the outside gets a packet that it has no way to answer.
    world.weaken(|line| line.starts_with("ip saddr 10.1.0.0/24 ip daddr !="));
    assert_dropped(&first, OUTSIDE, 80);
}

#[test]
fn masquerading_is_limited_to_the_named_interface() {
    let world = World::new();
    let a = Attachment { egress_interface: "up0".into(), ..attachment(1, 2) };
    let guest = world.guest(&a, std::slice::from_ref(&a));
    let _server = Server::start(&world.outside, OUTSIDE, 80);
    assert_eq!(seen_as(&guest, OUTSIDE, 80).unwrap(), NODE);
    world.detach(&a, &[]).unwrap();

    let elsewhere = Attachment { egress_interface: "other0".into(), ..a };
    let guest = world.guest(&elsewhere, std::slice::from_ref(&elsewhere));
    assert_dropped(&guest, OUTSIDE, 80);
}

#[test]
fn published_ports_lead_to_the_guest_from_outside_and_from_the_node() {
    let world = World::new();
    let port = |host_ip, host_port| PortForward { host_ip, host_port, guest_port: 80, udp: false };
    let a = Attachment {
        ports: vec![port(None, 8080), port(Some(NODE), 8081), port(Some(Ipv4Addr::LOCALHOST), 8082)],
        ..attachment(1, 2)
    };
    let guest = world.guest(&a, std::slice::from_ref(&a));
    let _server = Server::start(&guest, a.address.addr(), 80);

    assert_eq!(seen_as(&world.outside, NODE, 8080).unwrap(), OUTSIDE);
    assert_eq!(seen_as(&world.outside, NODE, 8081).unwrap(), OUTSIDE);
    seen_as(&world.outside, NODE, 8082).unwrap_err();
    for (address, port) in
        [(Ipv4Addr::LOCALHOST, 8080), (NODE, 8080), (NODE, 8081), (Ipv4Addr::LOCALHOST, 8082)]
    {
        seen_as(&world.node, address, port).unwrap_or_else(|error| panic!("{address}:{port}: {error}"));
    }
    seen_as(&world.node, Ipv4Addr::LOCALHOST, 8081).unwrap_err();

    world.detach(&a, &[]).unwrap();
    seen_as(&world.outside, NODE, 8080).unwrap_err();
}

#[test]
fn fr27_fr28_guests_do_not_reach_the_metadata_service() {
    let world = World::new();
    let a = attachment(1, 2);
    let guest = world.guest(&a, std::slice::from_ref(&a));
    let _metadata = Server::start(&world.outside, METADATA, 80);
    assert_dropped(&guest, METADATA, 80);

    world.weaken(|line| line.contains("169.254.0.0/16"));
    assert_eq!(seen_as(&guest, METADATA, 80).unwrap(), NODE);
}

#[test]
fn fr27_fr28_guests_do_not_reach_the_nodes_services() {
    let world = World::new();
    let port = PortForward { host_ip: None, host_port: 8080, guest_port: 80, udp: false };
    // The published port lets the bridge route the loopback, which must not open it.
    let a = Attachment { ports: vec![port], ..attachment(1, 2) };
    let guest = world.guest(&a, std::slice::from_ref(&a));
    let _kubelet = Server::start(&world.node, Ipv4Addr::UNSPECIFIED, 10250);
    guest
        .0
        .ip(&["route add 127.0.0.9/32 via 10.1.0.1 dev eth0", "route del local 127.0.0.0/8 table local"])
        .unwrap();
    guest.0.sysctl("net.ipv4.conf.eth0.route_localnet", "1").unwrap();
    let loopback = Ipv4Addr::new(127, 0, 0, 9);

    for address in [NODE, a.gateway, loopback] {
        assert_dropped(&guest, address, 10250);
    }
    assert!(pings(&guest, a.gateway));
    assert!(!pings(&guest, NODE));
    assert_eq!(seen_as(&world.outside, NODE, 10250).unwrap(), OUTSIDE);

    world.weaken(|line| line == "drop" || line.contains("127.0.0.0/8"));
    for address in [NODE, a.gateway, loopback] {
        assert_eq!(seen_as(&guest, address, 10250).unwrap(), a.address.addr(), "{address}");
    }
}

#[test]
fn fr27_fr28_guests_do_not_reach_other_networks() {
    let world = World::new();
    let (a, b) = (attachment(1, 2), attachment(2, 2));
    let all = [a.clone(), b.clone()];
    let (first, second) = (world.guest(&a, &all[..1]), world.guest(&b, &all));
    let _server = Server::start(&second, b.address.addr(), 80);
    assert_dropped(&first, b.address.addr(), 80);
    // By the other network's gateway, which is the node's own address.
    assert!(!pings(&first, b.gateway));

    world.weaken(|line| line == r#"iifname "imp-*" oifname "imp-*" drop"#);
    seen_as(&first, b.address.addr(), 80).unwrap();
}

#[test]
fn fr28_guests_send_from_their_own_addresses_only() {
    let world = World::new();
    let a = attachment(1, 2);
    let guest = world.guest(&a, std::slice::from_ref(&a));
    let bridge = bridge_of(&world);
    let listing = world.tool("ip", &["-o", "link", "show", &bridge]);
    let gateway_mac = listing.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap().to_owned();

    // Pings the gateway from these addresses; with `known`, no ARP is needed on either side.
    let ping_as = |address: &str, mac: &str, known: bool| {
        world.node.0.ip(&[&format!("neigh flush dev {bridge} nud all")]).unwrap();
        guest
            .0
            .ip(&[
                "addr flush dev eth0",
                &format!("link set eth0 address {mac}"),
                "neigh flush dev eth0 nud all",
                &format!("addr add {address}/24 dev eth0"),
            ])
            .unwrap();
        if known {
            world.node.0.ip(&[&format!("neigh replace {address} lladdr {mac} dev {bridge}")]).unwrap();
            guest.0.ip(&[&format!("neigh replace {} lladdr {gateway_mac} dev eth0", a.gateway)]).unwrap();
        }
        pings(&guest, a.gateway)
    };
    let (own, foreign, own_mac, foreign_mac) = ("10.1.0.2", "10.1.0.77", a.mac.as_str(), "02:00:00:00:00:99");
    for known in [false, true] {
        assert!(ping_as(own, own_mac, known));
        assert!(!ping_as(foreign, own_mac, known), "another's address, ARP known: {known}");
        assert!(!ping_as(own, foreign_mac, known), "another's hardware address, ARP known: {known}");
    }

    world.weaken(|line| line == "drop");
    for known in [false, true] {
        assert!(ping_as(foreign, own_mac, known), "without the rule, ARP known: {known}");
        assert!(ping_as(own, foreign_mac, known), "without the rule, ARP known: {known}");
    }
}

fn bridge_of(world: &World) -> String {
    world.devices().into_iter().find(|name| name.starts_with("imp-")).unwrap()
}
