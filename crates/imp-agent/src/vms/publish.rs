//! Writes a VM's status and records its events, when they are news.

use imp_api::{ImpVM, ImpVMStatus, VMPhase};
use imp_core::phase::{self, Blocked, Facts, Observation};
use imp_proto::v1;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use tokio::time::Instant;

use super::reconcile::{Outcome, View};
use super::{Effective, Memory};
use crate::context::Context;
use crate::{observe, spec, status};

/// Marks and explains the report that the agent makes up for a VM that the runtime lost.
pub(super) const LOST: &str = "The node's runtime does not know this VM any more: its state under /var/lib/imp/vms was removed. \
                               What the VM wrote is lost; delete it and create it again";

/// The runtime's report in the decider's terms.
pub(super) fn report_of(status: &v1::VmStatus) -> phase::Report {
    let mut report = observe::report(status);
    if let Some(failure) = report.failure.as_mut().filter(|failure| failure.message == LOST) {
        failure.reason = phase::FailureReason::VmLost;
    }
    report
}

/// The object says that its attempt is over.
pub(super) fn is_over(vm: &ImpVM) -> bool {
    let phase = vm.status.as_ref().and_then(|status| status.phase);
    matches!(phase, Some(VMPhase::Succeeded | VMPhase::Failed | VMPhase::RetryExhausted))
}

/// The object says that its attempt ran on this node.
pub(super) fn was_running(vm: &ImpVM) -> bool {
    vm.status.as_ref().and_then(|status| status.phase) == Some(VMPhase::Running)
}

fn facts(vm: &ImpVM, report: Option<&v1::VmStatus>, effective: Option<&Effective>) -> Facts {
    let probes = effective
        .map(|effective| effective.probes.clone())
        .or_else(|| vm.spec.probes.clone())
        .unwrap_or_default();
    let seen = report.and_then(|report| report.probes.clone()).unwrap_or_default();
    Facts {
        generation: vm.metadata.generation.unwrap_or_default(),
        attempt: spec::attempt(vm),
        persistent: vm.spec.lifecycle == imp_api::VMLifecycle::Persistent,
        deleting: vm.metadata.deletion_timestamp.is_some(),
        image: effective
            .map(|effective| effective.image.clone())
            .or_else(|| vm.spec.image.clone())
            .unwrap_or_default(),
        has_network: vm.status.as_ref().is_some_and(|status| status.ip.is_some()),
        has_startup_probe: probes.startup_probe.is_some() || seen.startup.is_some(),
        has_readiness_probe: probes.readiness_probe.is_some() || seen.readiness.is_some(),
        has_liveness_probe: probes.liveness_probe.is_some() || seen.liveness.is_some(),
    }
}

/// Writes the status if it is news. `released`: the object is being deleted, and whether anything is left on the node.
pub(super) async fn publish(
    context: &Context,
    view: &View,
    vm: &ImpVM,
    released: Option<bool>,
    mut memory: Memory,
) -> Outcome {
    let now = Timestamp::now().as_second();
    let observation = view.observation(&memory).or_else(|| released.map(|_| unseen()));
    let facts = facts(vm, view.report.as_ref(), memory.effective.as_ref());
    let decision = observation.and_then(|seen| phase::decide(&seen, &facts, &status::previous(vm), now));
    let Some(decision) = decision else { return Outcome { memory, ..Outcome::default() } };
    let mut desired = status::desired(vm, &decision, view.report.as_ref());
    if let Some(released) = released {
        status::set_released(&mut desired, released, now);
    }
    if !status::is_news(vm, &desired) {
        memory.pending = None;
        return Outcome { memory, ..Outcome::default() };
    }
    let seen = memory.pending.get_or_insert_with(Instant::now).elapsed();
    let state = view.report.as_ref().map(v1::VmStatus::state);
    let wait = status::delay(vm, &desired, state, seen, memory.written.map(|at| at.elapsed()));
    // The operator waits for the release; nothing else is worth more.
    if !wait.is_zero() && released != Some(true) {
        return Outcome { memory, again: Some(wait), ..Outcome::default() };
    }
    imp_killpoint::agent("status-decided");
    match context.status.apply(vm, &desired).await {
        Ok(object) => {
            imp_killpoint::agent("status-written");
            (memory.pending, memory.written, memory.failures) = (None, Some(Instant::now()), 0);
            tell(context, vm, &desired, &mut memory).await;
            Outcome { memory, object: Some(object), again: None }
        }
        Err(error) => {
            // A conflict is answered by the newer object, which the watch brings; anything else by trying again.
            memory.failures += 1;
            let wait = super::reconcile::backoff(memory.failures);
            tracing::debug!(error = &error as &dyn std::error::Error, vm = %vm.name_any(), namespace = vm.namespace(), "the status was not written; trying again");
            Outcome { memory, again: Some(wait), ..Outcome::default() }
        }
    }
}

/// Stands in for a report when the runtime has nothing of a VM that is being deleted, or is away.
fn unseen() -> Observation {
    Observation::Blocked(Blocked { reason: "Terminating", message: "The VM is being deleted".to_owned() })
}

/// Records the event of a phase that was reached, once per attempt.
async fn tell(context: &Context, vm: &ImpVM, desired: &ImpVMStatus, memory: &mut Memory) {
    let before = vm.status.as_ref().and_then(|status| status.phase);
    if desired.phase == before {
        return;
    }
    let attempt = spec::attempt(vm);
    let message = desired.message.clone().unwrap_or_default();
    let (warning, reason) = match desired.phase {
        Some(VMPhase::Running) => (false, "Running"),
        Some(VMPhase::Succeeded) => (false, "Completed"),
        Some(VMPhase::Failed) => (true, "Failed"),
        _ => return,
    };
    if memory.told == Some((attempt, reason)) {
        return;
    }
    memory.told = Some((attempt, reason));
    let reason =
        if warning { desired.reason.clone().unwrap_or_else(|| reason.to_owned()) } else { reason.to_owned() };
    context.events.record(vm, warning, &reason, &message).await;
}
