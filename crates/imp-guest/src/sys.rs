//! The system calls that need `unsafe`, each behind a safe function.
#![allow(unsafe_code, reason = "the one module for system calls that the compiler can't check")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::ioctl::{self, IntegerSetter, NoArg, Opcode};
use rustix::process::{Pid, Signal};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tokio::io::unix::AsyncFd;

/// Linux, `include/uapi/linux/random.h`: `RNDADDENTROPY`, `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: Opcode = ioctl::opcode::write::<[i32; 2]>(b'R', 0x03);
/// `RNDRESEEDCRNG`, `_IO('R', 0x07)`.
const RNDRESEEDCRNG: Opcode = ioctl::opcode::none(b'R', 0x07);
/// Linux, `include/uapi/asm-generic/ioctls.h`: TIOCSCTTY.
const TIOCSCTTY: Opcode = 0x540E;
/// Most bytes of entropy that one call takes.
pub(crate) const MAX_ENTROPY: usize = 512;

/// `struct rand_pool_info` with room for [`MAX_ENTROPY`].
#[repr(C)]
struct RandPoolInfo {
    /// In bits.
    entropy_count: i32,
    /// In bytes.
    buf_size: i32,
    buf: [u8; MAX_ENTROPY],
}

struct AddEntropy(RandPoolInfo);

// SAFETY: the kernel reads the header and `buf_size` bytes behind it, both inside the struct; it writes nothing.
unsafe impl ioctl::Ioctl for AddEntropy {
    type Output = ();
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        RNDADDENTROPY
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }

    unsafe fn output_from_ptr(_: ioctl::IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Mixes `seed` (its first [`MAX_ENTROPY`] bytes) into the kernel's generator, credits it in full, and has the
/// generator reseed itself at once.
///
/// # Errors
/// When `random` is not `/dev/urandom` or the caller lacks `CAP_SYS_ADMIN`.
pub(crate) fn add_entropy(random: impl AsFd, seed: &[u8]) -> io::Result<()> {
    let seed = &seed[..seed.len().min(MAX_ENTROPY)];
    let length = i32::try_from(seed.len()).map_err(io::Error::other)?;
    let mut info = RandPoolInfo { entropy_count: length * 8, buf_size: length, buf: [0; MAX_ENTROPY] };
    info.buf[..seed.len()].copy_from_slice(seed);
    // SAFETY: AddEntropy describes RNDADDENTROPY, see above.
    unsafe { ioctl::ioctl(&random, AddEntropy(info)) }?;
    // SAFETY: RNDRESEEDCRNG takes no argument.
    unsafe { ioctl::ioctl(&random, NoArg::<RNDRESEEDCRNG>::new()) }?;
    Ok(())
}

/// Gives the calling thread a root directory and working directory of its own, not shared with other threads.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn unshare_fs() -> io::Result<()> {
    // SAFETY: CLONE_FS alone; file descriptors stay shared, so no ownership of one changes.
    unsafe { unshare_unsafe(UnshareFlags::FS) }.map_err(Into::into)
}

/// Makes the terminal `tty` the controlling terminal of the calling session leader.
///
/// # Errors
/// When the caller leads no session.
pub(crate) fn set_controlling_terminal(tty: impl AsFd) -> io::Result<()> {
    // SAFETY: TIOCSCTTY takes an integer: 0, don't steal.
    unsafe { ioctl::ioctl(tty, IntegerSetter::<TIOCSCTTY>::new_usize(0)) }.map_err(Into::into)
}

/// Has `command` run `prepare` in the child between fork and exec. `prepare` must be as careful as a signal handler:
/// system calls only, no allocation, no locks.
pub(crate) fn before_exec<F>(command: &mut Command, prepare: F)
where
    F: FnMut() -> io::Result<()> + Send + Sync + 'static,
{
    // SAFETY: the callers' closures make system calls through rustix on descriptors and buffers made before the fork.
    unsafe { command.pre_exec(prepare) };
}

/// Sends a signal by number, real-time signals included.
///
/// # Errors
/// `EINVAL` for a number outside 1 to 64, else what kill(2) says.
pub(crate) fn kill(pid: Pid, signal: i32, group: bool) -> rustix::io::Result<()> {
    if !(1..=64).contains(&signal) {
        return Err(rustix::io::Errno::INVAL);
    }
    // SAFETY: the number is only handed to kill(2); no handler of ours for a reserved signal is touched.
    let signal = unsafe { Signal::from_raw_unchecked(signal) };
    if group {
        rustix::process::kill_process_group(pid, signal)
    } else {
        rustix::process::kill_process(pid, signal)
    }
}

/// Registers a descriptor with the runtime's poller.
///
/// # Errors
/// When the poller can't watch this kind of file.
pub(crate) fn watch_fd(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always names the same open file and closes it only when dropped, after AsyncFd has
    // deregistered it.
    unsafe { AsyncFd::register(fd) }.map_err(Into::into)
}
