use proptest::prelude::*;

use super::*;

const NOW: UnixSeconds = 1_800_000_000;

fn report(state: State) -> Report {
    let begun = state >= State::Running && state != State::Failed;
    Report {
        attempt: 0,
        state,
        failure: None,
        exit: None,
        image_ready: state > State::Pulling,
        image_digest: String::new(),
        pulled_bytes: 0,
        total_bytes: 0,
        network_ready: (State::Booting..=State::Stopping).contains(&state),
        network_message: String::new(),
        guest_connected: (State::Configuring..=State::Stopping).contains(&state),
        accelerator: "kvm".to_owned(),
        accepted_at: Some(NOW - 5),
        workload_started_at: begun.then_some(NOW - 2),
        startup: None,
        readiness: None,
        liveness: None,
    }
}

fn facts() -> Facts {
    Facts { generation: 3, image: "app:1".to_owned(), has_network: true, ..Facts::default() }
}

fn told(report: Report) -> Observation {
    Observation::Report(Box::new(report))
}

fn decided(report: Report, facts: &Facts) -> Decision {
    decide(&told(report), facts, &Previous::default(), NOW).expect("same attempt")
}

fn get<'a>(decision: &'a Decision, kind: &str) -> &'a Condition {
    decision.conditions.iter().find(|c| c.kind == kind).unwrap_or_else(|| panic!("no condition {kind}"))
}

fn failure(reason: FailureReason, retrying: bool) -> Option<Failure> {
    Some(Failure { reason, message: "it broke".to_owned(), retrying })
}

fn exit(code: i32, signal: i32, oom_killed: bool) -> Option<Exit> {
    Some(Exit { code, signal, oom_killed, message: String::new(), finished_at: Some(NOW - 1) })
}

#[test]
fn a_normal_start_in_order() {
    let table = [
        (State::Pending, "Starting", "Waiting", "Waiting"),
        (State::Pulling, "Starting", "Pulling", "Waiting"),
        (State::Preparing, "Starting", "ImagePresent", "Waiting"),
        (State::Booting, "Starting", "ImagePresent", "Booting"),
        (State::Configuring, "Starting", "ImagePresent", "Booting"),
        (State::Running, "Running", "ImagePresent", "GuestConnected"),
        (State::Stopping, "Running", "ImagePresent", "GuestConnected"),
    ];
    for (state, phase, image, guest) in table {
        let decision = decided(report(state), &facts());
        assert_eq!(decision.phase.as_str(), phase, "{state:?}");
        assert_eq!(get(&decision, "ImageReady").reason, image, "{state:?}");
        assert_eq!(get(&decision, "GuestReady").reason, guest, "{state:?}");
        let ready = if state == State::Running { Status::True } else { Status::False };
        assert_eq!(get(&decision, "Ready").status, ready, "{state:?}");
    }
}

#[test]
fn fr60_how_a_workload_ended_is_told() {
    let table = [
        (exit(0, 0, false), "Succeeded", "Completed", Some(0), None),
        (exit(42, 0, false), "Failed", "Failed", Some(42), None),
        (exit(139, 11, false), "Failed", "Failed", Some(139), Some(11)),
        (exit(137, 9, true), "Failed", "OOMKilled", Some(137), Some(9)),
        (None, "Failed", "GuestPoweredOff", None, None),
    ];
    for (exit, phase, reason, code, signal) in table {
        let decision = decided(Report { exit, ..report(State::Stopped) }, &facts());
        assert_eq!((decision.phase.as_str(), decision.exit_code, decision.signal), (phase, code, signal));
        let ready = get(&decision, "Ready");
        assert_eq!((ready.status, ready.reason.as_str()), (Status::False, reason));
        assert_eq!(get(&decision, "Started").status, Status::True, "it had been started");
    }
    let signalled = decided(Report { exit: exit(139, 11, false), ..report(State::Stopped) }, &facts());
    assert_eq!(signalled.message, "The workload was ended by signal 11");
    assert_eq!(signalled.finished_at, Some(NOW - 1));
}

