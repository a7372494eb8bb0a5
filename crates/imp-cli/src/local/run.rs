//! `imp run`.

use super::{
    args::{Paths, RunArgs},
    client, network, spec, streams,
};
use crate::{exit, terminal};
use imp_proto::v1::{self as pb, runtime_client::RuntimeClient, watch_vms_response::Event};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;
use tonic::transport::Channel;

/// Starts one VM, joins it to the terminal, and returns the workload's exit code.
pub(super) async fn run(paths: &Paths, args: Box<RunArgs>) -> anyhow::Result<u8> {
    let mut client = client::connect(paths).await?;
    let vm = put(&mut client, paths, &args).await?;
    let ended = wait_started(&mut client, &vm, &args.image).await?;
    if let Some(status) = ended.filter(|s| s.state() == pb::VmState::Failed || hopeless(s)) {
        return failed(&mut client, &vm, &args, &status).await;
    }
    if args.detach {
        println!("{}", vm.name);
        return Ok(0);
    }
    let status = attach(&mut client, &vm, &args).await;
    if args.rm {
        super::stop::remove(&mut client, &vm).await?;
    }
    let status = status?;
    if !status.message.is_empty() {
        eprintln!("imp: {}", status.message);
    }
    Ok(exit::code(&status))
}

/// Chooses name and address under a lock and tells the runtime.
async fn put(
    client: &mut RuntimeClient<Channel>,
    paths: &Paths,
    args: &RunArgs,
) -> anyhow::Result<pb::VmRef> {
    let run_dir = paths.run_dir.clone();
    let lock = tokio::task::spawn_blocking(move || network::lock(&run_dir)).await??;
    let vms = client::list(client).await?;
    let uid = new_uid()?;
    let name = args.name.clone().unwrap_or_else(|| format!("imp-{}", &uid[..8]));
    anyhow::ensure!(
        valid_name(&name),
        "{name:?} is no VM name: letters, digits and '-', at most 63, no '-' at an end"
    );
    if let Some(other) = vms.iter().find(|vm| vm.name() == name) {
        let state = if other.ended() { "has ended" } else { "is running" };
        anyhow::bail!("a VM called {name:?} is there already and {state}: `imp rm {name}` removes it");
    }
    for port in &args.publish {
        let taken = vms.iter().filter(|vm| !vm.ended()).find(|vm| publishes(&vm.spec, port));
        if let Some(vm) = taken {
            anyhow::bail!("port {} of this machine leads to {} already", port.host_port, vm.name());
        }
    }
    let specs: Vec<pb::VmSpec> = vms.into_iter().map(|vm| vm.spec).collect();
    let reservation = network::reserve(lock, &specs)?;
    let vm = pb::VmRef { uid, namespace: "local".to_owned(), name };
    let spec = spec::build(args, vm.clone(), reservation.network(args.publish.clone()), &|name| {
        std::env::var(name).ok()
    })?;
    client.put_vm(pb::PutVmRequest { spec: Some(spec), secrets: None }).await.map_err(client::failure)?;
    Ok(vm)
}

fn publishes(spec: &pb::VmSpec, port: &pb::PortForward) -> bool {
    spec.network.iter().flat_map(|n| &n.ports).any(|p| {
        p.host_port == port.host_port
            && p.protocol == port.protocol
            && (p.host_ip == port.host_ip || p.host_ip.is_empty() || port.host_ip.is_empty())
    })
}

/// A random (version 4) UUID, RFC 9562.
fn new_uid() -> anyhow::Result<String> {
    let mut b = [0u8; 16];
    rustix::rand::getrandom(&mut b, rustix::rand::GetRandomFlags::empty())?;
    b[6] = (b[6] & 0x0f) | 0x40;
    b[8] = (b[8] & 0x3f) | 0x80;
    let hex: String = b.iter().map(|x| format!("{x:02x}")).collect();
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}

