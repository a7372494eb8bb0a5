//! What of a cluster could be left on the machine.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use imp_testkit::dev::Dev;

/// Everything of the machine that a cluster could change, by kind and name.
#[derive(Debug)]
pub(crate) struct Leftovers(BTreeSet<String>);

impl Leftovers {
    /// Network namespaces, mounts, cgroups, links and nftables tables of the machine.
    pub(crate) fn look() -> Result<Self> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
            found.insert(format!("network namespace {}", entry.file_name().to_string_lossy()));
        }
        for line in fs::read_to_string("/proc/self/mounts").context("read /proc/self/mounts")?.lines() {
            found.insert(format!("mount {line}"));
        }
        for hierarchy in imp_testkit::cgroups::hierarchies()? {
            for entry in fs::read_dir(&hierarchy.mount_point).into_iter().flatten().flatten() {
                found.insert(format!("cgroup {}", entry.path().display()));
            }
        }
        for (kind, command) in [("link", &["ip", "-br", "link"]), ("table", &["nft", "list", "tables"])] {
            let output = Command::new(command[0])
                .args(&command[1..])
                .output()
                .with_context(|| format!("run {}", command[0]))?;
            found.extend(String::from_utf8_lossy(&output.stdout).lines().map(|l| format!("{kind} {l}")));
        }
        Ok(Self(found))
    }

    /// Fails with what is there after `down` of `dev` and was not before; things of others that come and go meanwhile bear
    /// other names.
    pub(crate) fn compare(&self, after: &Self, dev: &Dev) -> Result<()> {
        let ours = |text: &&String| {
            text.contains(&dev.name) || text.starts_with("link ") || text.starts_with("table ")
        };
        let mut left: Vec<String> = after.0.difference(&self.0).filter(ours).cloned().collect();
        left.extend(processes(dev)?);
        if dev.dir.exists() {
            left.push(format!("directory {}", dev.dir));
        }
        ensure!(left.is_empty(), "left behind: {left:#?}");
        Ok(())
    }
}

/// Processes that name the cluster in their arguments or environment.
fn processes(dev: &Dev) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("read /proc")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.parse::<u32>().map_or(true, |pid| pid == std::process::id()) {
            continue;
        }
        let read = |file: &str| {
            fs::read(entry.path().join(file))
                .map(|b| String::from_utf8_lossy(&b).into_owned())
                .unwrap_or_default()
        };
        let arguments = read("cmdline").replace('\0', " ");
        if arguments.contains(dev.dir.as_str()) || read("environ").contains(dev.dir.as_str()) {
            found.push(format!("process {name}: {arguments}"));
        }
    }
    Ok(found)
}
