//! The conversation with a guest: configure it, listen to it, stop it. What it says is its word, bounded in size and time.

use super::{Outcome, failure::Fault, probes};
use crate::{
    journal::Progress,
    vm::{Guest, Secrets, Vm, now},
};
use hyper_util::rt::TokioIo;
use imp_image::{RootDisk, WorkloadOverrides, runtime_config};
use imp_killpoint::runtime as killpoint;
use imp_proto::{
    channel::{NONCE_LEN, client_hello},
    v1::{self as pb, FailureReason, guest_client::GuestClient},
};
use imp_vmm::Instance;
use std::{io, time::Duration};
use tokio::task::JoinSet;
use tonic::transport::Endpoint;

/// The guest mounts, sets up its network and starts the workload in this time.
const CONFIGURE: Duration = Duration::from_secs(120);
/// Answers that need no work.
const ANSWER: Duration = Duration::from_secs(10);
/// For the workload's last output to arrive after its end.
const DRAIN: Duration = Duration::from_secs(5);
/// Between two looks at what the guest uses.
const USAGE: Duration = Duration::from_secs(15);
/// A guest that answers no ping for so long is dead or hangs (fr37: a read that never returns).
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(60));

/// Opens the channel and says hello. The caller sets the deadline.
pub(super) async fn connect(instance: &dyn Instance) -> Result<Guest, Fault> {
    let fault = |text: String| Fault::new(FailureReason::GuestUnreachable, text);
    let mut stream =
        instance.connect_guest().await.map_err(|e| Fault::of(FailureReason::GuestUnreachable, &e))?;
    let mut nonce = [0; NONCE_LEN];
    random(&mut nonce).map_err(|e| fault(e.to_string()))?;
    client_hello(&mut stream, nonce).await.map_err(|e| Fault::of(FailureReason::GuestUnreachable, &e))?;
    let mut once = Some(TokioIo::new(stream));
    let channel = Endpoint::from_static("http://guest.imp")
        .http2_keep_alive_interval(KEEP_ALIVE.0)
        .keep_alive_timeout(KEEP_ALIVE.1)
        .keep_alive_while_idle(true)
        .connect_with_connector(tower::service_fn(move |_| {
            // A broken channel begins anew with a hello, never with a second connection of the same client.
            let stream = once.take().ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionReset));
            async move { stream }
        }))
        .await
        .map_err(|e| Fault::of(FailureReason::GuestUnreachable, &e))?;
    Ok(GuestClient::new(channel))
}

fn random(bytes: &mut [u8]) -> io::Result<()> {
    let n = rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty())?;
    if n < bytes.len() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

/// A stop before the guest could be talked to: the VMM is killed.
pub(super) fn kill_wish(vm: &Vm) -> Outcome {
    vm.status().exit.map_or(Outcome::Stopped, Outcome::Exited)
}

/// Serves one connection. `None`: it broke, and the VM goes on.
pub(super) async fn serve(vm: &Vm, client: Guest, image: Option<&RootDisk>) -> Option<Outcome> {
    let asked = probes::of(&vm.spec(), image);
    // Before it can be told as running.
    probes::expect(vm, &asked);
    let configured = matches!(vm.record().attempt.map(|a| a.progress), Some(Progress::Configured(_)));
    if !configured {
        let result = tokio::select! {
            result = configure(vm, client.clone(), image) => result,
            () = vm.must_stop() => return Some(kill_wish(vm)),
        };
        match result {
            Ok(()) => {}
            Err(Broken::Channel) => return None,
            Err(Broken::Fault(fault)) => return Some(Outcome::Failed(fault)),
        }
    }
    let mut helpers = JoinSet::new();
    let output = {
        let first = match vm.log.open(vm.status().attempt) {
            Ok(sequence) => sequence,
            Err(e) => {
                return Some(Outcome::Failed(Fault::new(
                    FailureReason::DiskFailed,
                    format!("cannot write the log: {e}"),
                )));
            }
        };
        pump_output(vm, client.clone(), first)
    };
    tokio::pin!(output);
    let mut drained = false;
    let (told, mut results) = tokio::sync::mpsc::channel(8);
    probes::start(&mut helpers, asked, &client, told);
    let mut usage = tokio::time::interval_at(tokio::time::Instant::now() + USAGE, USAGE);
    let mut events = match client.clone().watch(pb::GuestWatchRequest {}).await {
        Ok(events) => events.into_inner(),
        Err(_) => return None,
    };
    loop {
        tokio::select! {
            () = &mut output, if !drained => drained = true,
            event = events.message() => {
                let Ok(Some(event)) = event else { return None };
                let Some(outcome) = hear(vm, event) else { continue };
                if !drained {
                    let _ = tokio::time::timeout(DRAIN, &mut output).await;
                }
                return Some(exited(vm, client, outcome).await);
            }
            () = vm.must_stop() => {
                let stopping = stop(vm, client.clone());
                tokio::pin!(stopping);
                let outcome = loop {
                    tokio::select! {
                        outcome = &mut stopping => break outcome,
                        () = &mut output, if !drained => drained = true,
                    }
                };
                if !drained {
                    let _ = tokio::time::timeout(DRAIN, &mut output).await;
                }
                killpoint("stopped");
                return Some(exited(vm, client, outcome).await);
            }
            Some(change) = results.recv() => probes::apply(vm, change),
            _ = usage.tick() => sample(vm, client.clone()).await,
        }
    }
}

