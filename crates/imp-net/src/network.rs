//! The networks of a node: the order of the steps, and their undoing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ipnet::Ipv4Net;
use tokio::sync::Mutex;

use crate::links::{Link, Links};
use crate::names::Device;
use crate::{Attached, Attachment, NetError, check, names, nft, rules, sysctl, tap};

/// How a node's networks are run.
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// Program that loads nftables rules: a name that is looked up in `PATH`, or a path.
    pub nft: String,
    /// The longest that one step (a change of a link, a load of the rules, the wait for a held tap) may take.
    pub step_timeout: Duration,
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self { nft: "nft".to_owned(), step_timeout: Duration::from_secs(10) }
    }
}

/// The networks of a node: the one in which the calling thread is (its network namespace).
///
/// Clones share one lock, under which every operation runs. One process of a node may use this at a time.
#[derive(Clone, Debug)]
pub struct Network {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: NetworkOptions,
    lock: Mutex<()>,
}

impl Network {
    /// Changes nothing yet; [`Network::reconcile`] is due at start.
    #[must_use]
    pub fn new(options: NetworkOptions) -> Self {
        Self { inner: Arc::new(Inner { options, lock: Mutex::new(()) }) }
    }

    /// Makes a VM's place in its network, to be called before its VMM starts: rules, bridge, tap.
    ///
    /// `all` is every attachment that should exist, this one included, oldest first: the rules are rebuilt from it. What
    /// is there already is kept, so this may be called again after being cut short. On an error, what this call made is
    /// removed again.
    ///
    /// # Errors
    /// [`NetError::Invalid`] and [`NetError::Conflict`] before anything is touched; [`NetError::TapBusy`] when another
    /// process still has the tap open after the step's time; else what the node refused.
    pub async fn attach(&self, attachment: &Attachment, all: &[Attachment]) -> Result<Attached, NetError> {
        let _serial = self.inner.lock.lock().await;
        let others = without(all, &attachment.vm);
        check::alone(attachment)?;
        for other in check::sound(&others) {
            check::beside(attachment, other)?;
        }
        let links = self.links()?;
        let tap = names::tap(&attachment.vm);
        let bridge = names::bridge(&attachment.network);
        let had_tap = links.find(&tap.name).await?.is_some_and(|link| is(&tap, &link));
        let had_bridge = links.find(&bridge.name).await?.is_some_and(|link| is(&bridge, &link));

        let made = self.make(&links, attachment, &others).await;
        if made.is_err() {
            // What was there before this call stays; it may serve a running VM.
            if !had_tap {
                warn_of(remove_if_ours(&links, &tap).await);
                warn_of(self.load_rules(&others).await);
            }
            if !had_bridge {
                warn_of(remove_if_ours(&links, &bridge).await);
            }
        }
        Ok(Attached { tap: tap.name, bridge: bridge.name, mtu: made? })
    }

    /// Removes a VM's place in its network, and the bridge after the network's last VM. Nothing there is no error.
    ///
    /// `remaining` is every attachment that should still exist, oldest first.
    ///
    /// # Errors
    /// The first failure; the other steps are done all the same. Call again then.
    pub async fn detach(
        &self,
        vm_uid: &str,
        network: &str,
        remaining: &[Attachment],
    ) -> Result<(), NetError> {
        let _serial = self.inner.lock.lock().await;
        let remaining = without(remaining, vm_uid);
        let links = self.links()?;
        // The tap first: its port is dead before the rules that watch it go.
        let tap = remove_if_ours(&links, &names::tap(vm_uid)).await;
        let rules = self.load_rules(&remaining).await;
        let bridge = names::bridge(network);
        let last = !remaining.iter().any(|other| other.network == network);
        let bridge = if last {
            remove_if_ours(&links, &bridge).await
        } else {
            sysctl::route_loopback(&bridge.name, publishes(network, &remaining))
        };
        tap.and(rules).and(bridge)
    }

    /// Makes rules and devices agree with `all`, oldest first: loads the rules, puts existing taps back into place, and
    /// removes devices of ours that belong to nobody. For the start of the program, when VMs may be running, and whenever
    /// another program may have meddled. Taps that are missing are left to [`Network::attach`].
    ///
    /// # Errors
    /// The first failure; the other steps are done all the same.
    pub async fn reconcile(&self, all: &[Attachment]) -> Result<(), NetError> {
        let _serial = self.inner.lock.lock().await;
        let links = self.links()?;
        let forwarding = if all.is_empty() { Ok(()) } else { sysctl::enable_forwarding() };
        let mut result = forwarding.and(self.load_rules(all).await);

        let present = links.list().await?;
        let wanted: BTreeSet<String> = all
            .iter()
            .flat_map(|attachment| [names::tap(&attachment.vm).name, names::bridge(&attachment.network).name])
            .collect();
        for attachment in check::sound(all) {
            if present.iter().any(|link| link.name == names::tap(&attachment.vm).name) {
                result = result.and(self.put_back(&links, attachment, all, &present).await);
            }
        }
        for link in &present {
            if names::is_ours(&link.name, link.alias.as_deref(), link.kind.as_deref())
                && !wanted.contains(&link.name)
            {
                tracing::info!(
                    device = link.name,
                    alias = link.alias,
                    "removing a device that belongs to no VM"
                );
                result = result.and(links.remove(link).await);
            }
        }
        result
    }

