//! What needs `unsafe`: work between fork and exec, the time-stamp counter, and the ioctl that attaches a tap.
#![allow(unsafe_code, reason = "the only module of this crate that may")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};
use rustix::process::{Resource, Rlimit, setrlimit, setsid};
use rustix::thread::{Gid, Uid};

/// How a VMM's process differs from ours, put in force between fork and exec.
#[derive(Debug)]
pub(crate) struct ChildSetup {
    /// `cgroup.procs` of every group to join, open for writing.
    pub(crate) cgroups: Vec<OwnedFd>,
    /// Numeric user and group.
    pub(crate) ids: (u32, u32),
    /// Supplementary groups, in place of ours.
    pub(crate) groups: Vec<u32>,
    /// Files that the program gets, under the numbers that they have here.
    pub(crate) files: Vec<OwnedFd>,
    /// Gets one byte right before the program runs: whether it is empty tells after a crash whether anything ran.
    pub(crate) marker: OwnedFd,
    /// Resource limits (soft and hard alike).
    pub(crate) limits: Vec<(Resource, u64)>,
}

/// Starts `command` in a session of its own, set up as `setup` says, with no way to gain privileges.
///
/// The files of `setup` are closed here afterwards.
pub(crate) fn spawn(command: &mut Command, setup: ChildSetup) -> io::Result<Child> {
    let ChildSetup { cgroups, ids, groups, files, marker, limits } = setup;
    let (uid, gid) = (Uid::from_raw(ids.0), Gid::from_raw(ids.1));
    let groups: Vec<Gid> = groups.into_iter().map(Gid::from_raw).collect();
    let before_exec = move || -> io::Result<()> {
        setsid()?;
        for procs in &cgroups {
            rustix::io::write(procs, b"0")?;
        }
        for file in &files {
            fcntl_setfd(file, FdFlags::empty())?;
        }
        for (resource, limit) in &limits {
            setrlimit(*resource, Rlimit { current: Some(*limit), maximum: Some(*limit) })?;
        }
        rustix::thread::set_no_new_privs(true)?;
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        rustix::io::write(&marker, b"1")?;
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe things may be done. The closure makes plain system calls
    // (rustix issues them itself) on values that were made before the fork; it takes no lock and allocates nothing, and
    // an error becomes an `io::Error` that holds a number. The child has one thread, so that the calls that change the
    // credentials of a thread change those of the process.
    unsafe { command.pre_exec(before_exec) };
    command.spawn()
}

/// The CPU's time-stamp counter.
#[cfg(target_arch = "x86_64")]
pub(crate) fn time_stamp() -> u64 {
    // SAFETY: every x86-64 CPU has the instruction, and Linux lets user space execute it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// `struct ifreq` of linux/if.h as TUNSETIFF uses it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// TUNSETIFF of linux/if_tun.h.
const TUNSETIFF: Opcode = opcode::write::<core::ffi::c_int>(b'T', 202);
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;

struct Attach(InterfaceRequest);

// SAFETY: TUNSETIFF reads and writes one `struct ifreq` of 40 bytes, which `InterfaceRequest` is.
unsafe impl Ioctl for Attach {
    type Output = ();
    const IS_MUTATING: bool = true;
    fn opcode(&self) -> Opcode {
        TUNSETIFF
    }
    fn as_ptr(&mut self) -> *mut core::ffi::c_void {
        (&raw mut self.0).cast()
    }
    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut core::ffi::c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Opens the existing tap `name` with a virtio-net header, as QEMU and Firecracker want it.
///
/// EBUSY: another process has it.
pub(crate) fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let mut request =
        InterfaceRequest { name: [0; 16], flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR, rest: [0; 22] };
    // The last byte stays 0.
    if name.is_empty() || name.len() >= request.name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "an interface name has 1 to 15 bytes"));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: see `Attach`; the descriptor is a tun device's.
    unsafe { rustix::ioctl::ioctl(file.as_fd(), Attach(request))? };
    Ok(file.into())
}

/// The number by which a program that inherits `fd` names it.
pub(crate) fn number(fd: BorrowedFd<'_>) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(&fd)
}

/// Watches a descriptor for readability.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor must stay open while it is registered; an `OwnedFd` that only the `AsyncFd` holds does.
    let watched =
        unsafe { tokio::io::unix::AsyncFd::register_with_interest(fd, tokio::io::Interest::READABLE) };
    watched.map_err(Into::into)
}
