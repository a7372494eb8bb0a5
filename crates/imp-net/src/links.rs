//! Links, addresses and routes, by rtnetlink(7).

use std::net::Ipv4Addr;
use std::time::Duration;

use futures::TryStreamExt as _;
use ipnet::Ipv4Net;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use rtnetlink::packet_route::route::{RouteAttribute, RouteMessage};
use rtnetlink::{Handle, LinkBridge, LinkUnspec, RouteMessageBuilder};
use rustix::io::Errno;
use tokio::task::JoinHandle;

use crate::names::Device;
use crate::{NetError, sysctl};

/// Without an uplink: Ethernet's.
const DEFAULT_MTU: u32 = 1500;

/// An address that only the default route leads to: TEST-NET-1 (RFC 5737), which nobody has. Nothing is sent there.
const BEYOND: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// A device as the kernel tells of it.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) alias: Option<String>,
    pub(crate) mtu: u32,
    pub(crate) kind: Option<String>,
    up: bool,
    controller: Option<u32>,
}

/// A conversation with the kernel, of the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Links {
    handle: Handle,
    connection: JoinHandle<()>,
    limit: Duration,
}

impl Drop for Links {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Links {
    /// No request takes longer than `limit`.
    pub(crate) fn open(limit: Duration) -> Result<Self, NetError> {
        let (connection, handle, _) = rtnetlink::new_connection()
            .map_err(|error| NetError::io("open a netlink socket for the node's links", error))?;
        Ok(Self { handle, connection: tokio::spawn(connection), limit })
    }

    /// The device of that name.
    pub(crate) async fn find(&self, name: &str) -> Result<Option<Link>, NetError> {
        let request = self.handle.link().get().match_name(name.to_owned()).execute();
        let mut replies = Box::pin(request);
        let found =
            self.bounded(&format!("look for device {name}"), replies.try_next(), &[Errno::NODEV]).await?;
        Ok(found.flatten().map(|message| Link::from(&message)))
    }

    /// Every device.
    pub(crate) async fn list(&self) -> Result<Vec<Link>, NetError> {
        let request = self.handle.link().get().execute().map_ok(|message| Link::from(&message)).try_collect();
        Ok(self.bounded("list the node's devices", request, &[]).await?.unwrap_or_default())
    }

    /// The bridge `device`, made unless it is there, with the gateway's address, without IPv6, and up.
    ///
    /// # Errors
    /// [`NetError::NameTaken`] when a device of that name is not that bridge.
    pub(crate) async fn ensure_bridge(
        &self,
        device: &Device,
        mac: [u8; 6],
        gateway: Ipv4Net,
        mtu: u32,
    ) -> Result<Link, NetError> {
        let name = &device.name;
        if self.find(name).await?.is_none() {
            let message = LinkBridge::new(name).address(mac.to_vec()).build();
            let request = self.handle.link().add(message).execute();
            self.bounded(&format!("make bridge {name}"), request, &[Errno::EXIST]).await?;
        }
        let link = self.claim(device).await?;
        self.set(name, LinkUnspec::new_with_index(link.index).mtu(mtu).build(), "set the MTU of").await?;
        sysctl::disable_ipv6(name)?;
        self.only_address(&link, gateway).await?;
        if !link.up {
            self.set(name, LinkUnspec::new_with_index(link.index).up().build(), "bring up").await?;
        }
        Ok(link)
    }

    /// Makes the tap `device`, which exists, a port of `bridge`, and brings it up.
    ///
    /// # Errors
    /// [`NetError::NameTaken`] when a device of that name is not that tap.
    pub(crate) async fn join(&self, device: &Device, bridge: &Link, mtu: u32) -> Result<(), NetError> {
        let link = self.claim(device).await?;
        let name = &device.name;
        self.set(name, LinkUnspec::new_with_index(link.index).mtu(mtu).build(), "set the MTU of").await?;
        sysctl::disable_ipv6(name)?;
        if link.controller != Some(bridge.index) {
            let message = LinkUnspec::new_with_index(link.index).controller(bridge.index).build();
            self.set(name, message, &format!("attach to bridge {}", bridge.name)).await?;
        }
        if !link.up {
            self.set(name, LinkUnspec::new_with_index(link.index).up().build(), "bring up").await?;
        }
        Ok(())
    }

    /// Removes a device; one that is gone is no error.
    pub(crate) async fn remove(&self, link: &Link) -> Result<(), NetError> {
        let request = self.handle.link().del(link.index).execute();
        self.bounded(&format!("remove device {}", link.name), request, &[Errno::NODEV]).await?;
        Ok(())
    }

