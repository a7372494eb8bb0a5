//! Writes to the API: ImpVM statuses by server-side apply, and events.

use imp_api::{ImpVM, ImpVMStatus, names};
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Resource as _, ResourceExt as _};
use serde_json::json;

use crate::context::ClientHandle;
use crate::metrics::Metrics;

/// Longest note of an event in bytes, by the events API.
const MAX_NOTE: usize = 1024;

/// Writes the agent's part of ImpVM statuses.
#[derive(Clone, Debug)]
pub struct StatusWriter {
    client: ClientHandle,
    metrics: Metrics,
}

impl StatusWriter {
    /// A writer over `client`.
    #[must_use]
    pub fn new(client: ClientHandle, metrics: Metrics) -> Self {
        Self { client, metrics }
    }

    /// Applies `status` to `vm` as the agent's, provided that the object is still the one that was decided on: the
    /// operator may have begun a new attempt, of which this status knows nothing.
    ///
    /// # Errors
    /// 409 when the object has changed since; anything that the API server refuses.
    pub async fn apply(&self, vm: &ImpVM, status: &ImpVMStatus) -> kube::Result<ImpVM> {
        let api = Api::<ImpVM>::namespaced(self.client.0.clone(), &vm.namespace().unwrap_or_default());
        let body = json!({
            "apiVersion": ImpVM::api_version(&()),
            "kind": ImpVM::kind(&()),
            "metadata": { "name": vm.name_any(), "uid": vm.uid(), "resourceVersion": vm.resource_version() },
            "status": status,
        });
        let params = PatchParams::apply(names::field_manager::AGENT).force();
        let result = api.patch_status(&vm.name_any(), &params, &Patch::Apply(body)).await;
        self.metrics.wrote("ImpVM", result.is_ok());
        result
    }
}

/// Records events as the agent's.
#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
    metrics: Metrics,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Events")
    }
}

impl Events {
    /// Events of the agent on `node`.
    #[must_use]
    pub fn new(client: ClientHandle, node: &str, metrics: Metrics) -> Self {
        let reporter = Reporter { controller: names::AGENT_NAME.to_owned(), instance: Some(node.to_owned()) };
        Self { recorder: Recorder::new(client.0, reporter), metrics }
    }

    /// Records an event about `vm`. One that cannot be written is logged: the status says the same.
    pub async fn record(&self, vm: &ImpVM, warning: bool, reason: &str, note: &str) {
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note[..note.floor_char_boundary(MAX_NOTE)].to_owned()),
            action: reason.to_owned(),
            secondary: None,
        };
        let result = self.recorder.publish(&event, &vm.object_ref(&())).await;
        self.metrics.wrote("Event", result.is_ok());
        imp_killpoint::agent("event-recorded");
        if let Err(error) = result {
            tracing::warn!(error = &error as &dyn std::error::Error, vm = %vm.name_any(), reason, "an event was not recorded");
        }
    }
}
