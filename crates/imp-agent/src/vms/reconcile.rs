//! One pass over one VM.

use std::sync::Arc;
use std::time::Duration;

use imp_api::ImpVM;
use imp_core::phase::{Blocked, Observation};
use imp_proto::v1;
use kube::{Api, ResourceExt as _};
use tokio::time::Instant;

use super::{Effective, Memory, Put, publish};
use crate::context::Context;
use crate::references::{self, ReferenceError};
use crate::runtime::Client;
use crate::secrets::SecretsError;
use crate::spec::{self, References, SpecError};
use crate::status;

/// Longest pause after failed passes.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// What a pass sees.
#[derive(Debug)]
pub(super) struct View {
    /// UID of the VM.
    pub uid: String,
    /// Its object, while it is bound to this node.
    pub object: Option<Arc<ImpVM>>,
    /// What the runtime says of it.
    pub report: Option<v1::VmStatus>,
    /// The runtime said that nothing is left of it.
    pub removed: bool,
    /// What the last pass left.
    pub memory: Memory,
    /// The runtime, once it has told all its VMs.
    pub connection: Option<(u64, Client)>,
    /// A complete list of the API has been seen.
    pub api_synced: bool,
}

/// What a pass leaves.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// For the next pass.
    pub memory: Memory,
    /// The object as the last write left it.
    pub object: Option<ImpVM>,
    /// When to pass again if nothing happens.
    pub again: Option<Duration>,
}

