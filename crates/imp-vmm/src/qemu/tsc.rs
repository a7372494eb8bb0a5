//! How fast the time-stamp counter runs.
//!
//! Under software emulation the guest's counter is the host's, and the guest's kernel cannot measure it reliably against an
//! emulated timer: on a busy host it gives up and hangs. The host measures and tells (`tsc_early_khz`, kernel-parameters).

use rustix::time::{ClockId, clock_gettime};
use std::{sync::OnceLock, time::Duration};

/// Long enough for an error below 100 ppm.
const MEASURE: Duration = Duration::from_millis(200);

/// Frequency in kHz, measured once for each process.
#[cfg(target_arch = "x86_64")]
pub(super) fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let now = || {
            let t = clock_gettime(ClockId::MonotonicRaw);
            i128::from(t.tv_sec) * 1_000_000_000 + i128::from(t.tv_nsec)
        };
        let (ticks, begin) = (crate::sys::time_stamp(), now());
        std::thread::sleep(MEASURE);
        let (ticks, elapsed) = (crate::sys::time_stamp().wrapping_sub(ticks), now() - begin);
        u64::try_from(i128::from(ticks) * 1_000_000 / elapsed.max(1)).unwrap_or(0)
    })
}
