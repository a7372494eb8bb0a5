//! Types that several kinds share.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::patterns;

/// Reference to an object of the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalObjectRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253), regex(pattern = patterns::NAME))]
    pub name: String,
}

impl LocalObjectRef {
    /// A reference to `name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

/// Reference to a cluster-scoped object.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterObjectRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253), regex(pattern = patterns::NAME))]
    pub name: String,
}

impl ClusterObjectRef {
    /// A reference to `name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

/// CPU architecture in OCI's spelling, as in the node label `kubernetes.io/arch`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum Arch {
    /// x86-64.
    #[serde(rename = "amd64")]
    Amd64,
    /// AArch64.
    #[serde(rename = "arm64")]
    Arm64,
    /// Any: the node's own.
    #[default]
    #[serde(rename = "multi")]
    Multi,
}

impl Arch {
    /// The spelling of the wire: `amd64`, `arm64` or `multi`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
            Self::Multi => "multi",
        }
    }

    /// Whether a node of architecture `node` (value of `kubernetes.io/arch`) will do.
    pub fn accepts(self, node: &str) -> bool {
        self == Self::Multi || self.as_str() == node
    }
}

/// The agent inside the guest, which exec, probes and usage figures need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GuestAgentConfig {
    /// Whether exec and probes are allowed. Unset: inherited (VM, then template, then class), finally true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}
