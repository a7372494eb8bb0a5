//! `cargo xtask bench startup`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use camino::{Utf8Path, Utf8PathBuf};
use clap::Args;
use imp_api::ImpVM;
use imp_proto::{unix, v1::runtime_client::RuntimeClient};
use imp_testkit::boot;
use imp_testkit::dev::Dev;
use imp_testkit::writes;
use kube::Api;
use serde::Serialize;

use super::bare::Bare;
use super::figures::Milliseconds;
use super::report;
use super::steps::{self, Steps};
use crate::programs;

/// The class `small` of examples/hello.yaml.
const MEMORY_MIB: u64 = 256;
/// VMs that run at a time while memory is looked at.
const TOGETHER: usize = 6;

/// What to measure.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// VMs, one after another.
    #[arg(long, default_value_t = 20)]
    vms: usize,
    /// Seconds in which nothing happens, for the writes of an idle cluster.
    #[arg(long, default_value_t = 300)]
    idle_seconds: u64,
}

#[derive(Serialize)]
struct Report {
    vms: usize,
    /// Milliseconds since the VM's creation was asked for.
    since_creation: BTreeMap<&'static str, Milliseconds>,
    /// Milliseconds between the runtime's acceptance and the VMM, the image being there: disk, network, control group, launch.
    accepted_to_vmm: Milliseconds,
    /// The image's disk for a VM whose image is cached: no byte is copied.
    accepted_to_image: Milliseconds,
    delete: Milliseconds,
    /// The same kernel, disks and QEMU line until the first user process.
    bare_boot: Milliseconds,
    /// Medians: creation to workload, less the bare boot. At most 100.
    difference_ms: f64,
    /// Creation to workload over the bare boot, medians.
    ratio: f64,
    /// API writes for one VM to Running, its own creation left out. At most 6.
    writes_per_vm: f64,
    writes_by_resource: BTreeMap<String, u64>,
    idle_seconds: u64,
    /// Leases left out. None.
    idle_writes: BTreeMap<String, u64>,
    /// MiB resident, with one VM and with more.
    rss_mib: BTreeMap<&'static str, Memory>,
}

#[derive(Serialize)]
struct Memory {
    /// With the one VM of the example.
    idle: f64,
    /// On top for each further VM.
    per_vm: f64,
}

/// Runs it and writes `target/bench/startup.json`.
///
/// # Errors
/// When the cluster can't be started or a VM does not come to Running.
pub(crate) fn run(options: &Options) -> Result<()> {
    let programs = programs::build()?;
    let boot = boot::ensure(&programs.path("imp-guest"))?;
    let dev = Dev::up(&["--light"])?;
    let runtime = tokio::runtime::Runtime::new().context("start the async runtime")?;
    let report_of = runtime.block_on(measure(options, &dev, &programs.path("imp-guest"), &boot.kernel))?;
    dev.down()?;
    report("startup", &report_of)
}

