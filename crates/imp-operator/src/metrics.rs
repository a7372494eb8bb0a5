//! What Prometheus is told. No label grows with the number of objects.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use imp_api::VMPhase;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    resource: String,
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ControllerLabel {
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeApiLabels {
    route: &'static str,
    code: u16,
}

/// The operator's metrics, all with prefix `imp_`. Share it by `Arc`.
#[derive(Debug)]
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    reconciles: Family<ControllerLabel, Histogram, fn() -> Histogram>,
    reconcile_errors: Family<ControllerLabel, Counter>,
    vms: Family<PhaseLabel, Gauge>,
    scheduling: Histogram,
    node_api: Family<NodeApiLabels, Counter>,
    leading: Gauge,
    registry: Mutex<Registry>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("imp");
        let requests = Family::<RequestLabels, Counter>::default();
        // 1 ms to 16 s.
        let reconciles: Family<_, _, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.001, 2.0, 15)));
        let reconcile_errors = Family::<ControllerLabel, Counter>::default();
        let vms = Family::<PhaseLabel, Gauge>::default();
        // 5 ms to 82 s.
        let scheduling = Histogram::new(exponential_buckets(0.005, 2.0, 15));
        let node_api = Family::<NodeApiLabels, Counter>::default();
        let leading = Gauge::default();
        registry.register(
            "api_requests",
            "Requests to the API server by method, resource and HTTP status; status 0: no answer",
            requests.clone(),
        );
        registry.register("reconcile_seconds", "Seconds that a reconciliation took", reconciles.clone());
        registry.register("reconcile_errors", "Reconciliations that failed", reconcile_errors.clone());
        registry.register("vms", "ImpVMs by phase, counted by the leader", vms.clone());
        registry.register(
            "scheduling_seconds",
            "Seconds from the creation of an ImpVM to its binding",
            scheduling.clone(),
        );
        registry.register(
            "node_api_requests",
            "Requests of agents by route and HTTP status",
            node_api.clone(),
        );
        registry.register("leading", "1 while this replica leads", leading.clone());
        registry.register(
            "build",
            "Version of this program",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        Self {
            requests,
            reconciles,
            reconcile_errors,
            vms,
            scheduling,
            node_api,
            leading,
            registry: Mutex::new(registry),
        }
    }
}

impl Metrics {
    /// Counts a request to the API server; `code` 0: there was no answer.
    pub fn requested(&self, method: &http::Method, path: &str, code: u16) {
        let labels =
            RequestLabels { method: method.as_str().to_owned(), resource: resource(path).to_owned(), code };
        self.requests.get_or_create(&labels).inc();
    }

    /// Takes the time and outcome of one reconciliation of the controller called `controller`.
    pub fn reconciled(&self, controller: &'static str, took: Duration, ok: bool) {
        let label = ControllerLabel { controller };
        self.reconciles.get_or_create(&label).observe(took.as_secs_f64());
        let errors = self.reconcile_errors.get_or_create(&label);
        if !ok {
            errors.inc();
        }
    }

    /// Sets the numbers of VMs by phase from the phases of all VMs.
    pub fn count_vms(&self, phases: impl IntoIterator<Item = VMPhase>) {
        let mut counts: HashMap<&'static str, i64> = PHASES.iter().map(|phase| (phase.as_str(), 0)).collect();
        for phase in phases {
            *counts.entry(phase.as_str()).or_default() += 1;
        }
        for (phase, count) in counts {
            self.vms.get_or_create(&PhaseLabel { phase }).set(count);
        }
    }

    /// Takes the time from a VM's creation to its binding.
    pub fn scheduled(&self, after: Duration) {
        self.scheduling.observe(after.as_secs_f64());
    }

    /// Counts a request of an agent to the node API.
    pub fn node_api(&self, route: &'static str, code: u16) {
        self.node_api.get_or_create(&NodeApiLabels { route, code }).inc();
    }

    /// Whether this replica leads.
    pub fn set_leading(&self, leading: bool) {
        self.leading.set(leading.into());
    }

    /// Everything in OpenMetrics' text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = prometheus_client::encoding::text::encode(&mut text, &registry) {
            tracing::error!(error = &error as &dyn std::error::Error, "metrics cannot be rendered");
        }
        text
    }
}

const PHASES: [VMPhase; 11] = [
    VMPhase::Pending,
    VMPhase::Scheduled,
    VMPhase::Starting,
    VMPhase::Running,
    VMPhase::Terminating,
    VMPhase::Succeeded,
    VMPhase::Failed,
    VMPhase::RetryExhausted,
    VMPhase::Suspending,
    VMPhase::Suspended,
    VMPhase::Resuming,
];

/// The resource in a path of the API server, as `impvms`; what is no resource is its first segment, as `version`.
fn resource(path: &str) -> &str {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let rest = match parts.as_slice() {
        ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
        _ => return parts.first().copied().unwrap_or_default(),
    };
    match rest {
        ["namespaces", _, resource, ..] => resource,
        [resource, ..] => resource,
        [] => parts.first().copied().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_found_in_paths() {
        for (path, expected) in [
            ("/api/v1/nodes", "nodes"),
            ("/api/v1/namespaces/default/secrets/s", "secrets"),
            ("/api/v1/namespaces/default", "namespaces"),
            ("/apis/imp.dev/v1alpha1/impvms", "impvms"),
            ("/apis/imp.dev/v1alpha1/namespaces/default/impvms/a/status", "impvms"),
            ("/apis/imp.dev/v1alpha1", "apis"),
            ("/version", "version"),
        ] {
            assert_eq!(resource(path), expected, "{path}");
        }
    }

    #[test]
    fn what_was_told_is_rendered() {
        let metrics = Metrics::default();
        metrics.requested(&http::Method::PATCH, "/apis/imp.dev/v1alpha1/namespaces/d/impvms/a/status", 200);
        metrics.reconciled("vm", Duration::from_millis(3), false);
        metrics.count_vms([VMPhase::Running, VMPhase::Running]);
        metrics.count_vms([VMPhase::Running]);
        metrics.scheduled(Duration::from_millis(20));
        let text = metrics.render();
        for line in [
            "imp_api_requests_total{method=\"PATCH\",resource=\"impvms\",code=\"200\"} 1",
            "imp_reconcile_errors_total{controller=\"vm\"} 1",
            "imp_reconcile_seconds_count{controller=\"vm\"} 1",
            "imp_vms{phase=\"Running\"} 1",
            "imp_vms{phase=\"Failed\"} 0",
            "imp_scheduling_seconds_count 1",
            "imp_build_info{version=",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
