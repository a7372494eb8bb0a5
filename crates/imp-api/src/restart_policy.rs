//! What happens after a VM failed.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{DurationString, patterns};

/// What happens after a VM failed: where and how often it is started again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestartPolicy {
    /// Start again on the same node, or place anew.
    #[serde(default)]
    pub mode: RestartMode,
    /// Pause between restarts. Unset: 10s, doubling up to 5m, 5 restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff: Option<RestartBackoff>,
    /// What happens once all restarts are used up.
    #[serde(default)]
    pub on_exhaustion: OnExhaustion,
    /// Only for onExhaustion cool-down: how long after exhaustion the count starts at zero again.
    #[serde(default = "cool_down_period")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('0s')").message("must be a duration such as 45m or 1h30m"))]
    pub cool_down_period: DurationString,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self {
            mode: RestartMode::default(),
            backoff: None,
            on_exhaustion: OnExhaustion::default(),
            cool_down_period: cool_down_period(),
        }
    }
}

/// Where a VM is started again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum RestartMode {
    /// On the same node, on the same disk.
    #[default]
    #[serde(rename = "in-place")]
    InPlace,
    /// On any node that fits.
    #[serde(rename = "reschedule")]
    Reschedule,
}

/// What happens once all restarts are used up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum OnExhaustion {
    /// The VM stays Failed.
    #[default]
    #[serde(rename = "fail")]
    Fail,
    /// The VM stays RetryExhausted until the annotation imp/reset-retries=true is set.
    #[serde(rename = "manual-reset")]
    ManualReset,
    /// The VM stays RetryExhausted for coolDownPeriod, then the count starts at zero again.
    #[serde(rename = "cool-down")]
    CoolDown,
}

/// Pause between restarts: initialDelay, doubled each time up to maxDelay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RestartBackoff {
    /// Restarts before the VM counts as exhausted. 0: never restarted.
    #[serde(default = "max_retries")]
    #[schemars(range(min = 0))]
    pub max_retries: i32,
    /// Pause before the first restart.
    #[serde(default = "initial_delay")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('0s')").message("must be a duration such as 10s or 1m30s"))]
    pub initial_delay: DurationString,
    /// Longest pause between two restarts.
    #[serde(default = "max_delay")]
    #[schemars(length(max = 32), regex(pattern = patterns::DURATION))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('0s')").message("must be a duration such as 5m or 1h"))]
    pub max_delay: DurationString,
}

impl Default for RestartBackoff {
    fn default() -> Self {
        Self { max_retries: max_retries(), initial_delay: initial_delay(), max_delay: max_delay() }
    }
}

fn max_retries() -> i32 {
    5
}

fn initial_delay() -> DurationString {
    "10s".into()
}

fn max_delay() -> DurationString {
    "5m".into()
}

fn cool_down_period() -> DurationString {
    "1h".into()
}
