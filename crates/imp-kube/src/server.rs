//! `/metrics`, `/healthz` and `/readyz`, over plain HTTP.

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Media type of `prometheus_client`'s text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("the {what} server cannot listen on {address}")]
    Listen {
        /// Which server.
        what: &'static str,
        /// Its address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The server broke off.
    #[error("the {what} server broke off")]
    Serve {
        /// Which server.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// Listens on `address` for the server called `what`.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn bind(address: SocketAddr, what: &'static str) -> Result<TcpListener, ServerError> {
    TcpListener::bind(address).await.map_err(|source| ServerError::Listen { what, address, source })
}

/// Routes of probes: `/healthz` answers as long as the process does; `/readyz` as `ready` says, with its reason.
pub fn probes<E: std::fmt::Display>(
    ready: impl Fn() -> Result<(), E> + Clone + Send + Sync + 'static,
) -> Router {
    let readiness = move || {
        let answer = match ready() {
            Ok(()) => (StatusCode::OK, "ok".to_owned()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why.to_string()),
        };
        std::future::ready(answer)
    };
    Router::new().route("/healthz", get(async || "ok")).route("/readyz", get(readiness))
}

/// Route of metrics: `/metrics` with the text of `render`, which is in the format of OpenMetrics.
pub fn metrics(render: impl Fn() -> String + Clone + Send + Sync + 'static) -> Router {
    let answer = move || std::future::ready(([(CONTENT_TYPE, OPEN_METRICS)], render()));
    Router::new().route("/metrics", get(answer))
}

/// Serves `router` until `shutdown`; connections that are open then are answered first.
///
/// # Errors
/// When the server breaks off.
pub async fn serve(
    listener: TcpListener,
    what: &'static str,
    router: Router,
    shutdown: CancellationToken,
) -> Result<(), ServerError> {
    axum::serve(listener, router)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
        .map_err(|source| ServerError::Serve { what, source })
}