#[test]
fn each_failure_has_its_reason_on_the_condition_of_its_step() {
    let table = [
        (FailureReason::ImageNotFound, "ImageReady", "ImageNotFound"),
        (FailureReason::ImagePullUnauthorized, "ImageReady", "ImagePullUnauthorized"),
        (FailureReason::NetworkFailed, "NetworkReady", "NetworkFailed"),
        (FailureReason::KernelPanic, "GuestReady", "KernelPanic"),
        (FailureReason::GuestUnreachable, "GuestReady", "GuestUnreachable"),
        (FailureReason::WorkloadStartFailed, "Started", "WorkloadStartFailed"),
        (FailureReason::VmmCrashed, "Ready", "VmmCrashed"),
        (FailureReason::VmmOomKilled, "Ready", "VmmOomKilled"),
        (FailureReason::HostRebooted, "Ready", "HostRebooted"),
    ];
    for (reason, kind, name) in table {
        let decision = decided(Report { failure: failure(reason, false), ..report(State::Failed) }, &facts());
        assert_eq!(decision.phase, Phase::Failed);
        for kind in [kind, "Ready"] {
            let found = get(&decision, kind);
            assert_eq!((found.status, found.reason.as_str()), (Status::False, name), "{kind}");
            assert!(found.message.starts_with("it broke"), "{}", found.message);
        }
    }
}

#[test]
fn fr15_a_pull_that_is_retried_is_a_condition_not_an_end() {
    let decision = decided(
        Report { failure: failure(FailureReason::ImagePullUnauthorized, true), ..report(State::Pulling) },
        &facts(),
    );
    assert_eq!(decision.phase, Phase::Starting);
    let image = get(&decision, "ImageReady");
    assert_eq!((image.status, image.reason.as_str()), (Status::False, "ImagePullUnauthorized"));
    assert!(
        image.message.contains("tries again") && image.message.contains("imagePullSecrets"),
        "{}",
        image.message
    );
}

#[test]
fn a_report_of_another_attempt_changes_nothing() {
    let restarted = Facts { attempt: 1, ..facts() };
    assert_eq!(decide(&told(report(State::Failed)), &restarted, &Previous::default(), NOW), None);
}

#[test]
fn a_running_vm_stays_running_while_it_is_adopted() {
    let running = decided(report(State::Running), &facts()).as_previous();
    for state in [State::Pending, State::Booting] {
        let adopted = decide(&told(report(state)), &facts(), &running, NOW + 60).unwrap();
        assert_eq!(adopted.phase, Phase::Running, "{state:?}");
        assert_eq!(get(&adopted, "GuestReady").reason, "GuestDisconnected");
        assert_eq!(get(&adopted, "Ready").status, Status::True, "the workload serves on");
    }
}

#[test]
fn emulation_is_never_silent() {
    let decision = decided(Report { accelerator: "tcg".to_owned(), ..report(State::Running) }, &facts());
    assert!(decision.message.contains("software emulation"));
    assert!(get(&decision, "Ready").message.contains("software emulation"));
}

#[test]
fn probes_decide_readiness() {
    let probed =
        Facts { has_readiness_probe: true, has_startup_probe: true, has_liveness_probe: true, ..facts() };
    let yes = Some(ProbeResult { success: true, message: String::new() });
    let no = Some(ProbeResult { success: false, message: "HTTP 503".to_owned() });
    let ready = |startup: &Option<ProbeResult>, readiness: &Option<ProbeResult>| {
        let decision = decided(
            Report {
                startup: startup.clone(),
                readiness: readiness.clone(),
                liveness: no.clone(),
                ..report(State::Running)
            },
            &probed,
        );
        assert_eq!(get(&decision, "Healthy").reason, "ProbeFailed");
        get(&decision, "Ready").reason.clone()
    };
    assert_eq!(ready(&None, &None), "ProbePending");
    assert_eq!(ready(&no, &yes), "ProbeFailed");
    assert_eq!(ready(&yes, &None), "ProbePending");
    assert_eq!(ready(&yes, &no), "ProbeFailed");
    assert_eq!(ready(&yes, &yes), "ProbeSucceeded");
}

#[test]
fn fr55_a_delete_that_cannot_finish_says_why() {
    let deleting = Facts { deleting: true, ..facts() };
    let decision = decided(
        Report { failure: failure(FailureReason::DiskFailed, true), ..report(State::Stopping) },
        &deleting,
    );
    assert_eq!(decision.phase, Phase::Terminating);
    assert!(decision.message.contains("it broke"), "{}", decision.message);
}