    /// The MTU of `interface`, or with an empty name of the device that the default route leaves by.
    pub(crate) async fn uplink_mtu(&self, interface: &str) -> Result<u32, NetError> {
        if !interface.is_empty() {
            return Ok(self.find(interface).await?.map_or(DEFAULT_MTU, |link| link.mtu));
        }
        let question = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(BEYOND, 32).build();
        let mut replies = Box::pin(self.handle.route().get(question).execute());
        // Besides "no such network": routes that say "unreachable", "prohibit" and "blackhole".
        let no_route = [Errno::NETUNREACH, Errno::HOSTUNREACH, Errno::ACCESS, Errno::INVAL];
        let route = self.bounded("look up the default route", replies.try_next(), &no_route).await?;
        let Some(index) = route.flatten().as_ref().and_then(output_device) else { return Ok(DEFAULT_MTU) };
        let mut replies = Box::pin(self.handle.link().get().match_index(index).execute());
        let link = self.bounded("look for the uplink", replies.try_next(), &[Errno::NODEV]).await?.flatten();
        Ok(link.map_or(DEFAULT_MTU, |message| Link::from(&message).mtu))
    }

    /// The device as it is, marked as ours if it was not.
    async fn claim(&self, device: &Device) -> Result<Link, NetError> {
        let taken = |owner: String| NetError::NameTaken {
            device: device.name.clone(),
            wanted: device.alias.clone(),
            owner,
        };
        let Some(link) = self.find(&device.name).await? else {
            return Err(NetError::io(
                format!("use device {}, which another program removed", device.name),
                Errno::NODEV,
            ));
        };
        if link.kind.as_deref() != Some(device.kind) {
            return Err(taken(format!("a device of kind {:?}", link.kind.as_deref().unwrap_or("none"))));
        }
        match &link.alias {
            Some(alias) if *alias == device.alias => {}
            Some(alias) => return Err(taken(format!("{alias:?}"))),
            None => {
                let message = LinkUnspec::new_with_index(link.index).alias(&device.alias).build();
                self.set(&device.name, message, "mark").await?;
            }
        }
        Ok(link)
    }

    /// Gives the bridge `address` and no other IPv4 address.
    async fn only_address(&self, link: &Link, address: Ipv4Net) -> Result<(), NetError> {
        let addresses = self.handle.address().get().set_link_index_filter(link.index).execute();
        let found: Vec<_> = self
            .bounded(&format!("list addresses of {}", link.name), addresses.try_collect(), &[])
            .await?
            .unwrap_or_default();
        let mut present = false;
        for message in found {
            let Some(theirs) = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(std::net::IpAddr::V4(ip)) => Some(*ip),
                _ => None,
            }) else {
                continue;
            };
            if theirs == address.addr() && message.header.prefix_len == address.prefix_len() {
                present = true;
                continue;
            }
            let request = self.handle.address().del(message).execute();
            self.bounded(
                &format!("remove address {theirs} from {}", link.name),
                request,
                &[Errno::ADDRNOTAVAIL],
            )
            .await?;
        }
        if !present {
            let request =
                self.handle.address().add(link.index, address.addr().into(), address.prefix_len()).execute();
            self.bounded(&format!("give {} address {address}", link.name), request, &[Errno::EXIST]).await?;
        }
        Ok(())
    }

    async fn set(&self, name: &str, message: LinkMessage, what: &str) -> Result<(), NetError> {
        let request = self.handle.link().set(message).execute();
        self.bounded(&format!("{what} device {name}"), request, &[]).await?;
        Ok(())
    }

    /// The answer to a request, or none for the errors in `fine`.
    async fn bounded<T>(
        &self,
        doing: &str,
        request: impl Future<Output = Result<T, rtnetlink::Error>>,
        fine: &[Errno],
    ) -> Result<Option<T>, NetError> {
        match tokio::time::timeout(self.limit, request).await {
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(rtnetlink::Error::NetlinkError(error)))
                if fine.iter().any(|errno| errno.raw_os_error() == -error.raw_code()) =>
            {
                Ok(None)
            }
            Ok(Err(source)) => Err(NetError::Netlink { doing: doing.to_owned(), source }),
            Err(_) => Err(NetError::Timeout { doing: doing.to_owned(), after: self.limit }),
        }
    }
}

impl From<&LinkMessage> for Link {
    fn from(message: &LinkMessage) -> Self {
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            alias: None,
            mtu: DEFAULT_MTU,
            kind: None,
            up: message.header.flags.contains(LinkFlags::Up),
            controller: None,
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias.clone()),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::Controller(index) => link.controller = Some(*index),
                LinkAttribute::LinkInfo(infos) => {
                    link.kind = infos.iter().find_map(|info| match info {
                        LinkInfo::Kind(kind) => Some(kind.to_string()),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        link
    }
}

fn output_device(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        RouteAttribute::MultiPath(hops) => hops.first().map(|hop| hop.interface_index),
        _ => None,
    })
}
