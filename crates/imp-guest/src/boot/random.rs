//! The host's randomness and clock.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::time::{ClockId, Timespec, clock_settime};

use crate::sys;

/// 2020-01-01: an earlier time is a host without a clock, not a time to set.
const OLDEST: i64 = 1_577_836_800;
/// Bytes that a generator needs to be as good as the host's.
const MIN_ENTROPY: usize = 32;

/// Mixes the host's bytes into the kernel's generator. Fails closed: a guest without randomness of its own would repeat
/// another one's keys.
pub(crate) fn seed(entropy: &[u8]) -> Result<()> {
    ensure!(
        entropy.len() >= MIN_ENTROPY,
        "the host sent {} bytes of entropy; at least {MIN_ENTROPY} are needed",
        entropy.len()
    );
    let random = File::options().write(true).open("/dev/urandom").context("open /dev/urandom")?;
    for part in entropy.chunks(sys::MAX_ENTROPY) {
        sys::add_entropy(&random, part).context("seed the kernel's random number generator")?;
    }
    Ok(())
}

/// Sets the wall clock.
pub(crate) fn set_clock(time: prost_types::Timestamp) -> Result<()> {
    ensure!(time.seconds >= OLDEST, "the host's clock says {} s since 1970, which can't be", time.seconds);
    let nanos = Duration::from_nanos(u64::try_from(time.nanos).context("a negative fraction of a second")?);
    let time = Timespec { tv_sec: time.seconds, tv_nsec: nanos.subsec_nanos().into() };
    clock_settime(ClockId::Realtime, time).context("set the clock")
}
