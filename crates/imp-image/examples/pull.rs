//! `pull STORE IMAGE`: makes an image's disk in a store of its own, twice, and prints as JSON how long that took, in milliseconds, and the
//! most memory that was resident, in KiB, of this process and its converter together. `cargo xtask bench image` runs it, and tests do. The converter
//! becomes the user of the environment variable `USER_ID`, by default 65534.
#![allow(clippy::print_stdout, reason = "a program")]
#![allow(unsafe_code, reason = "getrusage has no safe form in what is used otherwise")]

use imp_image::{
    Converter, EnsureRequest, ImageStore, Progress, PullPolicy, StoreOptions, host_architecture,
};
use std::error::Error;
use std::os::unix::fs::MetadataExt as _;
use std::process::ExitCode;
use std::time::Instant;
use tokio::sync::watch;

fn main() -> ExitCode {
    if let Some(code) = imp_image::converter::run_if_asked() {
        return code;
    }
    match pull() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut cause: Option<&dyn Error> = Some(&*error);
            while let Some(error) = cause {
                eprintln!("{error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

/// Most memory that a child had resident, in KiB.
fn peak_of_children() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to memory of the right type, which all zeros are a value of.
    unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init().ru_maxrss
    }
}

#[tokio::main]
async fn pull() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(root), Some(image)) = (arguments.next(), arguments.next()) else {
        return Err("usage: pull STORE IMAGE".into());
    };
    let user = std::env::var("USER_ID").ok().and_then(|id| id.parse().ok()).unwrap_or(65534);
    let options = StoreOptions { converter: Converter::Process { user }, ..Default::default() };
    let store = ImageStore::open_with(root.as_str().into(), options)?;
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
        peak.ok_or("no VmHWM in /proc/self/status")?.parse::<i64>()? + peak_of_children(),
        a.blocks() * 512,
    );
    Ok(())
}