#[test]
fn a_blocked_vm_says_why_and_a_running_one_is_left_alone() {
    let blocked = Observation::Blocked(Blocked {
        reason: "SecretsUnavailable",
        message: "the operator did not answer".to_owned(),
    });
    let decision = decide(&blocked, &facts(), &Previous::default(), NOW).unwrap();
    assert_eq!(get(&decision, "Ready").reason, "SecretsUnavailable");
    let running = decided(report(State::Running), &facts());
    assert_eq!(
        decide(&blocked, &facts(), &running.as_previous(), NOW + 9).unwrap().as_previous(),
        running.as_previous()
    );
}

#[test]
fn messages_of_the_guest_are_cut() {
    let long = Failure { reason: FailureReason::KernelPanic, message: "ü".repeat(100_000), retrying: false };
    let decision = decided(Report { failure: Some(long), ..report(State::Failed) }, &facts());
    assert!(decision.message.len() < 5000);
}

fn any_state() -> impl Strategy<Value = State> {
    use State::{Booting, Configuring, Failed, Pending, Preparing, Pulling, Running, Stopped, Stopping};
    prop::sample::select(vec![
        Pending,
        Pulling,
        Preparing,
        Booting,
        Configuring,
        Running,
        Stopping,
        Stopped,
        Failed,
    ])
}

prop_compose! {
    fn any_report()(state in any_state(), reason in prop::sample::select(vec![FailureReason::ImagePullFailed, FailureReason::VmmCrashed, FailureReason::KernelPanic]),
        failing: bool, retrying: bool, code in 0..3i32, connected: bool, probe: Option<bool>, total in 0..9u64) -> Report {
        let final_failure = state == State::Failed;
        Report {
            failure: (final_failure || (failing && retrying)).then(|| Failure { reason, message: "why".to_owned(), retrying: !final_failure }),
            exit: (state == State::Stopped).then(|| Exit { code, ..Exit::default() }),
            guest_connected: connected,
            readiness: probe.map(|success| ProbeResult { success, message: String::new() }),
            total_bytes: total << 20,
            pulled_bytes: total << 19,
            ..report(state)
        }
    }
}

fn rank(phase: Phase) -> u8 {
    match phase {
        Phase::Other => 0,
        Phase::Starting => 1,
        Phase::Running => 2,
        Phase::Succeeded | Phase::Failed => 3,
        Phase::Terminating => 4,
    }
}

proptest! {
    /// Whatever is reported in whatever order, a phase never goes back within an attempt, and a terminal one never changes.
    #[test]
    fn phases_only_move_forward(reports in prop::collection::vec(any_report(), 1..20), probed: bool) {
        let facts = Facts { has_readiness_probe: probed, has_liveness_probe: probed, ..facts() };
        let mut previous = Previous::default();
        for (step, report) in reports.into_iter().enumerate() {
            let before = Phase::from_name(&previous.phase);
            let decision = decide(&told(report), &facts, &previous, NOW + i64::try_from(step).unwrap()).unwrap();
            prop_assert!(rank(decision.phase) >= rank(before), "{before:?} to {:?}", decision.phase);
            if before.is_terminal() {
                prop_assert_eq!(&decision.as_previous(), &previous);
            }
            previous = decision.as_previous();
        }
    }

    /// The same report later says the same, to the last timestamp: nothing is written that changes nothing.
    #[test]
    fn fr90_the_same_report_decides_the_same(report in any_report(), deleting: bool, later in 0..100_000i64) {
        let facts = Facts { deleting, ..facts() };
        let first = decide(&told(report.clone()), &facts, &Previous::default(), NOW).unwrap();
        let second = decide(&told(report), &facts, &first.as_previous(), NOW + later).unwrap();
        prop_assert_eq!(first, second);
    }

    /// Every condition is there exactly once, with a reason the API accepts and a message.
    #[test]
    fn conditions_are_complete(report in any_report(), deleting: bool) {
        let decision = decided(report, &Facts { deleting, ..facts() });
        for kind in ["Ready", "ImageReady", "NetworkReady", "GuestReady", "Started"] {
            prop_assert_eq!(decision.conditions.iter().filter(|c| c.kind == kind).count(), 1);
        }
        for condition in &decision.conditions {
            prop_assert!(!condition.message.is_empty());
            prop_assert!(imp_api::names::Reason::parse(&condition.reason).is_some(), "{} is no reason of the API", condition.reason);
            prop_assert!(imp_api::names::ConditionType::parse(&condition.kind).is_some());
            prop_assert_eq!(condition.generation, 3);
        }
    }
}
