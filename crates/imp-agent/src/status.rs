//! The agent's part of an ImpVM's status: what it should say, whether that is news, and when news is told.

use std::time::Duration;

use imp_api::{ImpVM, ImpVMStatus, VMPhase, VmUsage, VmmStatus};
use imp_core::phase::{self, Decision, Phase, Status};
use imp_proto::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// Condition that tells the operator that nothing of the VM is left on the node, so that the finalizer may go.
pub const NODE_RELEASED: &str = "NodeReleased";

/// How long the first status of a start waits for the next steps, so that one write tells them all.
const FIRST_DELAY: Duration = Duration::from_millis(300);
/// Shortest time between two writes that only tell progress of a start.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Shortest time between two writes of conditions of a running VM.
const RUNNING_INTERVAL: Duration = Duration::from_secs(1);

/// The status of `vm` as the phase decider takes it.
#[must_use]
pub fn previous(vm: &ImpVM) -> phase::Previous {
    let Some(status) = &vm.status else { return phase::Previous::default() };
    phase::Previous {
        phase: status.phase.map(VMPhase::as_str).unwrap_or_default().to_owned(),
        message: status.message.clone().unwrap_or_default(),
        conditions: status.conditions.iter().map(condition_from).collect(),
        started_at: status.started_at.as_ref().map(seconds),
        running_at: status.running_at.as_ref().map(seconds),
        finished_at: status.finished_at.as_ref().map(seconds),
        exit_code: status.exit_code,
        signal: status.signal,
    }
}

fn seconds(time: &Time) -> i64 {
    time.0.as_second()
}

fn time(seconds: i64) -> Option<Time> {
    Timestamp::from_second(seconds).ok().map(Time)
}

fn condition_from(condition: &Condition) -> phase::Condition {
    phase::Condition {
        kind: condition.type_.clone(),
        status: Status::from_name(&condition.status),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        since: seconds(&condition.last_transition_time),
        generation: condition.observed_generation.unwrap_or_default(),
    }
}

fn condition(condition: &phase::Condition) -> Condition {
    Condition {
        type_: condition.kind.clone(),
        status: condition.status.to_string(),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        last_transition_time: time(condition.since).unwrap_or(Time(Timestamp::UNIX_EPOCH)),
        observed_generation: Some(condition.generation),
    }
}

/// What the agent's part of the status should say.
#[must_use]
pub fn desired(vm: &ImpVM, decision: &Decision, report: Option<&v1::VmStatus>) -> ImpVMStatus {
    let before = vm.status.clone().unwrap_or_default();
    let vmm = report.and_then(|report| report.vmm.as_ref());
    let digest = report
        .and_then(|report| report.image.as_ref())
        .map(|image| image.digest.clone())
        .filter(|digest| !digest.is_empty());
    let exit = report.and_then(|report| report.exit.as_ref()).and_then(|exit| exit.status.as_ref());
    let ended = decision.phase.is_terminal();
    let ready = decision.conditions.iter().find(|condition| condition.kind == "Ready");
    let mut status = ImpVMStatus {
        phase: phase_name(decision.phase),
        message: Some(decision.message.clone()),
        observed_generation: vm.metadata.generation,
        exit_code: decision.exit_code,
        signal: decision.signal,
        oom_killed: exit.filter(|exit| exit.oom_killed).map(|_| true),
        reason: ready.filter(|_| ended).map(|ready| ready.reason.clone()),
        image_digest: digest,
        vmm: vmm.map(vmm_status),
        runtime_pid: vmm.filter(|_| !ended).map(|vmm| vmm.pid.into()).filter(|pid| *pid > 0),
        usage: report.and_then(|report| report.usage.as_ref()).map(usage),
        started_at: decision.started_at.and_then(time),
        running_at: decision.running_at.and_then(time),
        finished_at: decision.finished_at.and_then(time),
        conditions: decision.conditions.iter().map(condition).collect(),
        ..ImpVMStatus::default()
    };
    if report.is_none() {
        // Nothing new is known; server-side apply would remove what is left out.
        status.image_digest = before.image_digest;
        status.vmm = before.vmm;
        status.usage = before.usage;
        status.oom_killed = before.oom_killed;
        status.reason = status.reason.or(before.reason);
    }
    status
}

fn phase_name(phase: Phase) -> Option<VMPhase> {
    match phase {
        Phase::Starting => Some(VMPhase::Starting),
        Phase::Running => Some(VMPhase::Running),
        Phase::Terminating => Some(VMPhase::Terminating),
        Phase::Succeeded => Some(VMPhase::Succeeded),
        Phase::Failed => Some(VMPhase::Failed),
        Phase::Other => None,
    }
}

fn vmm_status(vmm: &v1::VmmStatus) -> VmmStatus {
    let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    VmmStatus { driver: text(&vmm.driver), version: text(&vmm.version), accelerator: text(&vmm.accelerator) }
}

fn usage(usage: &v1::Usage) -> VmUsage {
    let number = |number: u64| i64::try_from(number).ok();
    VmUsage {
        observed_at: None,
        cpu_nanoseconds: number(usage.cpu_nanoseconds),
        memory_used_bytes: number(usage.memory_used_bytes),
        memory_total_bytes: number(usage.memory_total_bytes),
        disk_used_bytes: number(usage.disk_used_bytes),
        disk_total_bytes: number(usage.disk_total_bytes),
        network_receive_bytes: number(usage.network_receive_bytes),
        network_transmit_bytes: number(usage.network_transmit_bytes),
    }
}

