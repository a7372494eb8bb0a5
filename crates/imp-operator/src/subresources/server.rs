//! HTTPS for routes that are called with and without client certificates, and with WebSockets.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;

use super::authn::{PeerCertificates, RequestHeader};

/// How long a client may take for its handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The serving configuration; whoever holds the certificate keeps it current. See [`config`].
pub type ServerTls = Arc<ArcSwapOption<rustls::ServerConfig>>;

/// A serving configuration that asks clients for a certificate, and takes none but the API server's.
///
/// # Errors
/// When key and certificate do not fit.
pub fn config(
    front: RequestHeader,
    chain: Vec<rustls::pki_types::CertificateDer<'static>>,
    key: rustls::pki_types::PrivateKeyDer<'static>,
) -> Result<rustls::ServerConfig, rustls::Error> {
    let builder = rustls::ServerConfig::builder().with_client_cert_verifier(Arc::new(front));
    let mut config = builder.with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// Serves `router` on `listener` for good.
pub async fn serve(listener: TcpListener, tls: ServerTls, router: Router) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let (tls, router) = (tls.clone(), router.clone());
                tokio::spawn(async move {
                    if let Err(error) = connection(stream, &tls, router).await {
                        tracing::debug!(%peer, error = &*error as &dyn std::error::Error, "a connection ended");
                    }
                });
            }
            // Out of file descriptors, most likely: others must end first.
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "no connection can be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    tls: &ServerTls,
    router: Router,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    stream.set_nodelay(true)?;
    let config = tls.load_full().ok_or("there is no serving certificate yet")?;
    let stream = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await??;
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let peer = PeerCertificates(chain.iter().map(|certificate| certificate.clone().into_owned()).collect());
    let service = router.map_request(move |mut request: http::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(peer.clone());
        request.map(axum::body::Body::new)
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(hyper_util::rt::TokioTimer::new()).header_read_timeout(HANDSHAKE);
    builder
        .http2()
        .timer(hyper_util::rt::TokioTimer::new())
        .keep_alive_interval(Some(Duration::from_secs(30)));
    // WebSockets are upgrades of HTTP/1.1.
    builder.serve_connection_with_upgrades(TokioIo::new(stream), TowerToHyperService::new(service)).await
}
