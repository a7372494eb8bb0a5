//! The agent's conditions.

use super::{
    Blocked, Condition, Facts, Failure, Phase, ProbeResult, Report, State, Status, Step, UnixSeconds, text,
};

fn condition(kind: &str, status: Status, reason: &str, message: impl Into<String>) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status,
        reason: reason.to_owned(),
        message: message.into(),
        since: 0,
        generation: 0,
    }
}

/// Sets generation and time of change. A condition that only says the same of the same generation keeps its time.
pub(super) fn stamp(conditions: &mut [Condition], generation: i64, previous: &[Condition], now: UnixSeconds) {
    for condition in conditions {
        let before = previous.iter().find(|p| p.kind == condition.kind && p.status == condition.status);
        condition.since = before.map_or(now, |p| p.since);
        condition.generation = generation;
    }
}

/// Conditions of a VM that cannot be handed to the runtime.
pub(super) fn blocked(why: &Blocked) -> Vec<Condition> {
    let waiting = "The node waits until the VM can be started";
    vec![
        condition("Ready", Status::False, why.reason, why.message.clone()),
        condition("ImageReady", Status::Unknown, "Waiting", waiting),
        condition("NetworkReady", Status::Unknown, "Waiting", waiting),
        condition("GuestReady", Status::False, "Waiting", waiting),
        condition("Started", Status::False, "Waiting", waiting),
    ]
}

/// Conditions of a VM that the runtime reports on.
pub(super) fn of_report(report: &Report, facts: &Facts, phase: Phase) -> Vec<Condition> {
    let started = started(report, facts, phase);
    let guest = guest(report, phase);
    let mut all = vec![
        ready(report, facts, phase, &started, &guest),
        image(report, facts),
        network(report, facts),
        guest,
        started,
    ];
    if facts.has_liveness_probe {
        all.push(healthy(report, phase));
    }
    all
}

fn failure_of(report: &Report, step: Step) -> Option<&Failure> {
    report.failure.as_ref().filter(|failure| failure.reason.step() == step)
}

fn failure_text(failure: &Failure) -> String {
    if failure.retrying { text::retrying(failure) } else { text::failed(failure) }
}

fn image(report: &Report, facts: &Facts) -> Condition {
    const KIND: &str = "ImageReady";
    if let Some(failure) = failure_of(report, Step::Image) {
        return condition(KIND, Status::False, failure.reason.as_str(), failure_text(failure));
    }
    // A digest alone may be of an image whose disk is still being laid out.
    if report.image_ready || (State::Booting..=State::Stopping).contains(&report.state) {
        let message = if report.image_digest.is_empty() {
            format!("Image {} is on the node", facts.image)
        } else {
            format!("Image {} is on the node as {}", facts.image, report.image_digest)
        };
        return condition(KIND, Status::True, "ImagePresent", message);
    }
    match report.state {
        State::Pulling => condition(KIND, Status::False, "Pulling", text::pulling(report, facts)),
        State::Stopped | State::Failed => {
            condition(KIND, Status::False, "Ended", "The attempt ended before its image was ready")
        }
        _ => condition(KIND, Status::Unknown, "Waiting", "The image has not been looked up yet"),
    }
}

fn network(report: &Report, facts: &Facts) -> Condition {
    const KIND: &str = "NetworkReady";
    if let Some(failure) = failure_of(report, Step::Network) {
        return condition(KIND, Status::False, failure.reason.as_str(), failure_text(failure));
    }
    if !facts.has_network {
        return condition(
            KIND,
            Status::True,
            "NoNetwork",
            "The VM names no network and has no network device",
        );
    }
    if report.network_ready {
        return condition(
            KIND,
            Status::True,
            "NetworkConfigured",
            "Bridge, tap and address are set up on the node",
        );
    }
    match report.state {
        State::Stopped | State::Failed => condition(KIND, Status::False, "Ended", "The attempt is over"),
        _ if report.network_message.is_empty() => {
            condition(KIND, Status::False, "Preparing", "The network is being set up")
        }
        _ => condition(KIND, Status::False, "Preparing", report.network_message.clone()),
    }
}

