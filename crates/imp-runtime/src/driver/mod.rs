//! One task for each VM: does what `imp_core::request_queue` says, step by step, and goes on after a crash where the journal
//! says it was.

mod failure;
mod finish;
mod guest;
mod prepare;
mod probes;
mod session;

use crate::{
    journal::Progress,
    vm::{Vm, now},
};
use failure::Fault;
use imp_core::request_queue::Action;
use imp_killpoint::runtime as killpoint;
use imp_proto::v1 as pb;
use std::{sync::Arc, time::Duration};
use tracing::Instrument as _;

/// First and longest pause before something that must succeed is tried again.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// How an attempt ended.
#[derive(Debug)]
enum Outcome {
    /// The workload ended.
    Exited(pb::WorkloadExit),
    /// Something failed.
    Failed(Fault),
    /// It was stopped before the workload ran, or ended without telling how.
    Stopped,
}

/// Drives a VM until nothing is left of it.
pub(crate) async fn drive(vm: Arc<Vm>) {
    let name = vm.spec().vm.unwrap_or_default();
    let span = tracing::info_span!("vm", namespace = name.namespace, name = name.name, uid = name.uid);
    steps(&vm).instrument(span).await;
}

async fn steps(vm: &Vm) {
    let mut wishes = vm.wishes();
    let mut pause = RETRY.0;
    loop {
        wishes.mark_unchanged();
        let result = match vm.action() {
            Action::Begin(number) => match vm.begin(number) {
                Ok(()) => {
                    killpoint("attempt-journaled");
                    attempt(vm).await
                }
                Err(e) => Err(Fault::from(e)),
            },
            Action::Continue | Action::Stop => attempt(vm).await,
            Action::Remove => match finish::remove(vm).await {
                Ok(()) => return,
                Err(fault) => Err(fault),
            },
            Action::Wait => {
                tell_waiting(vm);
                if wishes.changed().await.is_err() {
                    return;
                }
                Ok(())
            }
        };
        match result {
            Ok(()) => pause = RETRY.0,
            Err(fault) => {
                tracing::error!(%fault, "this is tried again");
                vm.update(|status| status.failure = Some(fault.retrying()));
                // Told of a new wish, or after a pause: what failed (a full disk, a busy device) does not tell.
                let _ = tokio::time::timeout(pause, wishes.changed()).await;
                pause = (pause * 2).min(RETRY.1);
            }
        }
    }
}

/// Nothing runs and nothing is about to: the state is final, also where a crash came between freeing and saying so.
fn tell_waiting(vm: &Vm) {
    vm.update(|status| {
        let failed = status.exit.is_none() && status.failure.as_ref().is_some_and(|f| !f.retrying);
        let state = if failed { pb::VmState::Failed } else { pb::VmState::Stopped };
        if status.state() != state {
            tracing::info!(state = state.as_str_name(), "ended");
        }
        status.state = state.into();
    });
}

/// Takes the attempt that was begun to its end, and frees what was made for it.
async fn attempt(vm: &Vm) -> Result<(), Fault> {
    let ended = matches!(vm.record().attempt.map(|a| a.progress), Some(Progress::Ended));
    if !ended {
        let outcome = session::live(vm).await;
        vm.set_guest(None);
        tell(vm, outcome);
        vm.progress(Progress::Ended)?;
    }
    vm.log.close();
    finish::free(vm).await?;
    vm.progress(Progress::Freed)?;
    killpoint("ended-journaled");
    // Only now: who hears of the end may begin the next attempt, or take the address for another VM.
    tell_waiting(vm);
    Ok(())
}

fn tell(vm: &Vm, outcome: Outcome) {
    vm.update(|status| {
        status.vmm.get_or_insert_default().pid = 0;
        status.probes = None;
        match outcome {
            Outcome::Exited(mut exit) => {
                exit.finished_at.get_or_insert_with(now);
                status.exit = Some(exit);
                status.failure = None;
                status.state = pb::VmState::Stopping.into();
            }
            Outcome::Failed(fault) => {
                tracing::warn!(%fault, "the attempt failed");
                status.failure = Some(fault.last());
                status.exit = None;
                status.state = pb::VmState::Stopping.into();
            }
            Outcome::Stopped => {
                status.failure = None;
                status.state = pb::VmState::Stopping.into();
            }
        }
    });
}
