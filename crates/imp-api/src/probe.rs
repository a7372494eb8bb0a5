//! Probes and the HTTP check.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::patterns;

/// What tells whether the workload started, is ready, is healthy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProbeSpec {
    /// Shows as condition Started. The other probes begin once it succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub startup_probe: Option<Probe>,
    /// Decides condition Ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub readiness_probe: Option<Probe>,
    /// Shows as condition Healthy. It never restarts the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub liveness_probe: Option<Probe>,
    /// HTTP check from outside the guest, against the VM's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_check: Option<HttpCheckSpec>,
}

/// One probe, run inside the guest by its agent. Exactly one of exec and http is set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.exec) != has(self.http)").message("exactly one of exec and http must be set"))]
pub struct Probe {
    /// Runs a command in the guest; success is exit code 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<ExecAction>,
    /// GET on 127.0.0.1 inside the guest; success is a status from 200 to 399.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpGetAction>,
    /// Seconds from the workload's start to the first try.
    #[serde(default)]
    #[schemars(range(min = 0, max = 86400))]
    pub initial_delay_seconds: i32,
    /// Seconds between two tries.
    #[serde(default = "ten")]
    #[schemars(range(min = 1, max = 86400))]
    pub period_seconds: i32,
    /// Seconds after which a try counts as failed.
    #[serde(default = "five")]
    #[schemars(range(min = 1, max = 3600))]
    pub timeout_seconds: i32,
    /// Failures in a row after which the condition becomes False.
    #[serde(default = "three")]
    #[schemars(range(min = 1, max = 10000))]
    pub failure_threshold: i32,
}

/// A command to run in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExecAction {
    /// Program and arguments; no shell is involved.
    #[schemars(length(min = 1))]
    pub command: Vec<String>,
}

/// An HTTP request inside the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpGetAction {
    /// Path of the request.
    #[schemars(length(max = 2048))]
    pub path: String,
    /// TCP port on 127.0.0.1.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
}

/// An HTTP check of a VM from outside the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.enabled) && self.enabled) || has(self.port)").message("port is required when the check is enabled").field_path(".port"))]
pub struct HttpCheckSpec {
    /// Turns the check on. Set to false on a VM it turns the cluster's default check off.
    #[serde(default)]
    pub enabled: bool,
    /// Path of the request.
    #[serde(default = "healthz")]
    #[schemars(length(max = 2048), regex(pattern = patterns::HTTP_PATH))]
    pub path: String,
    /// TCP port of the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// Seconds between two tries.
    #[serde(default = "ten")]
    #[schemars(range(min = 1, max = 86400))]
    pub interval_seconds: i32,
    /// Failures in a row after which Ready becomes False.
    #[serde(default = "three")]
    #[schemars(range(min = 1, max = 10000))]
    pub failure_threshold: i32,
}

fn three() -> i32 {
    3
}

fn five() -> i32 {
    5
}

fn ten() -> i32 {
    10
}

fn healthz() -> String {
    "/healthz".into()
}
