//! Asks the operator's node API for what only it may read: environment and pull secrets of VMs that are bound here.

use std::time::Duration;

use imp_api::ImpVM;
use imp_proto::v1;
use kube::ResourceExt as _;

use crate::operator::{Operator, OperatorError};
use crate::spec;

/// How long a VM that names no secrets waits for the pull secrets of its service account.
const OPTIONAL_TIMEOUT: Duration = Duration::from_secs(3);

/// Why secrets could not be had.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// The operator did not give them.
    #[error("the node waits for the VM's environment and pull secrets")]
    Operator(#[from] OperatorError),
}

/// Gets VMs' secrets.
#[derive(Debug)]
pub struct Secrets {
    operator: Operator,
}

impl Secrets {
    /// Secrets from `operator`.
    #[must_use]
    pub fn new(operator: Operator) -> Self {
        Self { operator }
    }

    /// The secrets of `vm`. A VM that names none may still have pull secrets by its namespace's default service account;
    /// those are worth a short wait only, since most images need none.
    ///
    /// # Errors
    /// When the VM needs them and the operator does not give them.
    pub async fn of(&self, vm: &ImpVM) -> Result<Option<v1::VmSecrets>, SecretsError> {
        if spec::needs_secrets(vm) {
            return Ok(Some(self.operator.vm_secrets(vm).await?));
        }
        match tokio::time::timeout(OPTIONAL_TIMEOUT, self.operator.vm_secrets(vm)).await {
            Ok(Ok(secrets)) => Ok(Some(secrets).filter(|secrets| *secrets != v1::VmSecrets::default())),
            Ok(Err(error)) => {
                tracing::info!(error = &error as &dyn std::error::Error, vm = %vm.name_any(), namespace = vm.namespace(), "pull secrets of the service account could not be had; the image is pulled without");
                Ok(None)
            }
            Err(_) => {
                tracing::info!(vm = %vm.name_any(), namespace = vm.namespace(), "the operator did not answer in time about pull secrets; the image is pulled without");
                Ok(None)
            }
        }
    }
}
