//! Who calls: the API server vouches for its users in headers ("requestheader" authentication). It proves itself by a
//! client certificate of the CA that it publishes in ConfigMap `kube-system/extension-apiserver-authentication`.
//!
//! See <https://kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer/#authentication-flow>.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use futures::{StreamExt as _, TryStreamExt as _};
use http::HeaderMap;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use rustls::RootCertStore;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, SignatureScheme};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::error::ApiError;

const CONFIG_MAP: &str = "extension-apiserver-authentication";
const NAMESPACE: &str = "kube-system";

/// A user, as the API server tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Name.
    pub name: String,
    /// UID, if the API server has one.
    pub uid: Option<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Extra fields, keys in lower case.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Certificate chain of the client of a connection, in the request's extensions; empty when it showed none. The chain
/// was checked by [`RequestHeader`] during the handshake.
#[derive(Clone, Debug, Default)]
pub struct PeerCertificates(pub Vec<CertificateDer<'static>>);

/// How the API server proves itself, and which headers it uses.
#[derive(Debug)]
struct Front {
    verifier: Arc<dyn ClientCertVerifier>,
    allowed_names: Vec<String>,
    username: Vec<String>,
    uid: Vec<String>,
    group: Vec<String>,
    extra_prefix: Vec<String>,
}

/// Why the ConfigMap is of no use.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// A key is missing: the API server runs without `--requestheader-client-ca-file`.
    #[error(
        "ConfigMap {NAMESPACE}/{CONFIG_MAP} has no {0}: the API server must run with an aggregation layer (--requestheader-client-ca-file)"
    )]
    Missing(&'static str),
    /// A key holds no JSON list of strings.
    #[error("{key} of ConfigMap {NAMESPACE}/{CONFIG_MAP} is no JSON list of strings")]
    List {
        /// The key.
        key: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// The CA is none.
    #[error("requestheader-client-ca-file of ConfigMap {NAMESPACE}/{CONFIG_MAP} is no usable CA: {0}")]
    Ca(String),
}

/// Requestheader authentication; follows the ConfigMap. Give it to the TLS server as its client certificate verifier: a
/// client needs no certificate, but one that it shows must be the API server's.
#[derive(Clone, Debug, Default)]
pub struct RequestHeader(Arc<ArcSwapOption<Front>>);

impl RequestHeader {
    /// Follows the ConfigMap for good; until it is read, nobody is authenticated.
    pub async fn follow(self, client: Client) {
        let api = Api::<ConfigMap>::namespaced(client, NAMESPACE);
        let config = watcher::Config::default().fields(&format!("metadata.name={CONFIG_MAP}"));
        let mut objects = watcher(api, config).default_backoff().applied_objects().boxed();
        loop {
            match objects.try_next().await {
                Ok(Some(map)) => match Front::read(&map) {
                    Ok(front) => self.0.store(Some(Arc::new(front))),
                    Err(error) => tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "the aggregated API cannot authenticate anybody"
                    ),
                },
                Ok(None) => return,
                Err(error) => tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the watch on {NAMESPACE}/{CONFIG_MAP} broke; it is begun again"
                ),
            }
        }
    }

    /// Whether the ConfigMap was read.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.load().is_some()
    }

    /// The user that the API server vouches for.
    ///
    /// # Errors
    /// 401 when the client is not the API server, or names nobody.
    pub fn authenticate(&self, peer: &PeerCertificates, headers: &HeaderMap) -> Result<User, ApiError> {
        let front = self.0.load_full().ok_or_else(|| {
            ApiError::unauthorized(
                "the operator has not read how the API server authenticates yet; try again",
            )
        })?;
        let Some(leaf) = peer.0.first() else {
            return Err(ApiError::unauthorized(
                "no client certificate: this API is called through the API server",
            ));
        };
        let name = common_name(leaf).unwrap_or_default();
        if !front.allowed_names.is_empty() && !front.allowed_names.contains(&name) {
            return Err(ApiError::unauthorized(format!(
                "a client certificate of {name:?} may not vouch for users"
            )));
        }
        front.user(headers).ok_or_else(|| ApiError::unauthorized("the API server names no user"))
    }
}