/// A name that is a hostname too (RFC 1123 label).
fn valid_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Shows progress until the workload runs (`None`) or the VM has ended (its last status).
async fn wait_started(
    client: &mut RuntimeClient<Channel>,
    vm: &pb::VmRef,
    image: &str,
) -> anyhow::Result<Option<pb::VmStatus>> {
    let mut events = client.watch_vms(pb::WatchVmsRequest {}).await.map_err(client::failure)?.into_inner();
    let progress = ProgressBar::new_spinner();
    progress.enable_steady_tick(Duration::from_millis(120));
    let result = loop {
        let Some(event) = events.message().await.map_err(client::failure)? else {
            anyhow::bail!("the local runtime went away while {} started: try again", vm.name);
        };
        match event.event {
            Some(Event::Vm(status)) if status.vm.as_ref().is_some_and(|v| v.uid == vm.uid) => {
                if status.state() == pb::VmState::Running {
                    break None;
                }
                if client::ended(&status) || hopeless(&status) {
                    break Some(status);
                }
                show(&progress, &status, image);
            }
            Some(Event::Removed(uid)) if uid == vm.uid => {
                anyhow::bail!("{} was removed while it started", vm.name)
            }
            _ => {}
        }
    };
    progress.finish_and_clear();
    Ok(result)
}

/// A node tries such an image again (somebody may push it, or mend the secret); a person at a terminal wants to know now.
fn hopeless(status: &pb::VmStatus) -> bool {
    use pb::FailureReason::{ImageNotFound, ImagePullUnauthorized};
    status.failure.as_ref().is_some_and(|f| matches!(f.reason(), ImageNotFound | ImagePullUnauthorized))
}

fn show(progress: &ProgressBar, status: &pb::VmStatus, image: &str) {
    let retrying = status.failure.as_ref().filter(|f| f.retrying).map(|f| format!(" ({})", f.message));
    let retrying = retrying.unwrap_or_default();
    let image_status = status.image.clone().unwrap_or_default();
    if status.state() == pb::VmState::Pulling && image_status.total_bytes > 0 {
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {bytes}/{total_bytes}") {
            progress.set_style(style);
        }
        progress.set_length(image_status.total_bytes);
        progress.set_position(image_status.pulled_bytes);
    } else {
        progress.set_style(ProgressStyle::default_spinner());
    }
    let doing = match status.state() {
        pb::VmState::Pulling => format!("Pulling {image}"),
        pb::VmState::Preparing => "Preparing disk and network".to_owned(),
        pb::VmState::Booting => "Booting".to_owned(),
        pb::VmState::Configuring => "Configuring".to_owned(),
        _ => "Starting".to_owned(),
    };
    progress.set_message(format!("{doing}{retrying}"));
}

/// Says why the VM did not start; docker's exit codes for it.
async fn failed(
    client: &mut RuntimeClient<Channel>,
    vm: &pb::VmRef,
    args: &RunArgs,
    status: &pb::VmStatus,
) -> anyhow::Result<u8> {
    let failure = status.failure.clone().unwrap_or_default();
    eprintln!("imp: {}: {}", vm.name, failure.message);
    if args.rm || hopeless(status) {
        super::stop::remove(client, vm).await?;
    }
    if failure.reason() != pb::FailureReason::WorkloadStartFailed {
        return Ok(exit::IMP_FAILED);
    }
    Ok(u8::try_from(failure.exit_code).ok().filter(|c| *c != 0).unwrap_or(exit::NOT_FOUND))
}

async fn attach(
    client: &mut RuntimeClient<Channel>,
    vm: &pb::VmRef,
    args: &RunArgs,
) -> anyhow::Result<pb::ExitStatus> {
    let _raw = if args.tty && args.interactive { Some(terminal::RawMode::enter()?) } else { None };
    let start = pb::ExecStart {
        vm: Some(vm.clone()),
        stdin: args.interactive,
        stdout: true,
        stderr: !args.tty,
        tty: args.tty,
        size: streams::terminal_size(args.tty),
        ..Default::default()
    };
    let mut attaching = client.clone();
    streams::pump(start, |requests| async move { attaching.attach(requests).await }).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_hostnames() {
        for good in ["a", "web-1", "X"] {
            assert!(valid_name(good), "{good}");
        }
        for bad in ["", "-a", "a-", "a.b", "ä", &"x".repeat(64)] {
            assert!(!valid_name(bad), "{bad}");
        }
    }

    #[test]
    fn uids_are_version_4_uuids() {
        let uid = new_uid().unwrap();
        assert_eq!((uid.len(), &uid[14..15]), (36, "4"));
        assert_ne!(uid, new_uid().unwrap());
    }
}