enum Broken {
    Channel,
    Fault(Fault),
}

/// Gives the guest its identity and starts the workload.
async fn configure(vm: &Vm, mut client: Guest, image: Option<&RootDisk>) -> Result<(), Broken> {
    vm.update(|status| status.state = pb::VmState::Configuring.into());
    let Some(image) = image else {
        let text = "the VM's image is gone from the node's store";
        return Err(Broken::Fault(Fault::new(FailureReason::DiskFailed, text)));
    };
    let secrets = vm.secrets().await;
    let request = request(vm, image, secrets.as_deref()).map_err(Broken::Fault)?;
    let answer = tokio::time::timeout(CONFIGURE, client.configure(request)).await;
    let answer = match answer {
        Err(_) => {
            let text = format!("the guest did not start the workload within {} s", CONFIGURE.as_secs());
            return Err(Broken::Fault(Fault::new(FailureReason::GuestConfigureFailed, text)));
        }
        Ok(Err(status)) if broken(&status) => return Err(Broken::Channel),
        Ok(Err(status)) => {
            return Err(Broken::Fault(Fault::new(FailureReason::GuestConfigureFailed, status.message())));
        }
        Ok(Ok(answer)) => answer.into_inner().result,
    };
    killpoint("configured");
    match answer {
        Some(pb::configure_response::Result::Started(_)) => running(vm).map_err(Broken::Fault),
        Some(pb::configure_response::Result::Failed(failed)) => Err(Broken::Fault(configure_fault(&failed))),
        None => {
            Err(Broken::Fault(Fault::new(FailureReason::GuestConfigureFailed, "the guest gave no answer")))
        }
    }
}

fn configure_fault(failed: &pb::ConfigureFailure) -> Fault {
    let reason = match failed.reason() {
        FailureReason::WorkloadStartFailed => FailureReason::WorkloadStartFailed,
        _ => FailureReason::GuestConfigureFailed,
    };
    Fault { exit_code: failed.exit_code, ..Fault::new(reason, failed.message.clone()) }
}

/// The channel failed, and not the call.
fn broken(status: &tonic::Status) -> bool {
    matches!(status.code(), tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled)
}

/// The workload's exec succeeded.
fn running(vm: &Vm) -> Result<(), Fault> {
    let record = vm.record().attempt.map(|a| a.progress);
    let (Some(Progress::Launched(process) | Progress::Configured(process)), started) = (record, now()) else {
        return Err(Fault::new(FailureReason::Internal, "a guest was configured that was never launched"));
    };
    vm.update(|status| {
        status.state = pb::VmState::Running.into();
        status.failure = None;
        status.timings.get_or_insert_default().workload_started.get_or_insert(started);
    });
    vm.progress(Progress::Configured(process))?;
    killpoint("running-journaled");
    tracing::info!("the workload runs");
    Ok(())
}