async fn measure(options: &Options, dev: &Dev, guest: &Utf8Path, kernel: &Utf8Path) -> Result<Report> {
    let client = dev.client().await?;
    let api: Api<ImpVM> = Api::default_namespaced(client.clone());
    let channel = unix::connect(dev.node_root(1)?.join("run/imp/runtime.sock")).await?;
    let node_runtime = RuntimeClient::new(channel);
    let bare = Bare::new(guest, kernel, &image_disk(&dev.node_data(1))?)?;

    eprintln!("memory, and {} idle seconds", options.idle_seconds);
    tokio::time::sleep(Duration::from_secs(20)).await;
    let idle_memory = memory(dev)?;
    let before = writes::count(&client).await?;
    tokio::time::sleep(Duration::from_secs(options.idle_seconds)).await;
    let idle_writes = writes::since(&before, &writes::count(&client).await?);

    // Bare boots and VMs in turn, so that whatever else the machine does falls on both.
    let (mut all, mut deletes, mut boots) = (Vec::new(), Vec::new(), Vec::new());
    let mut written: BTreeMap<String, u64> = BTreeMap::new();
    for n in 0..options.vms {
        let name = format!("bench-{n}");
        let count = writes::count(&client).await?;
        all.push(steps::create(&api, &node_runtime, &name).await?);
        for (resource, more) in writes::since(&count, &writes::count(&client).await?) {
            *written.entry(resource).or_default() += more;
        }
        deletes.push(steps::delete(&api, &name).await?);
        boots.push(bare.boot(MEMORY_MIB).await?);
        eprintln!("VM {} of {}: {:?}, bare boot {:?}", n + 1, options.vms, all[n].workload, boots[n]);
    }

    let names: Vec<String> = (0..TOGETHER).map(|n| format!("memory-{n}")).collect();
    for name in &names {
        steps::create(&api, &node_runtime, name).await?;
    }
    tokio::time::sleep(Duration::from_secs(20)).await;
    let full_memory = memory(dev)?;
    for name in &names {
        steps::delete(&api, name).await?;
    }

    let bare_boot = Milliseconds::of(&boots);
    let workload = Milliseconds::of(&series(&all, |s| s.workload));
    let creations = options.vms as u64;
    let total: u64 = written.values().sum::<u64>().saturating_sub(creations);
    Ok(Report {
        vms: options.vms,
        since_creation: BTreeMap::from([
            ("1 bound", Milliseconds::of(&series(&all, |s| s.bound))),
            ("2 agent", Milliseconds::of(&series(&all, |s| s.agent))),
            ("3 vmm started", Milliseconds::of(&series(&all, |s| s.vmm))),
            ("4 guest connected", Milliseconds::of(&series(&all, |s| s.guest))),
            ("5 workload started", workload),
            ("6 object Running", Milliseconds::of(&series(&all, |s| s.running))),
        ]),
        accepted_to_vmm: Milliseconds::of(&series(&all, |s| s.vmm - s.agent)),
        accepted_to_image: Milliseconds::of(&series(&all, |s| s.image - s.agent)),
        delete: Milliseconds::of(&deletes),
        bare_boot,
        difference_ms: round(workload.p50 - bare_boot.p50),
        ratio: round(workload.p50 / bare_boot.p50),
        writes_per_vm: round(total as f64 / options.vms.max(1) as f64),
        writes_by_resource: written,
        idle_seconds: options.idle_seconds,
        idle_writes,
        rss_mib: idle_memory
            .iter()
            .map(|(name, idle)| {
                let full = full_memory.get(name).copied().unwrap_or_default();
                (*name, Memory { idle: round(*idle), per_vm: round((full - idle) / TOGETHER as f64) })
            })
            .collect(),
    })
}

fn series(all: &[Steps], step: impl Fn(&Steps) -> Duration) -> Vec<Duration> {
    all.iter().map(step).collect()
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// MiB that each of our programs has resident.
fn memory(dev: &Dev) -> Result<BTreeMap<&'static str, f64>> {
    let mut found = BTreeMap::new();
    for program in ["imp-operator", "imp-agent", "imp-runtime"] {
        let pid = *dev.pids(program)?.first().with_context(|| format!("{program} does not run"))?;
        let path = format!("/proc/{}/status", pid.as_raw_nonzero());
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib: f64 = line
            .and_then(|l| l.trim().strip_suffix("kB")?.trim().parse().ok())
            .with_context(|| format!("{path} has no VmRSS"))?;
        found.insert(program, kib / 1024.0);
    }
    Ok(found)
}

/// The root disk of the example's image, the only one on the node.
fn image_disk(data: &Utf8Path) -> Result<Utf8PathBuf> {
    let dir = data.join("images/disks");
    let mut disks = dir.read_dir_utf8().with_context(|| format!("read {dir}"))?.flatten();
    let disk = disks.find(|entry| entry.path().extension() == Some("img"));
    Ok(disk.with_context(|| format!("there is no root disk of an image in {dir}"))?.into_path())
}
