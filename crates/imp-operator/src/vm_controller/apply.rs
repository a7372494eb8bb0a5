//! Writes: the finalizer, the operator's part of the status, events, deletion. Nothing that changes nothing.

use super::build::{self, Note};
use imp_api::{
    ImpVM, ImpVMStatus,
    names::{self, annotation, field_manager},
};
use imp_killpoint::operator as killpoint;
use kube::{
    Api, Client, Resource as _, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use serde_json::json;

/// Longest note of an event in bytes, by the events API.
const MAX_NOTE: usize = 1024;

pub(super) struct Apply {
    client: Client,
    recorder: Recorder,
}

impl Apply {
    pub(super) fn new(client: Client) -> Self {
        let reporter = Reporter { controller: names::OPERATOR_NAME.to_owned(), instance: None };
        Self { recorder: Recorder::new(client.clone(), reporter), client }
    }

    fn api(&self, vm: &ImpVM) -> Api<ImpVM> {
        Api::namespaced(self.client.clone(), &vm.namespace().unwrap_or_default())
    }

    /// Adds our finalizer and takes the earlier Imp's off. Returns whether there was anything to do.
    pub(super) async fn add_finalizer(&self, vm: &ImpVM) -> kube::Result<bool> {
        let ours = |f: &String| f == names::VM_FINALIZER;
        let legacy = |f: &String| f == names::LEGACY_VM_FINALIZER;
        if vm.finalizers().iter().any(ours) && !vm.finalizers().iter().any(legacy) {
            return Ok(false);
        }
        let mut finalizers: Vec<String> =
            vm.finalizers().iter().filter(|f| !legacy(f) && !ours(f)).cloned().collect();
        finalizers.push(names::VM_FINALIZER.to_owned());
        self.set_finalizers(vm, &finalizers).await?;
        killpoint("finalizer-added");
        Ok(true)
    }

    /// Takes our finalizers off, so that the object goes.
    pub(super) async fn remove_finalizer(&self, vm: &ImpVM) -> kube::Result<()> {
        let ours = |f: &&String| *f != names::VM_FINALIZER && *f != names::LEGACY_VM_FINALIZER;
        let finalizers: Vec<String> = vm.finalizers().iter().filter(ours).cloned().collect();
        if finalizers.len() == vm.finalizers().len() {
            return Ok(());
        }
        self.set_finalizers(vm, &finalizers).await?;
        killpoint("finalizer-removed");
        Ok(())
    }

    async fn set_finalizers(&self, vm: &ImpVM, finalizers: &[String]) -> kube::Result<()> {
        // The version makes sure that nobody's finalizer is lost.
        let patch = json!({"metadata": {
            "resourceVersion": vm.resource_version(), "uid": vm.uid(), "finalizers": finalizers,
        }});
        let params =
            PatchParams { field_manager: Some(field_manager::OPERATOR.to_owned()), ..Default::default() };
        self.api(vm).patch(&vm.name_any(), &params, &Patch::Merge(patch)).await.map(drop)
    }

    /// Takes the annotation off that a person put on to have the retries counted anew.
    pub(super) async fn remove_reset_annotation(&self, vm: &ImpVM) -> kube::Result<()> {
        let patch = json!({"metadata": {"uid": vm.uid(), "annotations": {annotation::RESET_RETRIES: null}}});
        let params =
            PatchParams { field_manager: Some(field_manager::OPERATOR.to_owned()), ..Default::default() };
        self.api(vm).patch(&vm.name_any(), &params, &Patch::Merge(patch)).await?;
        killpoint("reset-taken");
        Ok(())
    }

    /// Applies the operator's part of the status, if it differs from what the object says. The version of the object goes
    /// with it: what the agent wrote meanwhile is looked at first.
    pub(super) async fn status(&self, vm: &ImpVM, status: ImpVMStatus) -> kube::Result<bool> {
        if build::own(vm.status.as_ref()) == status {
            return Ok(false);
        }
        killpoint("status-decided");
        let body = json!({
            "apiVersion": ImpVM::api_version(&()),
            "kind": ImpVM::kind(&()),
            "metadata": {"name": vm.name_any(), "uid": vm.uid(), "resourceVersion": vm.resource_version()},
            "status": status,
        });
        let params = PatchParams::apply(field_manager::OPERATOR).force();
        self.api(vm).patch_status(&vm.name_any(), &params, &Patch::Apply(body)).await?;
        killpoint("status-written");
        Ok(true)
    }

    pub(super) async fn delete(&self, vm: &ImpVM) -> kube::Result<()> {
        let preconditions = Preconditions { uid: vm.uid(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        self.api(vm).delete(&vm.name_any(), &params).await?;
        killpoint("expired-deleted");
        Ok(())
    }

    /// Records an event. One that cannot be written is logged: the status says the same.
    pub(super) async fn event(&self, vm: &ImpVM, note: &Note) {
        let event = Event {
            type_: if note.warning { EventType::Warning } else { EventType::Normal },
            reason: note.reason.as_str().to_owned(),
            note: Some(note.text[..note.text.floor_char_boundary(MAX_NOTE)].to_owned()),
            action: note.action.as_str().to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &vm.object_ref(&())).await {
            let name = vm.name_any();
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                name,
                reason = note.reason.as_str(),
                "an event was not recorded"
            );
        }
        killpoint("event-recorded");
    }
}