impl Front {
    fn read(map: &ConfigMap) -> Result<Self, FrontError> {
        let text = |key: &'static str| {
            map.data.as_ref().and_then(|data| data.get(key)).ok_or(FrontError::Missing(key))
        };
        let list = |key: &'static str| match text(key) {
            Ok(text) => {
                serde_json::from_str::<Vec<String>>(text).map_err(|source| FrontError::List { key, source })
            }
            // Older API servers have no UID headers.
            Err(_) => Ok(Vec::new()),
        };
        let ca_error = |error: &dyn std::fmt::Display| FrontError::Ca(error.to_string());
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(text("requestheader-client-ca-file")?.as_bytes()) {
            roots.add(certificate.map_err(|error| ca_error(&error))?).map_err(|error| ca_error(&error))?;
        }
        let verifier =
            WebPkiClientVerifier::builder(Arc::new(roots)).build().map_err(|error| ca_error(&error))?;
        Ok(Self {
            verifier,
            allowed_names: list("requestheader-allowed-names")?,
            username: list("requestheader-username-headers")?,
            uid: list("requestheader-uid-headers")?,
            group: list("requestheader-group-headers")?,
            extra_prefix: list("requestheader-extra-headers-prefix")?,
        })
    }

    fn user(&self, headers: &HeaderMap) -> Option<User> {
        let text = |value: &http::HeaderValue| {
            value.to_str().ok().map(str::to_owned).filter(|text| !text.is_empty())
        };
        let first = |names: &[String]| names.iter().find_map(|name| headers.get(name).and_then(text));
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in headers {
            let key = self
                .extra_prefix
                .iter()
                .find_map(|prefix| name.as_str().strip_prefix(&prefix.to_lowercase()));
            if let (Some(key), Ok(value)) = (key, value.to_str()) {
                extra.entry(unescape(key)).or_default().push(value.to_owned());
            }
        }
        Some(User {
            name: first(&self.username)?,
            uid: first(&self.uid),
            groups: self.group.iter().flat_map(|name| headers.get_all(name)).filter_map(text).collect(),
            extra,
        })
    }
}

/// Keys of extra fields are percent-encoded in header names.
fn unescape(key: &str) -> String {
    let mut bytes = Vec::with_capacity(key.len());
    let mut rest = key.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let code = (byte == b'%').then(|| tail.get(..2)).flatten();
        let code = code.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match code {
            Some(code) => {
                bytes.push(code);
                rest = &tail[2..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(parsed.subject().iter_common_name().next()?.as_str().ok()?.to_owned())
}

impl ClientCertVerifier for RequestHeader {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // The CA may change while connections are made; without a hint clients show what they have.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let front = self
            .0
            .load_full()
            .ok_or_else(|| rustls::Error::General("the API server's CA is not known yet".to_owned()))?;
        front.verifier.verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            cert,
            dss,
            &rustls::crypto::ring::default_provider().signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            cert,
            dss,
            &rustls::crypto::ring::default_provider().signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_groups_and_extra_fields_are_read() {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key).unwrap().pem();
        let map: ConfigMap = serde_json::from_value(serde_json::json!({"data": {
            "requestheader-client-ca-file": ca,
            "requestheader-allowed-names": "[\"front-proxy-client\"]",
            "requestheader-username-headers": "[\"X-Remote-User\"]",
            "requestheader-group-headers": "[\"X-Remote-Group\"]",
            "requestheader-extra-headers-prefix": "[\"X-Remote-Extra-\"]",
        }}))
        .unwrap();
        let front = Front::read(&map).unwrap();
        let mut headers = HeaderMap::new();
        assert_eq!(front.user(&headers), None);
        headers.insert("x-remote-user", "ann".parse().unwrap());
        headers.append("x-remote-group", "a".parse().unwrap());
        headers.append("x-remote-group", "b".parse().unwrap());
        headers.append("x-remote-extra-acme.com%2fproject", "p".parse().unwrap());
        let user = front.user(&headers).unwrap();
        assert_eq!((user.name.as_str(), user.groups), ("ann", vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(user.extra["acme.com/project"], ["p"]);
    }

    #[test]
    fn without_a_certificate_headers_count_for_nothing() {
        let mut headers = HeaderMap::new();
        headers.insert("x-remote-user", "admin".parse().unwrap());
        let error =
            RequestHeader::default().authenticate(&PeerCertificates::default(), &headers).unwrap_err();
        assert_eq!(error.code, http::StatusCode::UNAUTHORIZED);
    }
}