fn guest(report: &Report, phase: Phase) -> Condition {
    const KIND: &str = "GuestReady";
    if let Some(failure) = failure_of(report, Step::Guest) {
        return condition(KIND, Status::False, failure.reason.as_str(), failure_text(failure));
    }
    if phase.is_terminal() {
        return condition(KIND, Status::False, "Ended", "The VM does not run");
    }
    match report.state {
        State::Running | State::Stopping if report.guest_connected => {
            condition(KIND, Status::True, "GuestConnected", "The guest agent answers")
        }
        State::Configuring => condition(KIND, Status::False, "Booting", "The guest is being configured"),
        _ if phase == Phase::Running => condition(
            KIND,
            Status::False,
            "GuestDisconnected",
            "The channel to the guest agent is down; the node connects again. Exec and probes wait for it",
        ),
        State::Booting => condition(KIND, Status::False, "Booting", "The guest agent has not said hello yet"),
        _ => condition(KIND, Status::False, "Waiting", "The VM has not been booted yet"),
    }
}

fn started(report: &Report, facts: &Facts, phase: Phase) -> Condition {
    const KIND: &str = "Started";
    if let Some(failure) = failure_of(report, Step::Workload) {
        return condition(KIND, Status::False, failure.reason.as_str(), failure_text(failure));
    }
    match (phase, &report.startup) {
        // It started, and has ended: what came after does not undo that.
        (Phase::Succeeded | Phase::Failed, _) if report.workload_started_at.is_some() => {
            condition(KIND, Status::True, "Running", "The workload was started")
        }
        (Phase::Running, Some(probe)) if facts.has_startup_probe => verdict(KIND, probe),
        (Phase::Running, None) if facts.has_startup_probe => {
            condition(KIND, Status::False, "ProbePending", "The startup probe has not succeeded yet")
        }
        (Phase::Running, _) => condition(KIND, Status::True, "Running", "The workload was started"),
        _ => condition(KIND, Status::False, "Waiting", "The workload has not been started"),
    }
}

fn verdict(kind: &str, probe: &ProbeResult) -> Condition {
    if probe.success {
        return condition(kind, Status::True, "ProbeSucceeded", "The probe succeeds");
    }
    let message = if probe.message.is_empty() {
        "The probe fails".to_owned()
    } else {
        format!("The probe fails: {}", probe.message)
    };
    condition(kind, Status::False, "ProbeFailed", message)
}

fn healthy(report: &Report, phase: Phase) -> Condition {
    const KIND: &str = "Healthy";
    match &report.liveness {
        Some(probe) if phase == Phase::Running => verdict(KIND, probe),
        None if phase == Phase::Running => {
            condition(KIND, Status::Unknown, "ProbePending", "The liveness probe has no verdict yet")
        }
        _ if phase.is_terminal() => condition(KIND, Status::False, "Ended", "The VM does not run"),
        _ => condition(KIND, Status::Unknown, "Waiting", "The workload has not been started"),
    }
}

fn ready(report: &Report, facts: &Facts, phase: Phase, started: &Condition, guest: &Condition) -> Condition {
    const KIND: &str = "Ready";
    match phase {
        Phase::Succeeded => return condition(KIND, Status::False, "Completed", text::ended(report, facts)),
        Phase::Failed => {
            return condition(KIND, Status::False, failed_reason(report), text::ended(report, facts));
        }
        Phase::Running => {}
        _ => {
            let reason =
                report.failure.as_ref().map_or_else(|| step(report.state), |failure| failure.reason.as_str());
            return condition(KIND, Status::False, reason, text::starting(report, facts));
        }
    }
    if report.state == State::Stopping {
        return condition(KIND, Status::False, "Stopping", "The workload is being stopped");
    }
    if facts.has_startup_probe && started.status != Status::True {
        return condition(KIND, Status::False, &started.reason, started.message.clone());
    }
    match &report.readiness {
        Some(probe) if facts.has_readiness_probe => verdict(KIND, probe),
        None if facts.has_readiness_probe => {
            condition(KIND, Status::False, "ProbePending", "The readiness probe has no verdict yet")
        }
        // Without a probe the running workload is what readiness means; a guest that lost its channel may serve on.
        _ if guest.status == Status::True || guest.reason == "GuestDisconnected" => {
            condition(KIND, Status::True, "Running", text::running(report))
        }
        _ => condition(KIND, Status::False, &guest.reason, guest.message.clone()),
    }
}

/// The step of a start as a reason.
fn step(state: State) -> &'static str {
    match state {
        State::Pending => "Waiting",
        State::Pulling => "Pulling",
        State::Preparing => "Preparing",
        State::Stopping => "Stopping",
        _ => "Booting",
    }
}

fn failed_reason(report: &Report) -> &'static str {
    match (&report.failure, &report.exit) {
        (Some(failure), _) => failure.reason.as_str(),
        (None, Some(exit)) if exit.oom_killed => "OOMKilled",
        (None, Some(_)) => "Failed",
        (None, None) => "GuestPoweredOff",
    }
}
