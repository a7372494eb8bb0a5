//! A client of the API server that counts its requests.

use std::sync::Arc;
use std::task::{Context, Poll};

use anyhow::Context as _;
use futures::future::BoxFuture;
use http::{Request, Response};
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use tower::{Layer, Service};

use crate::metrics::Metrics;

/// A client by `KUBECONFIG`, the user's kubeconfig, or the pod's service account, whichever comes first.
///
/// # Errors
/// When there is none of them, or it cannot be used.
pub async fn infer(metrics: Arc<Metrics>) -> anyhow::Result<Client> {
    let mut config = Config::infer()
        .await
        .context("there is neither a kubeconfig (KUBECONFIG) nor a pod's service account")?;
    // Every part tries again by itself, with what is true by then.
    config.default_retry = false;
    counting(config, metrics)
}

/// A client of `config` whose requests `metrics` counts.
///
/// # Errors
/// When the configuration cannot be used.
pub fn counting(config: Config, metrics: Arc<Metrics>) -> anyhow::Result<Client> {
    let builder = ClientBuilder::try_from(config).context("no client of the API server can be made")?;
    Ok(builder.with_layer(&Counting(metrics)).build())
}

#[derive(Clone)]
struct Counting(Arc<Metrics>);

impl<S> Layer<S> for Counting {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, metrics: self.0.clone() }
    }
}

struct Counted<S> {
    inner: S,
    metrics: Arc<Metrics>,
}

impl<S, B> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let (answer, metrics) = (self.inner.call(request), self.metrics.clone());
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().map_or(0, |answer| answer.status().as_u16());
            metrics.requested(&method, &path, code);
            answer
        })
    }
}
