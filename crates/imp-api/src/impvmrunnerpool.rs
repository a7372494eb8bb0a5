//! ImpVMRunnerPool: VMs that run jobs of a CI system.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{DurationString, patterns};

/// Which CI system is served, by which VMs, and how many of them.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "imp.dev",
    version = "v1alpha1",
    kind = "ImpVMRunnerPool",
    plural = "impvmrunnerpools",
    singular = "impvmrunnerpool",
    shortname = "imprp",
    category = "imp",
    category = "all",
    namespaced,
    status = "ImpVMRunnerPoolStatus",
    derive = "PartialEq",
    doc = "VMs that run jobs of a CI system, one VM a job. Not acted on yet.",
    scale(
        spec_replicas_path = ".spec.scaling.minIdle",
        status_replicas_path = ".status.activeCount",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Platform", type_ = "string", json_path = ".spec.platform.type"),
    printcolumn(name = "Template", type_ = "string", json_path = ".spec.templateName"),
    printcolumn(name = "Idle", type_ = "integer", json_path = ".status.idleCount"),
    printcolumn(name = "Active", type_ = "integer", json_path = ".status.activeCount"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.platform.type != 'github-actions' || has(self.scaling)").message("scaling is required for github-actions").field_path(".scaling").reason(Reason::FieldValueRequired))]
#[x_kube(validation = Rule::new("self.platform.type != 'github-actions' || !has(self.scaling) || has(self.scaling.mode)").message("scaling.mode is required for github-actions").field_path(".scaling.mode").reason(Reason::FieldValueRequired))]
#[x_kube(validation = Rule::new("self.platform.type != 'github-actions' || !has(self.scaling) || (has(self.scaling.minIdle) && has(self.scaling.maxConcurrent) && has(self.scaling.scaleUpStep) && has(self.scaling.cooldownSeconds))").message("minIdle, maxConcurrent, scaleUpStep and cooldownSeconds are required for github-actions").field_path(".scaling").reason(Reason::FieldValueRequired))]
#[x_kube(validation = Rule::new("!has(self.scaling) || !has(self.scaling.minIdle) || !has(self.scaling.maxConcurrent) || self.scaling.minIdle <= self.scaling.maxConcurrent").message("minIdle must not exceed maxConcurrent").field_path(".scaling.minIdle"))]
#[x_kube(validation = Rule::new("self.platform.type != 'github-actions' || !has(self.scaling) || !has(self.scaling.mode) || self.scaling.mode == 'webhook' || has(self.scaling.polling)").message("scaling.polling is required for modes polling and hybrid").field_path(".scaling.polling").reason(Reason::FieldValueRequired))]
#[x_kube(validation = Rule::new("self.platform.type != 'github-actions' || !has(self.scaling) || !has(self.scaling.mode) || self.scaling.mode == 'polling' || (has(self.scaling.webhook) && has(self.scaling.webhook.secretRef) && size(self.scaling.webhook.secretRef) > 0)").message("scaling.webhook with a secretRef is required for modes webhook and hybrid").field_path(".scaling.webhook").reason(Reason::FieldValueRequired))]
pub struct ImpVMRunnerPoolSpec {
    /// ImpVMTemplate of the same namespace.
    #[schemars(length(max = 253))]
    pub template_name: String,
    /// The CI system.
    pub platform: RunnerPlatform,
    /// OCI image with the runner, laid over the template's image; wins over the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub runner_layer: Option<String>,
    /// Labels that jobs ask for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub labels: Vec<String>,
    /// How many VMs there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<RunnerScaling>,
    /// Earlier form of scaling; only used when scaling.mode is unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_detection: Option<RunnerJobDetection>,
    /// Delete VMs this long after they first ran, e.g. 45m. 0: never. Overrides the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) == duration('0s') || duration(self) >= duration('60s')").message("must be 0 or at least 60s"))]
    pub expire_after: Option<DurationString>,
}

/// A CI system and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerPlatform {
    /// Kind of the CI system.
    #[serde(rename = "type")]
    pub type_: RunnerPlatformType,
    /// Base URL. Unset: the public service.
    #[serde(rename = "serverURL", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub server_url: Option<String>,
    /// What the runners serve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<RunnerScope>,
    /// Secret of the same namespace with the credentials; its key token is preferred.
    #[schemars(length(max = 253))]
    pub credentials_secret: String,
    /// pat: a token. github_app: the Secret holds github-app-id, github-app-installation-id and github-app-private-key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_source: Option<RunnerTokenSource>,
    /// Group that GitHub runners join.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub runner_group: Option<String>,
}

/// Kind of a CI system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RunnerPlatformType {
    /// GitHub Actions.
    GithubActions,
    /// GitLab.
    Gitlab,
    /// Forgejo.
    Forgejo,
}

/// How a pool authenticates with GitHub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(description = "")] // a description of the type would hide those of optional fields
pub enum RunnerTokenSource {
    /// A personal access token.
    Pat,
    /// A GitHub App.
    GithubApp,
}

/// What runners serve: exactly one of org and repo.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.org) != has(self.repo)").message("exactly one of org and repo must be set"))]
pub struct RunnerScope {
    /// Organisation, or group of GitLab.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub org: Option<String>,
    /// Repository as owner/name, or project ID of GitLab.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub repo: Option<String>,
}

/// How many VMs there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerScaling {
    /// How demand is learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<RunnerScalingMode>,
    /// VMs that wait for jobs. Unset: 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub min_idle: Option<i32>,
    /// Most VMs at once. Unset: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_concurrent: Option<i32>,
    /// Most VMs made in one step. Unset: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub scale_up_step: Option<i32>,
    /// Seconds between steps. Unset: 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10))]
    pub cooldown_seconds: Option<i32>,
    /// Demand from webhooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<RunnerWebhook>,
    /// Demand by asking the CI system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub polling: Option<RunnerPolling>,
}

/// How demand is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(description = "")] // a description of the type would hide those of optional fields
pub enum RunnerScalingMode {
    /// From webhooks (annotation imp.dev/runner-demand).
    Webhook,
    /// By asking the CI system.
    Polling,
    /// Both.
    Hybrid,
}

/// Demand from webhooks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerWebhook {
    /// Turns it on, in jobDetection; scaling.mode decides in scaling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Secret of the same namespace that signs the webhooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub secret_ref: Option<String>,
}

/// Demand by asking the CI system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerPolling {
    /// Turns it on, in jobDetection; scaling.mode decides in scaling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Seconds between two questions.
    #[serde(default = "interval_seconds")]
    #[schemars(range(min = 10))]
    pub interval_seconds: i32,
}

/// Earlier form of scaling.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RunnerJobDetection {
    /// Demand from webhooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<RunnerWebhook>,
    /// Demand by asking the CI system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub polling: Option<RunnerPolling>,
}

/// What is true of the pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImpVMRunnerPoolStatus {
    /// metadata.generation that the status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// VMs that wait for a job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_count: Option<i32>,
    /// VMs that have not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_count: Option<i32>,
    /// Label selector of the pool's VMs, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

fn interval_seconds() -> i32 {
    30
}
