//! The agent's serving certificate: a key that never leaves memory, signed by the operator, renewed in time.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use imp_api::names;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::operator::{Operator, OperatorError};

/// Shortest and longest pause after a failed renewal.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How long a client may take for its handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why no certificate could be had, or a client was refused.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The operator did not sign.
    #[error("the operator did not sign this node's serving certificate")]
    Operator(#[from] OperatorError),
    /// The key or request could not be made.
    #[error("a certificate request cannot be made")]
    Request(#[from] rcgen::Error),
    /// What came back is no certificate.
    #[error("the operator's answer is no certificate chain")]
    Chain,
    /// TLS cannot be set up with it.
    #[error("TLS cannot be set up")]
    Setup(#[from] rustls::Error),
    /// The CA cannot be used.
    #[error("Imp's CA cannot be used to check clients")]
    Ca(#[from] rustls::server::VerifierBuilderError),
    /// No certificate yet.
    #[error("the agent has no serving certificate yet: the operator signs it once it is ready")]
    NotYet,
    /// The handshake failed.
    #[error("the TLS handshake failed")]
    Handshake(#[source] std::io::Error),
    /// The handshake took too long.
    #[error("the TLS handshake took longer than {} s", HANDSHAKE.as_secs())]
    Slow,
    /// The client is none that may open streams.
    #[error("a client with certificate {0:?} is not the operator")]
    Stranger(String),
}

/// TLS of the streams server. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct ServerTls(Arc<ArcSwapOption<rustls::ServerConfig>>);

impl ServerTls {
    /// Does the server's part of a handshake; the client must be the operator.
    ///
    /// # Errors
    /// When there is no certificate yet, the handshake fails, or the client is another.
    pub async fn accept(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, TlsError> {
        let config = self.0.load_full().ok_or(TlsError::NotYet)?;
        let handshake = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream));
        let stream = handshake.await.map_err(|_| TlsError::Slow)?.map_err(TlsError::Handshake)?;
        // Agents' certificates are of the same CA: the name tells the operator from them.
        let name = stream
            .get_ref()
            .1
            .peer_certificates()
            .and_then(|chain| common_name(chain.first()?))
            .unwrap_or_default();
        if name == names::OPERATOR_NAME { Ok(stream) } else { Err(TlsError::Stranger(name)) }
    }

    /// Gets a certificate and renews it at two thirds of its life, for good.
    pub async fn keep(self, operator: Operator, node: String) {
        let mut pause = RETRY.0;
        loop {
            match request(&operator, &node).await {
                Ok((config, lifetime)) => {
                    self.0.store(Some(Arc::new(config)));
                    tracing::info!(seconds = lifetime.as_secs(), "got a serving certificate");
                    pause = RETRY.0;
                    wait(lifetime * 2 / 3).await;
                }
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "no serving certificate; trying again"
                    );
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RETRY.1);
                }
            }
        }
    }
}

/// Sleeps by the wall clock in short steps: certificates expire while a machine is suspended, its timers don't.
async fn wait(time: Duration) {
    let until = std::time::SystemTime::now() + time;
    while let Ok(left) = until.duration_since(std::time::SystemTime::now()) {
        tokio::time::sleep(left.min(Duration::from_secs(300))).await;
    }
}

async fn request(operator: &Operator, node: &str) -> Result<(rustls::ServerConfig, Duration), TlsError> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![node.to_owned()])?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, format!("node:{node}"));
    let chain = operator.sign(params.serialize_request(&key)?.pem()?).await?;
    imp_killpoint::agent("certificate-got");
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|_| TlsError::Chain)?;
    let lifetime = chain.first().and_then(remaining).ok_or(TlsError::Chain)?;
    let mut roots = RootCertStore::empty();
    for certificate in operator.ca().await?.iter() {
        roots.add(certificate.clone())?;
    }
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build()?;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut config =
        rustls::ServerConfig::builder().with_client_cert_verifier(verifier).with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok((config, lifetime))
}

fn remaining(certificate: &CertificateDer<'_>) -> Option<Duration> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let left = parsed.validity().not_after.timestamp()
        - std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .ok()?
            .as_secs()
            .try_into()
            .unwrap_or(i64::MAX);
    u64::try_from(left).ok().map(Duration::from_secs)
}

fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let name = parsed.subject().iter_common_name().next()?.as_str().ok()?;
    Some(name.to_owned())
}
