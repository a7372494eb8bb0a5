//! The kinds as CustomResourceDefinitions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;

use crate::{
    ClusterImpConfig, ClusterImpNodeProfile, ImpNetwork, ImpVM, ImpVMClass, ImpVMMigration, ImpVMRunnerPool, ImpVMSnapshot,
    ImpVMTemplate, ImpWarmPool,
};

/// API group of all kinds.
pub const GROUP: &str = "imp.dev";
/// The only version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of all kinds.
pub const API_VERSION: &str = "imp.dev/v1alpha1";

/// CustomResourceDefinitions of all ten kinds, ready to be applied.
pub fn crds() -> Vec<CustomResourceDefinition> {
    [
        ImpVM::crd(),
        ImpVMClass::crd(),
        ImpVMTemplate::crd(),
        ImpNetwork::crd(),
        ImpVMSnapshot::crd(),
        ImpVMMigration::crd(),
        ImpWarmPool::crd(),
        ImpVMRunnerPool::crd(),
        ClusterImpConfig::crd(),
        ClusterImpNodeProfile::crd(),
    ]
    .into_iter()
    .map(finish)
    .collect()
}

fn finish(crd: CustomResourceDefinition) -> CustomResourceDefinition {
    crd
}