fn request(vm: &Vm, image: &RootDisk, secrets: Option<&Secrets>) -> Result<pb::ConfigureRequest, Fault> {
    let spec = vm.spec();
    let workload = spec.workload.clone().unwrap_or_default();
    let above = secrets.map(|s| s.0.env.clone()).filter(|env| !env.is_empty()).unwrap_or(workload.env);
    let config = runtime_config(
        &image.config,
        &WorkloadOverrides {
            command: workload.command,
            args: workload.args,
            env: above.into_iter().map(|e| (e.name, e.value)).collect(),
            working_dir: workload.working_dir,
            user: workload.user,
        },
    );
    if config.argv.is_empty() {
        let text = "neither the image nor the VM names a program: set spec.command";
        return Err(Fault::new(FailureReason::WorkloadStartFailed, text));
    }
    let mut entropy = vec![0; 64];
    random(&mut entropy).map_err(|e| Fault::new(FailureReason::Internal, format!("getrandom(2): {e}")))?;
    let read_only = spec.root_disk.is_some_and(|r| r.read_only);
    let name = spec.vm.clone().unwrap_or_default().name;
    Ok(pb::ConfigureRequest {
        attempt_id: format!("{}/{}", vm.uid, vm.status().attempt),
        hostname: if workload.hostname.is_empty() { name } else { workload.hostname },
        time: Some(now()),
        entropy: entropy.into(),
        network: spec.network.as_ref().map(network),
        mounts: Vec::new(),
        workload: Some(pb::GuestWorkload {
            argv: config.argv,
            env: config.env.into_iter().map(|(name, value)| pb::EnvVar { name, value }).collect(),
            working_dir: config.working_dir,
            user: config.user,
            stop_signal: config.stop_signal,
            stdin: workload.stdin,
            tty: workload.tty,
            size: workload.size,
        }),
        root: Some(pb::GuestRoot { base_fs_type: image.fs_type.to_owned(), overlay: !read_only, read_only }),
    })
}

fn network(network: &pb::Network) -> pb::GuestNetwork {
    let (mut dns, mut search) = (network.dns.clone(), network.search.clone());
    if dns.is_empty() {
        // fr10: never the host's loopback resolver; none at all is no error (fr12).
        let (servers, domains) = imp_net::host_resolvers();
        dns = servers.iter().map(ToString::to_string).collect();
        search = domains;
    }
    pb::GuestNetwork {
        mac: network.mac.clone(),
        address: network.address.clone(),
        gateway: network.gateway.clone(),
        dns,
        search,
        mtu: network.mtu,
    }
}

/// Carries the workload's output to the log until it ends or the channel breaks.
async fn pump_output(vm: &Vm, mut client: Guest, first: u64) {
    let Ok(output) = client.output(pb::OutputRequest { from_sequence: first }).await else { return };
    let mut output = output.into_inner();
    while let Ok(Some(chunk)) = output.message().await {
        if chunk.end {
            return;
        }
        if let Err(error) = vm.log.append(&chunk) {
            tracing::error!(%error, "output is lost: the log cannot be written");
        }
    }
}

/// What an event means; `Some` ends the attempt.
fn hear(vm: &Vm, event: pb::GuestEvent) -> Option<Outcome> {
    vm.update(|status| {
        let guest = status.guest.get_or_insert_default();
        guest.agent_version = event.agent_version.chars().take(64).collect();
        guest.kernel = event.kernel.chars().take(128).collect();
    });
    if let Some(failed) = event.failed {
        return Some(Outcome::Failed(configure_fault(&failed)));
    }
    event.exit.map(Outcome::Exited)
}

/// The workload ended: that is on disk before the guest is told to go.
async fn exited(vm: &Vm, mut client: Guest, outcome: Outcome) -> Outcome {
    if let Outcome::Exited(exit) = &outcome {
        vm.update(|status| {
            status.exit = Some(pb::WorkloadExit {
                started_at: exit.started_at.or_else(|| status.timings.and_then(|t| t.workload_started)),
                finished_at: exit.finished_at.or_else(|| Some(now())),
                ..exit.clone()
            });
            status.state = pb::VmState::Stopping.into();
        });
        if let Err(error) = vm.journal(|_| {}) {
            tracing::error!(%error, "the exit cannot be journaled");
        }
        killpoint("exit-journaled");
    }
    // The guest syncs its disk and powers off; one that does not is killed by who waits for the VMM.
    let _ = tokio::time::timeout(ANSWER, client.power_off(pb::PowerOffRequest {})).await;
    match outcome {
        Outcome::Exited(exit) => Outcome::Exited(vm.status().exit.unwrap_or(exit)),
        other => other,
    }
}

/// Stop signal, grace period, SIGKILL, all in the guest; more than that time is not given.
async fn stop(vm: &Vm, mut client: Guest) -> Outcome {
    vm.update(|status| status.state = pb::VmState::Stopping.into());
    let grace = Duration::from_secs(u64::from(vm.grace_seconds()));
    let milliseconds = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
    let request = pb::StopRequest { grace_milliseconds: milliseconds };
    match tokio::time::timeout(grace + ANSWER, client.stop(request)).await {
        Ok(Ok(answer)) => answer.into_inner().exit.map_or(Outcome::Stopped, Outcome::Exited),
        _ => kill_wish(vm),
    }
}

async fn sample(vm: &Vm, mut client: Guest) {
    if let Ok(Ok(answer)) = tokio::time::timeout(ANSWER, client.usage(pb::UsageRequest {})).await {
        vm.update(|status| status.usage = answer.into_inner().usage);
    }
}
