//! Where a VM's phase, message and conditions are decided from what its node's runtime reports.
//!
//! The agent calls [`decide`] for each report and writes the answer if it differs from what the object says. The rules:
//!
//! - Within one attempt the phase only moves forward: Starting, Running, then Succeeded or Failed. A report that seems to
//!   go back (a restarted runtime that has not yet adopted the VMM) moves conditions, never the phase.
//! - Succeeded and Failed are final for the attempt, whatever is reported later.
//! - Deletion shows as Terminating until nothing is left on the node.
//! - The same input gives the same output, and an output fed back as the previous status gives itself: that is what lets
//!   the writer write nothing when nothing changed.

use std::fmt;

mod conditions;
#[cfg(test)]
mod tests;
mod text;

/// Seconds since the Unix epoch. Conditions of the API have this resolution.
pub type UnixSeconds = i64;

/// The phases that the agent decides; the operator's (Pending, Scheduled, RetryExhausted, …) come in as [`Phase::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The runtime has taken the VM up; its workload does not run yet.
    Starting,
    /// The workload's exec succeeded in the guest.
    Running,
    /// The object is being deleted.
    Terminating,
    /// The workload ended with exit code 0.
    Succeeded,
    /// The attempt failed or the workload ended with another code or a signal.
    Failed,
    /// Any phase that the operator wrote, or none.
    Other,
}

impl Phase {
    /// The phase's name in the API; empty for [`Phase::Other`].
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "Starting",
            Self::Running => "Running",
            Self::Terminating => "Terminating",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Other => "",
        }
    }

    /// Reads a phase's name; what the agent never writes is [`Phase::Other`].
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        [Self::Starting, Self::Running, Self::Terminating, Self::Succeeded, Self::Failed]
            .into_iter()
            .find(|phase| phase.as_str() == name)
            .unwrap_or(Self::Other)
    }

    /// Whether nothing runs any more in this phase.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// What the runtime says it is doing with the VM, in the order of a normal start. As `VmState` of `runtime.proto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Accepted, nothing done yet.
    Pending,
    /// The image is being resolved, pulled or laid out.
    Pulling,
    /// Disk, network and cgroup are being made.
    Preparing,
    /// The VMM runs; the guest has not said hello.
    Booting,
    /// The guest is being configured.
    Configuring,
    /// The workload's exec succeeded.
    Running,
    /// The VM is being stopped.
    Stopping,
    /// The workload ended.
    Stopped,
    /// The attempt failed.
    Failed,
}

/// Why an attempt failed or a step is being retried. As `FailureReason` of `runtime.proto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "runtime.proto explains them; the names are the API's condition reasons")]
pub enum FailureReason {
    InvalidSpec,
    ImageNotFound,
    ImagePullUnauthorized,
    ImagePullFailed,
    ImageInvalid,
    DiskFailed,
    NetworkFailed,
    VmmStartFailed,
    VmmCrashed,
    KernelPanic,
    GuestUnreachable,
    WorkloadStartFailed,
    HostRebooted,
    VmmOomKilled,
    GuestConfigureFailed,
    Internal,
    /// The runtime does not know a VM that ran: its state on the node was removed. Not of runtime.proto; the agent says so.
    VmLost,
}

/// The step of a start that a failure belongs to; decides which condition names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Image,
    Network,
    Machine,
    Guest,
    Workload,
}

impl FailureReason {
    /// The stable reason in conditions and events.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidSpec => "InvalidSpec",
            Self::ImageNotFound => "ImageNotFound",
            Self::ImagePullUnauthorized => "ImagePullUnauthorized",
            Self::ImagePullFailed => "ImagePullFailed",
            Self::ImageInvalid => "ImageInvalid",
            Self::DiskFailed => "DiskFailed",
            Self::NetworkFailed => "NetworkFailed",
            Self::VmmStartFailed => "VmmStartFailed",
            Self::VmmCrashed => "VmmCrashed",
            Self::KernelPanic => "KernelPanic",
            Self::GuestUnreachable => "GuestUnreachable",
            Self::WorkloadStartFailed => "WorkloadStartFailed",
            Self::HostRebooted => "HostRebooted",
            Self::VmmOomKilled => "VmmOomKilled",
            Self::GuestConfigureFailed => "GuestConfigureFailed",
            Self::Internal => "Internal",
            Self::VmLost => "VmLost",
        }
    }

    fn step(self) -> Step {
        match self {
            Self::ImageNotFound
            | Self::ImagePullUnauthorized
            | Self::ImagePullFailed
            | Self::ImageInvalid => Step::Image,
            Self::NetworkFailed => Step::Network,
            Self::KernelPanic | Self::GuestUnreachable | Self::GuestConfigureFailed => Step::Guest,
            Self::WorkloadStartFailed => Step::Workload,
            _ => Step::Machine,
        }
    }
}

