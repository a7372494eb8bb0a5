//! Links, address, route.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use futures::TryStreamExt as _;
use imp_proto::v1::GuestNetwork;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, RouteMessageBuilder};

/// An address with the length of its network's prefix.
fn parse_cidr(text: &str) -> Result<(IpAddr, u8)> {
    let (address, prefix) =
        text.split_once('/').with_context(|| format!("the address {text:?} has no /prefix"))?;
    let address: IpAddr = address.parse().with_context(|| format!("{address:?} is not an IP address"))?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let prefix: u8 = prefix.parse().with_context(|| format!("{prefix:?} is not the length of a prefix"))?;
    ensure!(prefix <= longest, "the prefix of {text} is longer than {longest}");
    Ok((address, prefix))
}

/// Six bytes written as `02:00:00:00:00:01`.
fn parse_mac(text: &str) -> Result<[u8; 6]> {
    let parts: Vec<&str> = text.split(':').collect();
    ensure!(parts.len() == 6, "{text:?} is not a MAC address");
    let mut mac = [0; 6];
    for (byte, part) in mac.iter_mut().zip(parts) {
        *byte = u8::from_str_radix(part, 16).with_context(|| format!("{text:?} is not a MAC address"))?;
    }
    Ok(mac)
}

/// The bare address of a network that has one.
pub(crate) fn address(network: &GuestNetwork) -> Option<IpAddr> {
    parse_cidr(&network.address).ok().map(|(address, _)| address)
}

/// Brings up the loopback and, when there is a network, the link with its MAC address, its address and default route.
pub(crate) async fn set_up(network: Option<&GuestNetwork>) -> Result<()> {
    let (connection, handle, _) = rtnetlink::new_connection().context("open a netlink socket")?;
    let connection = tokio::spawn(connection);
    let result = configure(&handle, network).await;
    connection.abort();
    result
}

async fn configure(handle: &Handle, network: Option<&GuestNetwork>) -> Result<()> {
    let loopback =
        find(handle, |flags, _| flags.contains(LinkFlags::Loopback)).await?.context("no loopback link")?;
    up(handle, loopback, 0).await.context("bring up the loopback")?;
    let Some(network) = network else { return Ok(()) };
    let mac = parse_mac(&network.mac)?;
    let (address, prefix) = parse_cidr(&network.address)?;
    let link = find(handle, |_, hardware| hardware == mac)
        .await?
        .with_context(|| format!("this VM has no network device with the MAC address {}", network.mac))?;
    handle
        .address()
        .add(link, address, prefix)
        .replace()
        .execute()
        .await
        .with_context(|| format!("set the address {}", network.address))?;
    up(handle, link, network.mtu)
        .await
        .with_context(|| format!("bring up the link (MTU {})", network.mtu))?;
    if network.gateway.is_empty() {
        return Ok(());
    }
    let gateway: IpAddr = network
        .gateway
        .parse()
        .with_context(|| format!("the gateway {:?} is not an IP address", network.gateway))?;
    // A gateway outside the prefix, as with /32 addresses, is reached on the link itself.
    let route = match gateway {
        IpAddr::V4(gateway) => RouteMessageBuilder::<std::net::Ipv4Addr>::new()
            .gateway(gateway)
            .output_interface(link)
            .onlink()
            .build(),
        IpAddr::V6(gateway) => RouteMessageBuilder::<std::net::Ipv6Addr>::new()
            .gateway(gateway)
            .output_interface(link)
            .onlink()
            .build(),
    };
    handle
        .route()
        .add(route)
        .replace()
        .execute()
        .await
        .with_context(|| format!("set the default route by {gateway}"))
}

/// Index of the first link that fits.
async fn find(handle: &Handle, fits: impl Fn(LinkFlags, &[u8]) -> bool) -> Result<Option<u32>> {
    let mut links = handle.link().get().execute();
    while let Some(link) = links.try_next().await.context("list network links")? {
        let hardware = link
            .attributes
            .iter()
            .find_map(|a| if let LinkAttribute::Address(bytes) = a { Some(bytes.as_slice()) } else { None });
        if fits(link.header.flags, hardware.unwrap_or_default()) {
            return Ok(Some(link.header.index));
        }
    }
    Ok(None)
}

/// Brings a link up, with `mtu` unless that is 0.
async fn up(handle: &Handle, link: u32, mtu: u32) -> Result<()> {
    let mut message = LinkMessageBuilder::<LinkUnspec>::default().index(link).up();
    if mtu != 0 {
        message = message.mtu(mtu);
    }
    Ok(handle.link().set(message.build()).execute().await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_need_a_prefix_that_fits() {
        assert_eq!(parse_cidr("10.1.2.3/24").unwrap(), ("10.1.2.3".parse().unwrap(), 24));
        assert_eq!(parse_cidr("fd00::5/64").unwrap(), ("fd00::5".parse().unwrap(), 64));
        for bad in ["10.1.2.3", "10.1.2.3/33", "10.1.2/24", "fd00::5/129", "/24", "10.1.2.3/"] {
            assert!(parse_cidr(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn mac_addresses_are_six_bytes() {
        assert_eq!(parse_mac("02:00:00:0a:FF:01").unwrap(), [2, 0, 0, 10, 255, 1]);
        for bad in ["", "02:00", "02:00:00:00:00:zz", "02:00:00:00:00:01:02", "02:00:00:00:00:100"] {
            assert!(parse_mac(bad).is_err(), "{bad}");
        }
    }
}
