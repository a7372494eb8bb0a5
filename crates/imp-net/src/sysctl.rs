//! Kernel settings under /proc/sys/net, of the network namespace of the calling thread.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use crate::NetError;

/// Lets the node pass on packets between its interfaces.
pub(crate) fn enable_forwarding() -> Result<(), NetError> {
    set("ipv4/ip_forward", "1")
}

/// Takes IPv6 off a device of ours: networks are IPv4, and a link-local address of the bridge would be a way to the node
/// that no rule guards.
pub(crate) fn disable_ipv6(device: &str) -> Result<(), NetError> {
    match set(&format!("ipv6/conf/{device}/disable_ipv6"), "1") {
        // A kernel without IPv6.
        Err(NetError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Whether 127.0.0.0/8 may be routed by a bridge, which a published port needs for the node's own programs.
///
/// A bridge that is gone is no error.
pub(crate) fn route_loopback(bridge: &str, allow: bool) -> Result<(), NetError> {
    match set(&format!("ipv4/conf/{bridge}/route_localnet"), if allow { "1" } else { "0" }) {
        Err(NetError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Writes only what differs: /proc/sys may be read-only where everything is set already.
fn set(key: &str, value: &str) -> Result<(), NetError> {
    let path = PathBuf::from("/proc/sys/net").join(key);
    let write = || -> io::Result<()> {
        if fs::read_to_string(&path)?.trim() == value {
            return Ok(());
        }
        fs::write(&path, value)
    };
    write().map_err(|error| NetError::io(format!("set {} to {value}", path.display()), error))
}
