//! `pull STORE IMAGE`: makes an image's disk in a store of its own, twice, and prints as JSON how long that took, in milliseconds, and the
//! most memory that was resident, in KiB. `cargo xtask bench image` runs it.
#![allow(clippy::print_stdout, reason = "a program")]

use imp_image::{EnsureRequest, ImageStore, Progress, PullPolicy, host_architecture};
use std::error::Error;
use std::os::unix::fs::MetadataExt as _;
use std::time::Instant;
use tokio::sync::watch;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(root), Some(image)) = (arguments.next(), arguments.next()) else {
        return Err("usage: pull STORE IMAGE".into());
    };
    let store = ImageStore::open(root.as_str().into())?;
    let request = EnsureRequest {
        source: image.parse()?,
        policy: PullPolicy::IfNotPresent,
        architecture: host_architecture().to_owned(),
        docker_config_json: Vec::new(),
    };
    let start = Instant::now();
    let disk = store.ensure(&request, watch::channel(Progress::default()).0).await?;
    let first = start.elapsed();
    let start = Instant::now();
    let again = store.ensure(&request, watch::channel(Progress::default()).0).await?;
    let second = start.elapsed();
    let (a, b) = (std::fs::metadata(&disk.path)?, std::fs::metadata(&again.path)?);
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    println!(
        r#"{{"milliseconds": {:.1}, "second_milliseconds": {:.3}, "second_copies": {}, "peak_kib": {}, "disk_bytes": {}}}"#,
        first.as_secs_f64() * 1000.0,
        second.as_secs_f64() * 1000.0,
        a.ino() != b.ino(),
        peak.ok_or("no VmHWM in /proc/self/status")?,
        a.blocks() * 512,
    );
    Ok(())
}