/// Adds the condition that says whether anything of the VM is left on the node.
pub fn set_released(status: &mut ImpVMStatus, released: bool, now: i64) {
    let (text, reason, message) = if released {
        ("True", "Released", "Nothing of the VM is left on the node")
    } else {
        ("False", "Removing", "The VM is being removed from the node")
    };
    status.conditions.push(Condition {
        type_: NODE_RELEASED.to_owned(),
        status: text.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: time(now).unwrap_or(Time(Timestamp::UNIX_EPOCH)),
        observed_generation: status.observed_generation,
    });
}

/// Whether the object says that nothing of it is left on the node.
#[must_use]
pub fn is_released(vm: &ImpVM) -> bool {
    vm.status
        .iter()
        .flat_map(|status| &status.conditions)
        .any(|c| c.type_ == NODE_RELEASED && c.status == "True")
}

/// Whether `desired` says anything that the object does not. Usage alone is never news: it changes all the time, and is
/// carried along by the next write that tells something else.
#[must_use]
pub fn is_news(vm: &ImpVM, desired: &ImpVMStatus) -> bool {
    let Some(now) = &vm.status else { return true };
    // Only what the agent writes, without usage and with conditions compared one by one.
    let owned = |status: &ImpVMStatus| ImpVMStatus {
        phase: status.phase,
        message: status.message.clone(),
        observed_generation: status.observed_generation,
        exit_code: status.exit_code,
        signal: status.signal,
        oom_killed: status.oom_killed,
        reason: status.reason.clone(),
        image_digest: status.image_digest.clone(),
        vmm: status.vmm.clone(),
        runtime_pid: status.runtime_pid,
        started_at: status.started_at.clone(),
        running_at: status.running_at.clone(),
        finished_at: status.finished_at.clone(),
        ..ImpVMStatus::default()
    };
    owned(now) != owned(desired)
        || desired.conditions.iter().any(|wanted| !now.conditions.iter().any(|c| same(c, wanted)))
}

/// The time of a transition follows from the status.
fn same(one: &Condition, other: &Condition) -> bool {
    one.type_ == other.type_
        && one.status == other.status
        && one.reason == other.reason
        && one.message == other.message
        && one.observed_generation == other.observed_generation
}

/// How long news may wait: a phase is told at once, steps of a start are gathered.
#[must_use]
pub fn delay(
    vm: &ImpVM,
    desired: &ImpVMStatus,
    state: Option<v1::VmState>,
    since_seen: Duration,
    since_write: Option<Duration>,
) -> Duration {
    let before = vm.status.as_ref().and_then(|status| status.phase);
    let interval = match desired.phase {
        Some(VMPhase::Starting) if before != Some(VMPhase::Starting) => {
            let early =
                matches!(state, Some(v1::VmState::Pending | v1::VmState::Pulling | v1::VmState::Preparing));
            return if early { FIRST_DELAY.saturating_sub(since_seen) } else { Duration::ZERO };
        }
        phase if phase != before => return Duration::ZERO,
        Some(VMPhase::Starting) => PROGRESS_INTERVAL,
        _ => RUNNING_INTERVAL,
    };
    since_write.map_or(Duration::ZERO, |since| interval.saturating_sub(since))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn vm(status: &serde_json::Value) -> ImpVM {
        let object = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": "a"},
            "spec": {"classRef": {"name": "small"}, "image": "a:1"}, "status": status});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn fr90_usage_and_what_the_operator_writes_are_no_news() {
        let object = vm(&json!({"phase": "Running", "nodeName": "n", "restartCount": 3, "ip": "10.0.0.1"}));
        let mut desired = ImpVMStatus { phase: Some(VMPhase::Running), ..ImpVMStatus::default() };
        desired.usage = Some(VmUsage { cpu_nanoseconds: Some(1), ..VmUsage::default() });
        assert!(!is_news(&object, &desired));
        desired.exit_code = Some(0);
        assert!(is_news(&object, &desired));
    }

    #[test]
    fn phases_are_told_at_once_and_progress_is_gathered() {
        let phase = |phase| ImpVMStatus { phase: Some(phase), ..ImpVMStatus::default() };
        let second = Duration::from_secs(1);
        let scheduled = vm(&json!({"phase": "Scheduled"}));
        let starting = vm(&json!({"phase": "Starting"}));
        let first = |state, seen| delay(&scheduled, &phase(VMPhase::Starting), Some(state), seen, None);
        assert_eq!(first(v1::VmState::Pulling, Duration::ZERO), FIRST_DELAY);
        assert_eq!(first(v1::VmState::Pulling, second), Duration::ZERO);
        assert_eq!(first(v1::VmState::Booting, Duration::ZERO), Duration::ZERO);
        let progress = delay(&starting, &phase(VMPhase::Starting), None, second, Some(second));
        assert_eq!(progress, PROGRESS_INTERVAL - second);
        assert_eq!(
            delay(&starting, &phase(VMPhase::Running), None, second, Some(Duration::ZERO)),
            Duration::ZERO
        );
    }
}
