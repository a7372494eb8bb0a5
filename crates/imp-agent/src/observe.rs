//! What the runtime says, as the deciders of `imp-core` take it.

use imp_core::phase;
use imp_proto::v1::{self, FailureReason, VmState};

/// A report of the runtime in the terms of [`imp_core::phase`].
#[must_use]
pub fn report(status: &v1::VmStatus) -> phase::Report {
    let image = status.image.clone().unwrap_or_default();
    let network = status.network.clone().unwrap_or_default();
    let timings = status.timings.unwrap_or_default();
    let probes = status.probes.clone().unwrap_or_default();
    phase::Report {
        attempt: status.attempt,
        state: state(status.state()),
        failure: status.failure.as_ref().map(failure),
        exit: status.exit.as_ref().map(exit),
        image_ready: image.ready,
        image_digest: image.digest,
        pulled_bytes: image.pulled_bytes,
        total_bytes: image.total_bytes,
        network_ready: network.ready,
        network_message: network.message,
        guest_connected: status.guest.as_ref().is_some_and(|guest| guest.connected),
        accelerator: status.vmm.as_ref().map(|vmm| vmm.accelerator.clone()).unwrap_or_default(),
        accepted_at: timings.accepted.map(|time| time.seconds),
        workload_started_at: timings.workload_started.map(|time| time.seconds),
        startup: probes.startup.map(probe),
        readiness: probes.readiness.map(probe),
        liveness: probes.liveness.map(probe),
    }
}

fn state(state: VmState) -> phase::State {
    match state {
        VmState::Unspecified | VmState::Pending => phase::State::Pending,
        VmState::Pulling => phase::State::Pulling,
        VmState::Preparing => phase::State::Preparing,
        VmState::Booting => phase::State::Booting,
        VmState::Configuring => phase::State::Configuring,
        VmState::Running => phase::State::Running,
        VmState::Stopping => phase::State::Stopping,
        VmState::Stopped => phase::State::Stopped,
        VmState::Failed => phase::State::Failed,
    }
}

fn failure(failure: &v1::Failure) -> phase::Failure {
    phase::Failure {
        reason: reason(failure.reason()),
        message: failure.message.clone(),
        retrying: failure.retrying,
    }
}

fn reason(reason: FailureReason) -> phase::FailureReason {
    match reason {
        FailureReason::InvalidSpec => phase::FailureReason::InvalidSpec,
        FailureReason::ImageNotFound => phase::FailureReason::ImageNotFound,
        FailureReason::ImagePullUnauthorized => phase::FailureReason::ImagePullUnauthorized,
        FailureReason::ImagePullFailed => phase::FailureReason::ImagePullFailed,
        FailureReason::ImageInvalid => phase::FailureReason::ImageInvalid,
        FailureReason::DiskFailed => phase::FailureReason::DiskFailed,
        FailureReason::NetworkFailed => phase::FailureReason::NetworkFailed,
        FailureReason::VmmStartFailed => phase::FailureReason::VmmStartFailed,
        FailureReason::VmmCrashed => phase::FailureReason::VmmCrashed,
        FailureReason::KernelPanic => phase::FailureReason::KernelPanic,
        FailureReason::GuestUnreachable => phase::FailureReason::GuestUnreachable,
        FailureReason::WorkloadStartFailed => phase::FailureReason::WorkloadStartFailed,
        FailureReason::HostRebooted => phase::FailureReason::HostRebooted,
        FailureReason::VmmOomKilled => phase::FailureReason::VmmOomKilled,
        FailureReason::GuestConfigureFailed => phase::FailureReason::GuestConfigureFailed,
        FailureReason::Unspecified | FailureReason::Internal => phase::FailureReason::Internal,
    }
}

fn exit(exit: &v1::WorkloadExit) -> phase::Exit {
    let status = exit.status.clone().unwrap_or_default();
    phase::Exit {
        code: status.code,
        signal: status.signal,
        oom_killed: status.oom_killed,
        message: status.message,
        finished_at: exit.finished_at.map(|time| time.seconds),
    }
}

fn probe(result: v1::ProbeResult) -> phase::ProbeResult {
    phase::ProbeResult { success: result.success, message: result.message }
}
