//! The ioctls that make taps.
#![allow(unsafe_code, reason = "the only module of this crate that may")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::ioctl::{IntegerSetter, Opcode, Setter, ioctl, opcode};

/// `struct ifreq` of linux/if.h as TUNSETIFF uses it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

// linux/if_tun.h
const TUNSETIFF: Opcode = opcode::write::<core::ffi::c_int>(b'T', 202);
const TUNSETPERSIST: Opcode = opcode::write::<core::ffi::c_int>(b'T', 203);
const TUNSETOWNER: Opcode = opcode::write::<core::ffi::c_int>(b'T', 204);
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;

/// Makes the tap `name`, or attaches to the one that exists. It vanishes with the descriptor unless it is persistent.
///
/// EBUSY: another descriptor is attached to it. EINVAL: there is a device of that name that is no tap.
pub(crate) fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let mut request =
        InterfaceRequest { name: [0; 16], flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR, rest: [0; 22] };
    // The last byte stays 0.
    if name.is_empty() || name.len() >= request.name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "an interface name has 1 to 15 bytes"));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF takes a pointer to one `struct ifreq` of 40 bytes, which `InterfaceRequest` is. The name that the
    // kernel writes back goes to the setter's own copy, which nobody reads.
    unsafe { ioctl(file.as_fd(), Setter::<TUNSETIFF, InterfaceRequest>::new(request))? };
    Ok(file.into())
}

/// Lets the user `owner` open the tap without privileges, and keeps it when `tap` is closed.
pub(crate) fn keep_tap(tap: &OwnedFd, owner: u32) -> io::Result<()> {
    // SAFETY: TUNSETOWNER takes a user ID by value.
    unsafe { ioctl(tap.as_fd(), IntegerSetter::<TUNSETOWNER>::new_usize(owner as usize))? };
    // SAFETY: TUNSETPERSIST takes a truth value by value.
    unsafe { ioctl(tap.as_fd(), IntegerSetter::<TUNSETPERSIST>::new_usize(1))? };
    Ok(())
}