/// Why a VM could not be handed to the runtime.
#[derive(Debug, thiserror::Error)]
enum PutError {
    #[error(transparent)]
    References(#[from] ReferenceError),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    #[error("the runtime refused the VM: {}", .0.message())]
    Runtime(Box<tonic::Status>),
}

impl PutError {
    /// What the object says of it; `None`: it is between agent and runtime, and no business of the VM's.
    fn blocked(&self) -> Option<Blocked> {
        let reason = match self {
            Self::References(ReferenceError::NotFound { .. }) => "ReferenceNotFound",
            Self::References(ReferenceError::Read { .. }) => return None,
            Self::Spec(SpecError::Invalid(invalid)) if invalid.is_missing_reference() => "ReferenceNotFound",
            Self::Spec(_) => "SpecInvalid",
            Self::Secrets(_) => "SecretUnavailable",
            Self::Runtime(status) if status.code() == tonic::Code::InvalidArgument => "InvalidSpec",
            Self::Runtime(_) => return None,
        };
        Some(Blocked { reason, message: crate::error_chain(self) })
    }
}

/// Brings one VM a step nearer to what is wanted.
pub(super) async fn reconcile(context: &Context, view: View) -> Outcome {
    let Some(vm) = view.object.clone() else { return orphan(context, view).await };
    let mut memory = Memory { orphaned: None, ..view.memory.clone() };
    let mut view = View { memory: Memory::default(), ..view };
    let released = if vm.metadata.deletion_timestamp.is_some() {
        Some(delete(&mut view, &vm, &mut memory).await)
    } else {
        put(context, &mut view, &vm, &mut memory).await;
        None
    };
    let failures = memory.failures;
    let mut outcome = publish::publish(context, &view, &vm, released, memory).await;
    if outcome.again.is_none() && failures > 0 {
        outcome.again = Some(backoff(failures));
    }
    outcome
}

/// From a quarter of a second, doubled with each failure.
pub(super) fn backoff(failures: u32) -> Duration {
    (Duration::from_millis(125) * 2_u32.saturating_pow(failures.min(16))).min(MAX_BACKOFF)
}

/// Puts the VM unless the runtime has this wish on this connection already.
async fn put(context: &Context, view: &mut View, vm: &ImpVM, memory: &mut Memory) {
    let Some((epoch, client)) = &view.connection else { return };
    let wish = Put {
        epoch: *epoch,
        generation: vm.metadata.generation.unwrap_or_default(),
        attempt: spec::attempt(vm),
    };
    if memory.put == Some(wish) {
        return;
    }
    if publish::is_over(vm) {
        // This attempt is over. Were it put, a runtime that lost its journal would boot it a second time.
        return;
    }
    if view.report.is_none() && publish::was_running(vm) {
        view.report = Some(lost(vm));
        return;
    }
    let taken = view
        .report
        .as_ref()
        .is_some_and(|r| r.observed_generation == wish.generation && r.attempt == wish.attempt);
    if taken && !spec::needs_secrets(vm) {
        memory.put = Some(wish);
        if memory.effective.is_none() {
            // After a restart of the agent. Without it the VM's own fields say enough, so a failure is no matter.
            let references = references::fetch(&context.client, vm).await.unwrap_or_default();
            memory.effective = effective(vm, &references).ok();
        }
        return;
    }
    match hand_over(context, client.clone(), vm, memory).await {
        Ok(status) => {
            memory.put = Some(wish);
            (memory.failures, memory.blocked) = (0, None);
            // The watch may have told more meanwhile, but never less than this answer on the next pass.
            if view.report.is_none() {
                view.report = status;
            }
        }
        Err(error) => {
            memory.failures += 1;
            memory.blocked = error.blocked();
            tracing::warn!(error = &error as &dyn std::error::Error, vm = %vm.name_any(), namespace = vm.namespace(), "the VM cannot be handed to the runtime; trying again");
        }
    }
}

/// What the status needs to know of template and class.
fn effective(vm: &ImpVM, references: &References) -> Result<Effective, SpecError> {
    let template = references.template.as_ref().map(|template| &template.spec);
    let effective =
        imp_api::effective(&vm.spec, references.class.as_ref().map(|class| &class.spec), template)?;
    Ok(Effective { image: effective.image, probes: effective.probes })
}

async fn hand_over(
    context: &Context,
    mut client: Client,
    vm: &ImpVM,
    memory: &mut Memory,
) -> Result<Option<v1::VmStatus>, PutError> {
    let references = references::fetch(&context.client, vm).await?;
    memory.effective = Some(effective(vm, &references)?);
    let spec = spec::build(vm, &references)?;
    let secrets = context.secrets.of(vm).await?;
    imp_killpoint::agent("secrets-got");
    let request = v1::PutVmRequest { spec: Some(spec), secrets };
    let response = client.put_vm(request).await.map_err(|status| PutError::Runtime(Box::new(status)))?;
    imp_killpoint::agent("vm-put");
    Ok(response.into_inner().status)
}

/// What is reported of a VM that ran and that the runtime does not know: its attempt is over, and is not begun again.
fn lost(vm: &ImpVM) -> v1::VmStatus {
    v1::VmStatus {
        attempt: spec::attempt(vm),
        state: v1::VmState::Failed.into(),
        failure: Some(v1::Failure {
            reason: v1::FailureReason::Unspecified.into(),
            message: publish::LOST.to_owned(),
            ..v1::Failure::default()
        }),
        ..v1::VmStatus::default()
    }
}

/// Asks the runtime to remove the VM. True: nothing is left.
async fn delete(view: &mut View, vm: &ImpVM, memory: &mut Memory) -> bool {
    memory.blocked = None;
    if view.removed || memory.gone {
        return true;
    }
    let Some((epoch, client)) = &view.connection else { return false };
    if memory.deletion == Some(*epoch) || status::is_released(vm) {
        return status::is_released(vm);
    }
    let vm_ref = v1::VmRef {
        uid: view.uid.clone(),
        namespace: vm.namespace().unwrap_or_default(),
        name: vm.name_any(),
    };
    match client.clone().delete_vm(v1::DeleteVmRequest { vm: Some(vm_ref), grace_seconds: None }).await {
        Ok(response) => {
            imp_killpoint::agent("delete-asked");
            memory.failures = 0;
            memory.deletion = Some(*epoch);
            memory.gone = response.into_inner().gone;
            memory.gone
        }
        Err(error) => {
            memory.failures += 1;
            tracing::warn!(error = &error as &dyn std::error::Error, vm = %vm.name_any(), namespace = vm.namespace(), "the runtime refused to delete the VM; trying again");
            false
        }
    }
}

/// The runtime has a VM that the API does not list for this node. It is deleted only when the API, asked for this very
/// object, says that it is gone or another's: an API server that is away or forgetful must not end VMs.
async fn orphan(context: &Context, view: View) -> Outcome {
    let mut memory = view.memory;
    let vm_ref = view.report.as_ref().and_then(|report| report.vm.clone());
    let (Some(vm_ref), Some((epoch, mut client)), true) = (vm_ref, view.connection, view.api_synced) else {
        return Outcome { memory, ..Outcome::default() };
    };
    if memory.deletion == Some(epoch) {
        return Outcome { memory, ..Outcome::default() };
    }
    let since = *memory.orphaned.get_or_insert_with(Instant::now);
    let wait = context.timings.orphan_grace.saturating_sub(since.elapsed());
    if !wait.is_zero() {
        return Outcome { memory, again: Some(wait), ..Outcome::default() };
    }
    let api = Api::<ImpVM>::namespaced(context.client.0.clone(), &vm_ref.namespace);
    let result = match api.get_opt(&vm_ref.name).await {
        Ok(Some(vm)) if is_ours(&vm, &vm_ref.uid, &context.node) => {
            tracing::info!(
                vm = vm_ref.name,
                namespace = vm_ref.namespace,
                "the API lists the VM elsewhere but says it is ours; it is kept"
            );
            return Outcome { memory, again: Some(MAX_BACKOFF), ..Outcome::default() };
        }
        Ok(_) => {
            tracing::info!(
                vm = vm_ref.name,
                namespace = vm_ref.namespace,
                uid = vm_ref.uid,
                "the VM's object is gone or bound elsewhere; it is removed from the node"
            );
            client
                .delete_vm(v1::DeleteVmRequest { vm: Some(vm_ref), grace_seconds: None })
                .await
                .map_err(|status| status.to_string())
        }
        Err(error) => Err(error.to_string()),
    };
    match result {
        Ok(_) => {
            imp_killpoint::agent("orphan-deleted");
            memory.deletion = Some(epoch);
        }
        Err(error) => {
            memory.failures += 1;
            tracing::warn!(
                error,
                uid = view.uid,
                "whether the VM is still wanted cannot be found out; it is kept for now"
            );
        }
    }
    let again = (memory.deletion != Some(epoch)).then(|| backoff(memory.failures));
    Outcome { memory, again, ..Outcome::default() }
}

fn is_ours(vm: &ImpVM, uid: &str, node: &str) -> bool {
    let bound = vm.status.as_ref().and_then(|status| status.node_name.as_deref());
    vm.metadata.uid.as_deref() == Some(uid) && bound == Some(node)
}

impl View {
    /// What the phase decider is to see, if anything.
    pub(super) fn observation(&self, memory: &Memory) -> Option<Observation> {
        if let Some(report) = &self.report {
            return Some(Observation::Report(Box::new(publish::report_of(report))));
        }
        memory.blocked.clone().map(Observation::Blocked)
    }
}
