//! What the VM uses, as the guest's kernel counts it.

use std::fs;

use anyhow::{Context as _, Result};
use imp_proto::v1::Usage;

use crate::agent::Machine;

/// Figures of the machine; disk and CPU of the workload once it is there.
pub(crate) fn usage(machine: Option<&Machine>) -> Result<Usage> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let total = kibibytes(&meminfo, "MemTotal") * 1024;
    let mut usage = Usage {
        memory_total_bytes: total,
        memory_used_bytes: total.saturating_sub(kibibytes(&meminfo, "MemAvailable") * 1024),
        ..Usage::default()
    };
    (usage.network_receive_bytes, usage.network_transmit_bytes) = network();
    if let Some(machine) = machine {
        let disk =
            machine.launcher.root.inside(|| rustix::fs::statvfs("/"))?.context("statvfs of the root")?;
        usage.disk_total_bytes = disk.f_blocks * disk.f_frsize;
        usage.disk_used_bytes = disk.f_blocks.saturating_sub(disk.f_bfree) * disk.f_frsize;
        usage.cpu_nanoseconds = machine.launcher.cgroup.cpu_nanoseconds();
    }
    Ok(usage)
}

/// A value of /proc/meminfo (proc_meminfo(5)); 0 when absent.
fn kibibytes(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|l| l.split_once(':'))
        .find(|(k, _)| *k == key)
        .and_then(|(_, v)| v.trim().trim_end_matches("kB").trim_end().parse().ok())
        .unwrap_or(0)
}

/// Bytes received and sent over all links but the loopback.
fn network() -> (u64, u64) {
    let mut sums = (0, 0);
    for link in fs::read_dir("/sys/class/net").into_iter().flatten().flatten() {
        if link.file_name() == "lo" {
            continue;
        }
        let count = |name: &str| {
            let path = link.path().join("statistics").join(name);
            fs::read_to_string(path).ok().and_then(|t| t.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        sums.0 += count("rx_bytes");
        sums.1 += count("tx_bytes");
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_by_whole_keys() {
        let text = "MemTotal:         248320 kB\nMemFree:          100 kB\nMemAvailable:     200000 kB\n";
        assert_eq!(kibibytes(text, "MemAvailable"), 200_000);
        assert_eq!(kibibytes(text, "Mem"), 0);
    }
}
