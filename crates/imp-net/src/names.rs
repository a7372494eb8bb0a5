//! Names and marks of the devices that are ours.

use sha2::{Digest as _, Sha256};

/// Start of a bridge's name.
pub(crate) const BRIDGE_PREFIX: &str = "imp-";
/// Start of a tap's name.
pub(crate) const TAP_PREFIX: &str = "imt-";
const BRIDGE_KIND: &str = "bridge";
const TAP_KIND: &str = "tun";
/// Hexadecimal digits after the prefix. The kernel allows 15 bytes (IFNAMSIZ, with the final NUL, is 16).
const DIGITS: usize = 10;

/// A device that we make: its name is a hash, its alias (ip-link(8)) says in full whose it is, so that a collision of
/// hashes is an error instead of two VMs in one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// At most 15 bytes.
    pub(crate) name: String,
    /// At most 255 bytes.
    pub(crate) alias: String,
    /// As ip-link(8) names it.
    pub(crate) kind: &'static str,
}

/// The bridge of the network with the key `network`.
pub(crate) fn bridge(network: &str) -> Device {
    Device { name: name(BRIDGE_PREFIX, network), alias: format!("imp network {network}"), kind: BRIDGE_KIND }
}

/// The tap of the VM with the UID `vm`.
pub(crate) fn tap(vm: &str) -> Device {
    Device { name: name(TAP_PREFIX, vm), alias: format!("imp vm {vm}"), kind: TAP_KIND }
}

/// The hardware address of the bridge of `network`: locally administered, and fixed, since a bridge without one of its
/// own takes its lowest port's, which changes under guests that have learnt it.
pub(crate) fn bridge_mac(network: &str) -> [u8; 6] {
    let hash = Sha256::digest(network.as_bytes());
    [0x02, hash[0], hash[1], hash[2], hash[3], hash[4]]
}

impl Device {
    /// Whether what stands under our name is this device: marked as it, or of its kind and unmarked, as it is left when we
    /// are cut off between making and marking.
    pub(crate) fn is(&self, alias: Option<&str>, kind: Option<&str>) -> bool {
        alias.map_or_else(|| kind == Some(self.kind), |alias| alias == self.alias)
    }
}

/// Whether a device is one that we made, for whomever.
pub(crate) fn is_ours(name: &str, alias: Option<&str>, kind: Option<&str>) -> bool {
    let hashed = |rest: &str| rest.len() == DIGITS && rest.bytes().all(|b| b.is_ascii_hexdigit());
    let (rest, mark, made_as) = match (name.strip_prefix(BRIDGE_PREFIX), name.strip_prefix(TAP_PREFIX)) {
        (Some(rest), _) => (rest, "imp network ", BRIDGE_KIND),
        (_, Some(rest)) => (rest, "imp vm ", TAP_KIND),
        _ => return false,
    };
    hashed(rest) && alias.map_or_else(|| kind == Some(made_as), |alias| alias.starts_with(mark))
}

fn name(prefix: &str, id: &str) -> String {
    let hash = hex::encode(Sha256::digest(id.as_bytes()));
    format!("{prefix}{}", &hash[..DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_kernel_and_do_not_change() {
        assert_eq!(bridge("default/net").name, "imp-51a49ac74c");
        assert_eq!(tap("5f0c9c1e-0000-4000-8000-000000000001").name.len(), 14);
        assert_ne!(bridge("a").name, bridge("b").name);
        assert_eq!(bridge_mac("a")[0] & 0b11, 0b10, "locally administered, not multicast");
    }

    #[test]
    fn only_devices_marked_or_left_unmarked_are_ours() {
        let device = tap("uid");
        let Device { name, alias, .. } = &device;
        for (mark, kind, expected) in [
            (Some(alias.as_str()), Some("tun"), true),
            (None, Some("tun"), true),
            (None, Some("veth"), false),
            (None, None, false),
            (Some("somebody's"), Some("tun"), false),
        ] {
            assert_eq!(is_ours(name, mark, kind), expected, "{mark:?} {kind:?}");
            assert_eq!(device.is(mark, kind), expected, "{mark:?} {kind:?}");
        }
        let another = tap("another").alias;
        assert!(is_ours(name, Some(&another), Some("tun")) && !device.is(Some(&another), Some("tun")));
        assert!(!is_ours("imp-operator", None, Some("bridge")));
        assert!(!is_ours("eth0", None, None));
    }
}
