//! `/healthz`, `/readyz` and `/metrics`.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;

use crate::context::Context;

/// Routes of probes.
pub fn probes(context: Arc<Context>) -> Router {
    let ready = move || {
        let answer = match context.ready.check() {
            Ok(()) => (StatusCode::OK, "ok"),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why),
        };
        std::future::ready(answer)
    };
    Router::new().route("/healthz", get(async || "ok")).route("/readyz", get(ready))
}

/// Route of metrics.
pub fn metrics(context: Arc<Context>) -> Router {
    let render = move || {
        std::future::ready((
            [("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")],
            context.metrics.render(),
        ))
    };
    Router::new().route("/metrics", get(render))
}