/// A failure as the runtime tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which kind.
    pub reason: FailureReason,
    /// The runtime's words.
    pub message: String,
    /// The runtime tries again by itself; the attempt is not over.
    pub retrying: bool,
}

/// How the workload ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exit {
    /// 0-255; 128 + signal when a signal ended it.
    pub code: i32,
    /// 0 unless a signal ended it.
    pub signal: i32,
    /// The guest's out-of-memory killer ended it.
    pub oom_killed: bool,
    /// The guest's words; empty for an ordinary exit.
    pub message: String,
    /// When it ended, by the guest's clock.
    pub finished_at: Option<UnixSeconds>,
}

/// A probe's last verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeResult {
    /// Succeeded, or failed often enough to count.
    pub success: bool,
    /// The guest's words.
    pub message: String,
}

/// What the runtime reports of one VM: `VmStatus` of `runtime.proto`, as far as it decides anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Attempt that the report is about.
    pub attempt: u32,
    /// What the runtime is doing.
    pub state: State,
    /// Why it failed or retries.
    pub failure: Option<Failure>,
    /// How the workload ended.
    pub exit: Option<Exit>,
    /// The root disk of the image is there.
    pub image_ready: bool,
    /// Digest of the image's manifest; empty while unknown.
    pub image_digest: String,
    /// Bytes pulled so far.
    pub pulled_bytes: u64,
    /// Bytes to pull; 0 while unknown.
    pub total_bytes: u64,
    /// The VM's network device is there.
    pub network_ready: bool,
    /// The runtime's words about the network.
    pub network_message: String,
    /// The channel to the guest agent is up.
    pub guest_connected: bool,
    /// "kvm" or "tcg"; empty while no VMM runs.
    pub accelerator: String,
    /// When the runtime took this attempt up.
    pub accepted_at: Option<UnixSeconds>,
    /// When the workload started.
    pub workload_started_at: Option<UnixSeconds>,
    /// Verdict of the startup probe.
    pub startup: Option<ProbeResult>,
    /// Verdict of the readiness probe.
    pub readiness: Option<ProbeResult>,
    /// Verdict of the liveness probe.
    pub liveness: Option<ProbeResult>,
}

/// What the agent knows of the VM's object beside the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// metadata.generation.
    pub generation: i64,
    /// status.restartCount.
    pub attempt: u32,
    /// spec.lifecycle is persistent.
    pub persistent: bool,
    /// The object has a deletion timestamp.
    pub deleting: bool,
    /// The image that the VM names.
    pub image: String,
    /// The VM has a network.
    pub has_network: bool,
    /// Probes that the VM has.
    pub has_startup_probe: bool,
    /// Probes that the VM has.
    pub has_readiness_probe: bool,
    /// Probes that the VM has.
    pub has_liveness_probe: bool,
}

/// Why the agent cannot hand the VM to the runtime yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// A stable reason, e.g. `SecretsUnavailable`.
    pub reason: &'static str,
    /// What failed, why, and what to do.
    pub message: String,
}

/// What the agent sees on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// The runtime's report.
    Report(Box<Report>),
    /// The VM was not handed over; nothing runs.
    Blocked(Blocked),
}

/// A condition's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It holds.
    True,
    /// It does not.
    False,
    /// Nobody can tell yet.
    Unknown,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        })
    }
}

impl Status {
    /// Reads the API's text; what is neither True nor False is Unknown.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "True" => Self::True,
            "False" => Self::False,
            _ => Self::Unknown,
        }
    }
}

/// One condition of the agent's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Its type, e.g. `Ready`.
    pub kind: String,
    /// Whether it holds.
    pub status: Status,
    /// Stable, CamelCase.
    pub reason: String,
    /// For people: what is, and what to do about it.
    pub message: String,
    /// When `status` last changed.
    pub since: UnixSeconds,
    /// metadata.generation that it was decided for.
    pub generation: i64,
}

/// What the object's status says now, as far as the agent writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Previous {
    /// The phase's name.
    pub phase: String,
    /// The summary's text.
    pub message: String,
    /// The agent's conditions.
    pub conditions: Vec<Condition>,
    /// status.startedAt.
    pub started_at: Option<UnixSeconds>,
    /// status.runningAt.
    pub running_at: Option<UnixSeconds>,
    /// status.finishedAt.
    pub finished_at: Option<UnixSeconds>,
    /// status.exitCode.
    pub exit_code: Option<i32>,
    /// status.signal.
    pub signal: Option<i32>,
}