    /// Makes everything for `attachment`, and returns its MTU.
    async fn make(
        &self,
        links: &Links,
        attachment: &Attachment,
        others: &[Attachment],
    ) -> Result<u32, NetError> {
        let mut all = others.to_vec();
        all.push(attachment.clone());
        let mtu = match attachment.mtu {
            0 => links.uplink_mtu(&attachment.egress_interface).await?,
            mtu => mtu,
        };
        sysctl::enable_forwarding()?;
        // Rules go by names, and so can be in force before there is anything to guard.
        self.load_rules(&all).await?;
        let bridge = ensure_bridge(links, attachment, &all, mtu).await?;
        let device = names::tap(&attachment.vm);
        tap::ensure(&device, &attachment.vm, attachment.tap_owner, self.inner.options.step_timeout).await?;
        links.join(&device, &bridge, mtu).await?;
        Ok(mtu)
    }

    /// Repairs bridge and port of a tap that exists, without changing the MTU under a running guest.
    async fn put_back(
        &self,
        links: &Links,
        attachment: &Attachment,
        all: &[Attachment],
        present: &[Link],
    ) -> Result<(), NetError> {
        let tap = names::tap(&attachment.vm);
        let Some(mtu) = present.iter().find(|link| link.name == tap.name).map(|link| link.mtu) else {
            return Ok(());
        };
        let bridge = ensure_bridge(links, attachment, all, mtu).await?;
        links.join(&tap, &bridge, mtu).await
    }

    async fn load_rules(&self, all: &[Attachment]) -> Result<(), NetError> {
        let NetworkOptions { nft, step_timeout } = &self.inner.options;
        nft::load(nft, &rules::script(&check::sound(all)), *step_timeout).await
    }

    fn links(&self) -> Result<Links, NetError> {
        Links::open(self.inner.options.step_timeout)
    }
}

async fn ensure_bridge(
    links: &Links,
    attachment: &Attachment,
    all: &[Attachment],
    mtu: u32,
) -> Result<Link, NetError> {
    let network = &attachment.network;
    let gateway = Ipv4Net::new_assert(attachment.gateway, attachment.address.prefix_len());
    let link = links.ensure_bridge(&names::bridge(network), names::bridge_mac(network), gateway, mtu).await?;
    sysctl::route_loopback(&link.name, publishes(network, all))?;
    Ok(link)
}

/// Removes `device`, unless what has its name is another's.
async fn remove_if_ours(links: &Links, device: &Device) -> Result<(), NetError> {
    match links.find(&device.name).await? {
        Some(link) if is(device, &link) => links.remove(&link).await,
        Some(link) => {
            let Link { name, alias, kind, .. } = link;
            tracing::warn!(
                device = name,
                alias,
                kind,
                "left a device alone that is not that of {}",
                device.alias
            );
            Ok(())
        }
        None => Ok(()),
    }
}

fn is(device: &Device, link: &Link) -> bool {
    device.is(link.alias.as_deref(), link.kind.as_deref())
}

/// Whether a VM of `network` has a port of the node.
fn publishes(network: &str, all: &[Attachment]) -> bool {
    all.iter().any(|attachment| attachment.network == network && !attachment.ports.is_empty())
}

fn without(all: &[Attachment], vm: &str) -> Vec<Attachment> {
    all.iter().filter(|attachment| attachment.vm != vm).cloned().collect()
}

fn warn_of(undone: Result<(), NetError>) {
    if let Err(error) = undone {
        tracing::warn!(error = &error as &dyn std::error::Error, "could not undo a part of an attachment");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Servers spawn these on any thread.
    #[test]
    fn operations_can_be_spawned() {
        fn spawnable<T: Send>(_: T) {}
        let network = Network::new(NetworkOptions::default());
        spawnable(network.reconcile(&[]));
        spawnable(network.detach("vm", "network", &[]));
        let _ = |attachment: &Attachment| spawnable(network.attach(attachment, &[]));
    }
}
