//! What Prometheus is told.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use imp_api::VMPhase;
use imp_proto::v1::{self, VmState};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabel {
    kind: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StreamLabel {
    kind: &'static str,
}

/// The agent's metrics. No label grows with the number of VMs.
#[derive(Clone, Debug)]
pub struct Metrics {
    vms: Family<PhaseLabel, Gauge>,
    writes: Family<WriteLabel, Counter>,
    streams: Family<StreamLabel, Counter>,
    boot: Histogram,
    registry: Arc<Mutex<Registry>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("imp_agent");
        let vms = Family::<PhaseLabel, Gauge>::default();
        let writes = Family::<WriteLabel, Counter>::default();
        let streams = Family::<StreamLabel, Counter>::default();
        // 50 ms to 100 s: a restore to an emulated boot.
        let boot = Histogram::new(exponential_buckets(0.05, 2.0, 12));
        registry.register("vms", "VMs bound to this node by phase", vms.clone());
        registry.register("api_writes", "Writes to the API server by kind and result", writes.clone());
        registry.register("streams", "Streams opened by the operator by kind", streams.clone());
        registry.register(
            "boot_seconds",
            "Seconds from taking a VM up to the start of its workload",
            boot.clone(),
        );
        Self { vms, writes, streams, boot, registry: Arc::new(Mutex::new(registry)) }
    }
}

impl Metrics {
    /// Counts the VMs by phase.
    pub fn count(&self, phases: impl Iterator<Item = VMPhase>) {
        let mut counts: HashMap<&'static str, i64> = HashMap::new();
        for phase in phases {
            *counts.entry(phase.as_str()).or_default() += 1;
        }
        for phase in ["Scheduled", "Starting", "Running", "Terminating", "Succeeded", "Failed"] {
            counts.entry(phase).or_default();
        }
        for (phase, count) in counts {
            self.vms.get_or_create(&PhaseLabel { phase }).set(count);
        }
    }

    /// Takes the boot time of a VM whose start was watched.
    pub fn observe(&self, before: Option<&v1::VmStatus>, now: &v1::VmStatus) {
        let started =
            before.is_some_and(|before| before.state() < VmState::Running) && now.state() == VmState::Running;
        let timings = now.timings.unwrap_or_default();
        if let (true, Some(accepted), Some(workload)) = (started, timings.accepted, timings.workload_started)
        {
            #[expect(clippy::cast_precision_loss, reason = "seconds of a boot")]
            let seconds = (workload.seconds - accepted.seconds) as f64
                + f64::from(workload.nanos - accepted.nanos) / 1e9;
            self.boot.observe(seconds.max(0.0));
        }
    }

    /// Counts a write to the API server.
    pub fn wrote(&self, kind: &'static str, ok: bool) {
        self.writes.get_or_create(&WriteLabel { kind, result: if ok { "ok" } else { "error" } }).inc();
    }

    /// Counts a stream.
    pub fn opened(&self, kind: &'static str) {
        self.streams.get_or_create(&StreamLabel { kind }).inc();
    }

    /// Everything in Prometheus' text format.
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