/// What the object's status should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The phase.
    pub phase: Phase,
    /// One sentence for people.
    pub message: String,
    /// Every condition of the agent's.
    pub conditions: Vec<Condition>,
    /// When this attempt was taken up.
    pub started_at: Option<UnixSeconds>,
    /// When this attempt's workload started.
    pub running_at: Option<UnixSeconds>,
    /// When this attempt ended.
    pub finished_at: Option<UnixSeconds>,
    /// Exit code of this attempt's workload.
    pub exit_code: Option<i32>,
    /// Signal that ended this attempt's workload.
    pub signal: Option<i32>,
}

impl Decision {
    /// The decision as the status that the next decision starts from.
    #[must_use]
    pub fn as_previous(&self) -> Previous {
        Previous {
            phase: self.phase.as_str().to_owned(),
            message: self.message.clone(),
            conditions: self.conditions.clone(),
            started_at: self.started_at,
            running_at: self.running_at,
            finished_at: self.finished_at,
            exit_code: self.exit_code,
            signal: self.signal,
        }
    }
}

/// Decides the status of a bound VM. `None`: the report is of another attempt than the object's; the status stands.
///
/// `previous` is the object's status together with `facts.attempt` (one read of the object), so that a terminal phase in
/// it belongs to that attempt: the operator writes the new attempt and its phase in one request.
#[must_use]
pub fn decide(seen: &Observation, facts: &Facts, previous: &Previous, now: UnixSeconds) -> Option<Decision> {
    let before = Phase::from_name(&previous.phase);
    let mut decision = match seen {
        Observation::Report(report) if report.attempt != facts.attempt => return None,
        _ if before.is_terminal() && !facts.deleting => return Some(keep(before, previous)),
        Observation::Report(report) => from_report(report, facts, before, previous, now),
        Observation::Blocked(blocked) => from_blocked(blocked, before, previous),
    };
    if facts.deleting {
        decision.phase = Phase::Terminating;
        decision.message = text::terminating(seen);
    }
    conditions::stamp(&mut decision.conditions, facts.generation, &previous.conditions, now);
    Some(decision)
}

/// The attempt is over: what was said last stays said.
fn keep(phase: Phase, previous: &Previous) -> Decision {
    Decision {
        phase,
        message: previous.message.clone(),
        conditions: previous.conditions.clone(),
        started_at: previous.started_at,
        running_at: previous.running_at,
        finished_at: previous.finished_at,
        exit_code: previous.exit_code,
        signal: previous.signal,
    }
}

fn from_blocked(blocked: &Blocked, before: Phase, previous: &Previous) -> Decision {
    if before == Phase::Running {
        return keep(before, previous);
    }
    Decision {
        phase: Phase::Starting,
        message: blocked.message.clone(),
        conditions: conditions::blocked(blocked),
        started_at: None,
        running_at: None,
        finished_at: None,
        exit_code: None,
        signal: None,
    }
}

fn from_report(
    report: &Report,
    facts: &Facts,
    before: Phase,
    previous: &Previous,
    now: UnixSeconds,
) -> Decision {
    let phase = phase_of(report, before);
    // Times in the status are this attempt's only if the phase is the agent's; an operator's phase begins an attempt.
    let carried = |time: Option<UnixSeconds>| time.filter(|_| before != Phase::Other);
    let finished_at = phase.is_terminal().then(|| {
        let told = report.exit.as_ref().and_then(|exit| exit.finished_at);
        told.or_else(|| carried(previous.finished_at)).unwrap_or(now)
    });
    let running_at = report
        .workload_started_at
        .or_else(|| (phase == Phase::Running).then(|| carried(previous.running_at).unwrap_or(now)));
    Decision {
        phase,
        message: text::summary(report, facts, phase),
        conditions: conditions::of_report(report, facts, phase),
        started_at: report.accepted_at.or_else(|| carried(previous.started_at)).or(Some(now)),
        running_at,
        finished_at,
        exit_code: report.exit.as_ref().map(|exit| exit.code),
        signal: report.exit.as_ref().map(|exit| exit.signal).filter(|signal| *signal != 0),
    }
}

/// The phase, never behind what was said before of this attempt.
fn phase_of(report: &Report, before: Phase) -> Phase {
    let succeeded =
        report.exit.as_ref().is_some_and(|exit| exit.code == 0 && exit.signal == 0 && !exit.oom_killed);
    match report.state {
        State::Failed => Phase::Failed,
        State::Stopped if succeeded => Phase::Succeeded,
        State::Stopped => Phase::Failed,
        State::Running | State::Stopping => Phase::Running,
        _ if before == Phase::Running => Phase::Running,
        _ => Phase::Starting,
    }
}
