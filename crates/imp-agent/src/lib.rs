//! The node's controller: bound ImpVMs to the runtime, status, streams.
//!
//! | question | answer |
//! |---|---|
//! | what is the runtime told of a VM? | [`spec`] |
//! | when is it told, when is a VM deleted? | [`vms`] |
//! | what does a status say, and when is it written? | [`status`], decided by `imp_core::phase` |

use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

pub mod config;
pub mod context;
pub mod heartbeat;
pub mod metrics;
pub mod observe;
pub mod operator;
pub mod references;
pub mod runtime;
pub mod secrets;
pub mod spec;
pub mod status;
pub mod streams;
pub mod tls;
pub mod vms;
pub mod writer;

/// An error with its causes in one line, leaving out a cause that the message before it already ends with (kube prints
/// its sources itself).
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let message = next.to_string();
        if !text.ends_with(&message) {
            text = format!("{text}: {message}");
        }
        cause = next.source();
    }
    text
}

/// Runs the agent until one of its parts cannot go on.
///
/// # Errors
/// When a server cannot be started.
pub async fn run(config: config::Config, client: kube::Client) -> anyhow::Result<()> {
    let client = context::ClientHandle(client);
    let metrics = metrics::Metrics::default();
    let operator = operator::Operator::new(
        client.0.clone(),
        config.namespace.clone(),
        config.operator_url.clone(),
        config.token_file.clone(),
    );
    let context = Arc::new(context::Context {
        status: writer::StatusWriter::new(client.clone(), metrics.clone()),
        events: writer::Events::new(client.clone(), &config.node_name, metrics.clone()),
        secrets: secrets::Secrets::new(operator.clone()),
        client,
        node: config.node_name.clone(),
        timings: config.timings,
        metrics,
        bound: context::Bound::default(),
        ready: context::Ready::default(),
        runtime: watch::Sender::default(),
    });
    let streams = bind(config.streams_address, "streams").await?;
    let metrics = bind(config.metrics_address, "metrics").await?;
    let health = bind(config.health_address, "health").await?;
    let port = streams.local_addr().context("the streams server has no address")?.port();
    let endpoint = std::net::SocketAddr::new(config.node_ip, port);
    let (sender, receiver) = runtime::queue();
    let (current, client) = watch::channel(None);
    let tls = tls::ServerTls::default();
    let proxy = streams::Proxy::new(context.clone(), client);
    let mut parts = JoinSet::new();
    parts.spawn(runtime::follow(config.runtime_socket, sender, current));
    parts.spawn(vms::run(context.clone(), receiver));
    parts.spawn(heartbeat::lease(context.clone(), config.namespace));
    parts.spawn(heartbeat::profile(context.clone(), endpoint, context.runtime.subscribe()));
    parts.spawn(tls.clone().keep(operator, config.node_name));
    parts.spawn(streams::serve(streams, tls, proxy));
    let ready = context.clone();
    let probes = imp_kube::server::probes(move || ready.ready.check());
    let figures = imp_kube::server::metrics(move || context.metrics.render());
    parts.spawn(async { drop(axum::serve(health, probes).await) });
    parts.spawn(async { drop(axum::serve(metrics, figures).await) });
    // Every part runs for good: the first that ends ends the agent, which is then started again.
    match parts.join_next().await {
        Some(Err(error)) => Err(error).context("a part of the agent broke off: this is a fault of imp-agent"),
        _ => anyhow::bail!("a part of the agent ended, which it should not: this is a fault of imp-agent"),
    }
}

async fn bind(address: std::net::SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("the {what} server cannot listen on {address}"))
}

/// A client of the API server: by `kubeconfig` if given, else by the pod's service account.
///
/// # Errors
/// When neither can be used.
pub async fn client(kubeconfig: Option<&std::path::Path>) -> anyhow::Result<kube::Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = kube::config::Kubeconfig::read_from(path)
                .with_context(|| format!("kubeconfig {} cannot be read", path.display()))?;
            kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default())
                .await
                .with_context(|| format!("kubeconfig {} cannot be used", path.display()))?
        }
        None => {
            kube::Config::incluster().context("this is no pod with a service account; give --kubeconfig")?
        }
    };
    // Every part tries again by itself, with what is true by then.
    config.default_retry = false;
    kube::Client::try_from(config).context("no client of the API server can be made")
}

/// Logs to standard error as JSON; RUST_LOG says how much.
pub fn log() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
}
