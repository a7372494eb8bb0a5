//! `/healthz`, `/readyz` and `/metrics` of the runtime: a few lines of text over HTTP/1.1.

use crate::engine::Engine;
use anyhow::Context as _;
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode, body::Bytes, body::Incoming, server::conn::http1, service::service_fn,
};
use hyper_util::rt::TokioIo;
use imp_proto::v1::VmState;
use std::{collections::BTreeMap, convert::Infallible, fmt::Write as _, net::SocketAddr};
use tokio::net::TcpListener;

/// Serves on `address` until dropped.
///
/// # Errors
/// When the port is taken.
pub async fn serve(address: SocketAddr, engine: Engine) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let engine = engine.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answer = answer(&request, &engine);
                async move { Ok::<_, Infallible>(answer) }
            });
            // A client that breaks off is its own affair.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn answer(request: &Request<Incoming>, engine: &Engine) -> Response<Full<Bytes>> {
    let (status, body) = match request.uri().path() {
        // The engine exists and its socket is served: that is both.
        "/healthz" | "/readyz" => (StatusCode::OK, "ok\n".to_owned()),
        "/metrics" => (StatusCode::OK, metrics(engine)),
        _ => (StatusCode::NOT_FOUND, "not found\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response
}

fn metrics(engine: &Engine) -> String {
    let mut states: BTreeMap<&str, u64> = (1..=9)
        .filter_map(|n| VmState::try_from(n).ok())
        .map(|state| (state.as_str_name().trim_start_matches("VM_STATE_"), 0))
        .collect();
    for (_, status) in engine.list() {
        *states.entry(status.state().as_str_name().trim_start_matches("VM_STATE_")).or_default() += 1;
    }
    let mut text = String::from(
        "# HELP imp_runtime_vms VMs of the node by the runtime's state.\n# TYPE imp_runtime_vms gauge\n",
    );
    for (state, count) in states {
        let _ = writeln!(text, "imp_runtime_vms{{state=\"{}\"}} {count}", state.to_lowercase());
    }
    let version = env!("CARGO_PKG_VERSION");
    text += "# HELP imp_runtime_build_info Version of the runtime; always 1.\n# TYPE imp_runtime_build_info gauge\n";
    let _ = writeln!(text, "imp_runtime_build_info{{version=\"{version}\"}} 1");
    text
}
