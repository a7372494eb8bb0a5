//! Startup, readiness and liveness, with the kubelet's rules: the startup probe holds the others back; a result is told
//! when it changes, a failure after `failure_threshold` in a row.

use crate::vm::{Guest, Vm};
use imp_image::RootDisk;
use imp_proto::v1::{self as pb, probe::Check};
use std::time::Duration;
use tokio::{sync::mpsc, task::JoinSet};

/// Which probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Startup,
    Readiness,
    Liveness,
}

/// A result that differs from the one before.
#[derive(Debug)]
pub(super) struct Change {
    kind: Kind,
    result: pb::ProbeResult,
}

/// What a VM is asked: its own probes, and the image's HEALTHCHECK as readiness probe where it has none.
pub(super) fn of(spec: &pb::VmSpec, image: Option<&RootDisk>) -> pb::Probes {
    let mut probes = spec.probes.clone().unwrap_or_default();
    if let Some(check) =
        image.and_then(|image| image.healthcheck.as_ref()).filter(|_| probes.readiness.is_none())
    {
        let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX).max(1);
        probes.readiness = Some(pb::Probe {
            check: Some(Check::Exec(pb::ExecCheck { command: check.command.clone() })),
            initial_delay_seconds: 0,
            period_seconds: seconds(check.interval),
            timeout_seconds: seconds(check.timeout),
            failure_threshold: check.retries,
        });
    }
    probes
}

/// Says that a VM is not ready before the image's HEALTHCHECK was asked. Of a probe of its own whoever made the VM knows.
pub(super) fn expect(vm: &Vm, probes: &pb::Probes) {
    let own = vm.spec().probes.is_some_and(|own| own.readiness.is_some());
    let asked = vm.status().probes.is_some_and(|seen| seen.readiness.is_some());
    if probes.readiness.is_some() && !own && !asked {
        let message = "the image's HEALTHCHECK has not succeeded yet".to_owned();
        apply(vm, Change { kind: Kind::Readiness, result: pb::ProbeResult { success: false, message } });
    }
}

/// Runs probes until the set is dropped.
pub(super) fn start(set: &mut JoinSet<()>, probes: pb::Probes, client: &Guest, told: mpsc::Sender<Change>) {
    let client = client.clone();
    set.spawn(async move {
        if let Some(probe) = &probes.startup
            && run(Kind::Startup, probe, &client, &told, true).await.is_none()
        {
            return;
        }
        let one = |kind, probe: Option<pb::Probe>| {
            let (client, told) = (&client, &told);
            async move {
                if let Some(probe) = probe {
                    run(kind, &probe, client, told, false).await;
                }
            }
        };
        tokio::join!(one(Kind::Readiness, probes.readiness), one(Kind::Liveness, probes.liveness));
    });
}

/// Probes until nobody listens (`None`), or the first success where that is enough.
async fn run(
    kind: Kind,
    probe: &pb::Probe,
    client: &Guest,
    told: &mpsc::Sender<Change>,
    until_success: bool,
) -> Option<()> {
    tokio::time::sleep(seconds(probe.initial_delay_seconds, 0)).await;
    let mut period = tokio::time::interval(seconds(probe.period_seconds, 10));
    let (mut failures, mut last) = (0u32, None);
    loop {
        period.tick().await;
        let result = check(probe, client.clone()).await?;
        failures = if result.success { 0 } else { failures + 1 };
        let counts = result.success || failures >= probe.failure_threshold.max(1);
        let success = result.success;
        if counts && last != Some(success) {
            last = Some(success);
            told.send(Change { kind, result }).await.ok()?;
        }
        if success && until_success {
            return Some(());
        }
    }
}

fn seconds(value: u32, default: u32) -> Duration {
    Duration::from_secs(u64::from(if value == 0 { default } else { value }))
}

/// One try; `None` when the channel broke, which says nothing about the workload.
async fn check(probe: &pb::Probe, mut client: Guest) -> Option<pb::ProbeResult> {
    let timeout = seconds(probe.timeout_seconds, 1);
    let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    let answer = match probe.check.clone() {
        Some(Check::Exec(exec)) => {
            let request = pb::ExecCheckRequest { argv: exec.command, timeout_milliseconds: milliseconds };
            client.exec_check(request).await
        }
        Some(Check::Http(http)) => {
            let request =
                pb::HttpCheckRequest { port: http.port, path: http.path, timeout_milliseconds: milliseconds };
            client.http_check(request).await
        }
        None => return None,
    };
    match answer {
        Ok(answer) => {
            let answer = answer.into_inner();
            let message = answer.message.chars().take(1024).collect();
            Some(pb::ProbeResult { success: answer.success, message })
        }
        Err(status) if status.code() == tonic::Code::Unavailable => None,
        Err(status) => Some(pb::ProbeResult { success: false, message: status.message().to_owned() }),
    }
}

/// Tells a result. A liveness probe shows as condition Healthy and never ends the VM by itself (API of the probes).
pub(super) fn apply(vm: &Vm, change: Change) {
    vm.update(|status| {
        let probes = status.probes.get_or_insert_default();
        let place = match change.kind {
            Kind::Startup => &mut probes.startup,
            Kind::Readiness => &mut probes.readiness,
            Kind::Liveness => &mut probes.liveness,
        };
        *place = Some(change.result);
    });
}
