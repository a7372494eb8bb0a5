//! Secrets and ConfigMaps of one namespace, each read once for one answer.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::{ConfigMap, Secret, ServiceAccount};
use kube::{Api, Client};

use crate::subresources::error::ApiError;

/// What kind of object a reference is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    ConfigMap,
    Secret,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
        }
    }
}

/// The data of an object. No Debug: it may be a Secret's.
pub(super) type Data = BTreeMap<String, Vec<u8>>;

/// Reads objects; the API server, or a test's memory.
pub(super) trait Reader {
    /// The object's data; `None` when there is none.
    async fn read(&self, kind: Kind, name: &str) -> Result<Option<Data>, ApiError>;
    /// Pull secrets of the namespace's default ServiceAccount.
    async fn default_pull_secrets(&self) -> Result<Vec<String>, ApiError>;
}

/// The objects of a namespace.
pub(super) struct Namespace {
    client: Client,
    name: String,
}

impl Namespace {
    pub(super) fn new(client: Client, name: &str) -> Self {
        Self { client, name: name.to_owned() }
    }

    fn failed(&self, kind: &str, name: &str, error: &kube::Error) -> ApiError {
        ApiError::unavailable(format!("{kind} {}/{name} cannot be read: {error}", self.name))
    }
}

impl Reader for Namespace {
    async fn read(&self, kind: Kind, name: &str) -> Result<Option<Data>, ApiError> {
        let failed = |error| self.failed(kind.as_str(), name, &error);
        match kind {
            Kind::ConfigMap => {
                let api = Api::<ConfigMap>::namespaced(self.client.clone(), &self.name);
                let found = api.get_opt(name).await.map_err(failed)?;
                Ok(found.map(|map| {
                    map.data
                        .unwrap_or_default()
                        .into_iter()
                        .map(|(key, text)| (key, text.into_bytes()))
                        .collect()
                }))
            }
            Kind::Secret => {
                let api = Api::<Secret>::namespaced(self.client.clone(), &self.name);
                let found = api.get_opt(name).await.map_err(failed)?;
                Ok(found.map(|secret| {
                    secret.data.unwrap_or_default().into_iter().map(|(key, bytes)| (key, bytes.0)).collect()
                }))
            }
        }
    }

    async fn default_pull_secrets(&self) -> Result<Vec<String>, ApiError> {
        let api = Api::<ServiceAccount>::namespaced(self.client.clone(), &self.name);
        let account =
            api.get_opt("default").await.map_err(|error| self.failed("ServiceAccount", "default", &error))?;
        let references = account.and_then(|account| account.image_pull_secrets).unwrap_or_default();
        Ok(references.into_iter().map(|reference| reference.name).filter(|name| !name.is_empty()).collect())
    }
}

/// Objects that were read already.
pub(super) struct Objects<R> {
    reader: R,
    read: HashMap<(Kind, String), Option<Data>>,
}

impl<R: Reader> Objects<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader, read: HashMap::new() }
    }

    pub(super) fn reader(&self) -> &R {
        &self.reader
    }

    /// The data of an object; `None` when there is no such object and `optional` is set.
    ///
    /// # Errors
    /// 424 when there is none and it is not optional; 503 when it cannot be read.
    pub(super) async fn get(
        &mut self,
        kind: Kind,
        name: &str,
        optional: bool,
    ) -> Result<Option<&Data>, ApiError> {
        let key = (kind, name.to_owned());
        if !self.read.contains_key(&key) {
            let found = self.reader.read(kind, name).await?;
            self.read.insert(key.clone(), found);
        }
        match self.read.get(&key).and_then(Option::as_ref) {
            Some(data) => Ok(Some(data)),
            None if optional => Ok(None),
            None => Err(missing(format!("{} {name:?} does not exist in the VM's namespace", kind.as_str()))),
        }
    }

    /// One entry of an object; `None` when it, or the object, is missing and `optional` is set.
    ///
    /// # Errors
    /// As [`Objects::get`]; 424 when there is no such key.
    pub(super) async fn entry(
        &mut self,
        kind: Kind,
        name: &str,
        key: &str,
        optional: bool,
    ) -> Result<Option<&Vec<u8>>, ApiError> {
        let Some(data) = self.get(kind, name, optional).await? else { return Ok(None) };
        match data.get(key) {
            Some(value) => Ok(Some(value)),
            None if optional => Ok(None),
            None => Err(missing(format!("{} {name:?} has no key {key:?}", kind.as_str()))),
        }
    }
}

/// Something that the VM refers to is not there, or is no use.
pub(super) fn missing(message: String) -> ApiError {
    ApiError {
        code: http::StatusCode::FAILED_DEPENDENCY,
        reason: imp_api::names::Reason::SecretUnavailable.as_str(),
        message,
    }
}
