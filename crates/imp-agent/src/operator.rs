//! Client of the operator's node API.
//!
//! The agent shows its pod-bound token, in which the API server wrote the node's name; the operator's certificate is
//! checked against Imp's CA, which stands in ConfigMap `imp-ca`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use imp_api::{ImpVM, names};
use imp_proto::v1;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, ResourceExt as _};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde::Deserialize;
use tokio::sync::Mutex;

/// Key of the certificate in ConfigMap `imp-ca`.
const CA_KEY: &str = "ca.crt";
/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Why the operator's node API gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// Imp's CA cannot be read.
    #[error("ConfigMap {namespace}/imp-ca, in which the operator publishes Imp's CA, cannot be read")]
    Ca {
        /// Its namespace.
        namespace: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// It holds no certificate.
    #[error(
        "ConfigMap {namespace}/imp-ca holds no certificate under {CA_KEY}: is the operator of the same version?"
    )]
    NoCa {
        /// Its namespace.
        namespace: String,
    },
    /// The URL is none.
    #[error("the operator's URL {url:?} is no URL: check --operator-url")]
    Url {
        /// What was given.
        url: String,
    },
    /// The operator answered, and said no.
    #[error("{message}")]
    Refused {
        /// HTTP status.
        code: u16,
        /// In its words.
        message: String,
        /// In one word.
        reason: String,
    },
    /// The call failed.
    #[error("the operator's node API at {url} failed")]
    Call {
        /// Where it was asked.
        url: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// No answer came.
    #[error("the operator's node API at {url} did not answer within {} s: is a replica of imp-controller-manager ready?", TIMEOUT.as_secs())]
    Timeout {
        /// Where it was asked.
        url: String,
    },
    /// The answer makes no sense.
    #[error("the operator's node API answered what is not understood: {0}")]
    Answer(String),
}

/// The operator, as the agent of one node sees it.
#[derive(Clone)]
pub struct Operator {
    cluster: Client,
    namespace: String,
    url: String,
    token_file: PathBuf,
    /// Made at the first call, and again after a failed one: the CA may be another by then.
    connection: Arc<Mutex<Option<Connection>>>,
}

impl std::fmt::Debug for Operator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operator").field("url", &self.url).finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Connection {
    client: Client,
    ca: Arc<Vec<CertificateDer<'static>>>,
}

/// Answer of `GET /node/v1/vms/<namespace>/<name>`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VmAnswer {
    #[serde(default)]
    env: Vec<EnvAnswer>,
    /// Documents of type kubernetes.io/dockerconfigjson, in base64.
    #[serde(default)]
    docker_config_json: Vec<String>,
}

#[derive(Deserialize)]
struct EnvAnswer {
    name: String,
    #[serde(default)]
    value: String,
}

impl Operator {
    /// The operator at `url`, whose CA stands in `namespace`; `token_file` is read again for each call.
    #[must_use]
    pub fn new(cluster: Client, namespace: String, url: String, token_file: PathBuf) -> Self {
        Self { cluster, namespace, url, token_file, connection: Arc::default() }
    }

    /// Environment and pull secrets of a VM that is bound to this node.
    ///
    /// # Errors
    /// When the operator cannot be asked or refuses, e.g. because a Secret does not exist.
    pub async fn vm_secrets(&self, vm: &ImpVM) -> Result<v1::VmSecrets, OperatorError> {
        let (namespace, name, uid) =
            (vm.namespace().unwrap_or_default(), vm.name_any(), vm.uid().unwrap_or_default());
        let answer = self
            .call(http::Method::GET, &format!("/node/v1/vms/{namespace}/{name}?uid={uid}"), Vec::new())
            .await?;
        let answer: VmAnswer =
            serde_json::from_str(&answer).map_err(|error| OperatorError::Answer(error.to_string()))?;
        let documents: Result<_, _> = answer
            .docker_config_json
            .iter()
            .map(|document| STANDARD.decode(document).map(Into::into))
            .collect();
        Ok(v1::VmSecrets {
            env: answer.env.into_iter().map(|var| v1::EnvVar { name: var.name, value: var.value }).collect(),
            docker_config_json: documents.map_err(|error| OperatorError::Answer(error.to_string()))?,
        })
    }

    /// Has a certificate request signed; the answer is a PEM chain for this node's streams server.
    ///
    /// # Errors
    /// When the operator cannot be asked or refuses.
    pub async fn sign(&self, csr_pem: String) -> Result<String, OperatorError> {
        self.call(http::Method::POST, "/node/v1/certificate", csr_pem.into_bytes()).await
    }

    /// Imp's CA.
    ///
    /// # Errors
    /// When the ConfigMap cannot be read or holds none.
    pub async fn ca(&self) -> Result<Arc<Vec<CertificateDer<'static>>>, OperatorError> {
        Ok(self.connection().await?.ca)
    }

    async fn call(&self, method: http::Method, path: &str, body: Vec<u8>) -> Result<String, OperatorError> {
        let url = || self.url.clone();
        let connection = self.connection().await?;
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .body(body)
            .map_err(|_| OperatorError::Url { url: url() })?;
        let result = tokio::time::timeout(TIMEOUT, connection.client.request_text(request)).await;
        match result {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(kube::Error::Api(status))) => {
                let (message, reason) = (status.message.clone(), status.reason.clone());
                Err(OperatorError::Refused { code: status.code, message, reason })
            }
            Ok(Err(error)) => {
                *self.connection.lock().await = None;
                Err(OperatorError::Call { url: url(), source: Box::new(error) })
            }
            Err(_) => {
                *self.connection.lock().await = None;
                Err(OperatorError::Timeout { url: url() })
            }
        }
    }

    async fn connection(&self) -> Result<Connection, OperatorError> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = &*slot {
            return Ok(connection.clone());
        }
        let ca = Arc::new(self.read_ca().await?);
        let uri = self.url.parse().map_err(|_| OperatorError::Url { url: self.url.clone() })?;
        let mut config = kube::Config::new(uri);
        config.root_cert = Some(ca.iter().map(|certificate| certificate.to_vec()).collect());
        // Given the file, the client reads it again as it is rotated.
        config.auth_info.token_file = Some(self.token_file.display().to_string());
        config.read_timeout = Some(TIMEOUT);
        config.default_retry = false;
        let client = Client::try_from(config)
            .map_err(|error| OperatorError::Call { url: self.url.clone(), source: Box::new(error) })?;
        let connection = Connection { client, ca };
        *slot = Some(connection.clone());
        Ok(connection)
    }

    async fn read_ca(&self) -> Result<Vec<CertificateDer<'static>>, OperatorError> {
        let api = Api::<ConfigMap>::namespaced(self.cluster.clone(), &self.namespace);
        let read = api.get(names::CA_NAME).await;
        let map = read.map_err(|error| OperatorError::Ca {
            namespace: self.namespace.clone(),
            source: Box::new(error),
        })?;
        let none = || OperatorError::NoCa { namespace: self.namespace.clone() };
        let pem = map.data.unwrap_or_default().remove(CA_KEY).ok_or_else(none)?;
        let certificates: Vec<_> =
            CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().map_err(|_| none())?;
        if certificates.is_empty() { Err(none()) } else { Ok(certificates) }
    }
}
