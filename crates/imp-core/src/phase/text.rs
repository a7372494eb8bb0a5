//! The sentences for people.

use super::{Exit, Facts, Failure, FailureReason, Observation, Phase, Report, State};

/// Longest message in bytes; the API allows 32 KiB, people read the first lines.
const MAX_MESSAGE: usize = 4096;

/// `status.message`.
pub(super) fn summary(report: &Report, facts: &Facts, phase: Phase) -> String {
    match phase {
        Phase::Failed | Phase::Succeeded => ended(report, facts),
        Phase::Running if report.state == State::Stopping => "The workload is being stopped".to_owned(),
        Phase::Running => running(report),
        _ => starting(report, facts),
    }
}

/// `status.message` of an object that is being deleted.
pub(super) fn terminating(seen: &Observation) -> String {
    let Observation::Report(report) = seen else {
        return "Nothing of the VM is on the node; it is being released".to_owned();
    };
    match (&report.failure, report.state) {
        // Field report 55: a delete that cannot finish says why.
        (Some(failure), _) if failure.retrying => {
            bounded(&format!("Removal from the node is being retried: {}", failure.message))
        }
        (_, State::Stopped | State::Failed) => {
            "The VM has ended; its disk and network are being removed".to_owned()
        }
        _ => "The VM is being stopped".to_owned(),
    }
}

/// Ready's and the summary's words for a running workload; emulation is never silent.
pub(super) fn running(report: &Report) -> String {
    if report.accelerator == "tcg" {
        "The workload runs, under software emulation (slow): the node has no usable hardware virtualisation"
            .to_owned()
    } else {
        "The workload runs".to_owned()
    }
}

pub(super) fn starting(report: &Report, facts: &Facts) -> String {
    if let Some(failure) = &report.failure {
        return retrying(failure);
    }
    match report.state {
        State::Pending => "The node has taken the VM up".to_owned(),
        State::Pulling => pulling(report, facts),
        State::Preparing => "Disk and network are being made".to_owned(),
        State::Booting => "The kernel boots".to_owned(),
        _ => "The guest is being configured".to_owned(),
    }
}

/// How far the image is, in steps of a tenth so that each step is worth a write.
pub(super) fn pulling(report: &Report, facts: &Facts) -> String {
    if report.total_bytes == 0 {
        return format!("Image {} is being pulled", facts.image);
    }
    let tenths =
        u128::from(report.pulled_bytes.min(report.total_bytes)) * 10 / u128::from(report.total_bytes);
    format!(
        "Image {} is being pulled: {}0 % of {} MiB",
        facts.image,
        tenths,
        report.total_bytes.div_ceil(1 << 20)
    )
}

pub(super) fn retrying(failure: &Failure) -> String {
    bounded(&format!(
        "{}; the node tries again{}",
        failure.message.trim_end_matches('.'),
        advice(failure.reason)
    ))
}

pub(super) fn failed(failure: &Failure) -> String {
    bounded(&format!("{}{}", failure.message.trim_end_matches('.'), advice(failure.reason)))
}

/// What a person can do about it.
fn advice(reason: FailureReason) -> &'static str {
    match reason {
        FailureReason::InvalidSpec => ". Correct the VM's spec and create it again",
        FailureReason::ImageNotFound => ". Check the name in spec.image",
        FailureReason::ImagePullUnauthorized => {
            ". Check spec.imagePullSecrets, or the pull secrets of the namespace's default service account"
        }
        FailureReason::ImageInvalid => ". Build the image again, or name another in spec.image",
        FailureReason::WorkloadStartFailed => {
            ". Check spec.command, spec.args and spec.workingDir against the image"
        }
        FailureReason::VmmOomKilled => {
            ". The VMM used more memory than its class allows: use a class with more memoryMiB"
        }
        FailureReason::KernelPanic | FailureReason::GuestUnreachable => {
            ". `kubectl imp console` shows the serial console"
        }
        _ => "",
    }
}

/// What is said of an attempt that is over.
pub(super) fn ended(report: &Report, facts: &Facts) -> String {
    match (&report.failure, &report.exit) {
        (Some(failure), _) => failed(failure),
        (None, Some(exit)) => workload_exit(exit, facts),
        (None, None) => {
            "The VM ended without telling how its workload ended: the guest powered itself off or was stopped"
                .to_owned()
        }
    }
}

fn workload_exit(exit: &Exit, facts: &Facts) -> String {
    let how = match exit {
        Exit { oom_killed: true, .. } => {
            "The guest ran out of memory and its kernel killed the workload: use a class with more memoryMiB"
                .to_owned()
        }
        Exit { signal, .. } if *signal != 0 => format!("The workload was ended by signal {signal}"),
        Exit { code: 0, .. } if facts.persistent => {
            "The workload ended with exit code 0; its restart policy decides what follows".to_owned()
        }
        Exit { code, .. } => format!("The workload ended with exit code {code}"),
    };
    if exit.message.is_empty() { how } else { bounded(&format!("{how}: {}", exit.message)) }
}

/// At most [`MAX_MESSAGE`] bytes, cut between characters. What the guest says is never trusted to be short.
fn bounded(text: &str) -> String {
    let end = text.floor_char_boundary(MAX_MESSAGE);
    if end == text.len() { text.to_owned() } else { format!("{}…", &text[..end]) }
}
