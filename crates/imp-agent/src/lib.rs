//! The node's controller: bound ImpVMs to the runtime, status, streams.
//!
//! | question | answer |
//! |---|---|
//! | what is the runtime told of a VM? | [`spec`] |
//! | when is it told, when is a VM deleted? | [`vms`] |
//! | what does a status say, and when is it written? | [`status`], decided by `imp_core::phase` |

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

pub mod config;
pub mod context;
pub mod metrics;
pub mod observe;
pub mod operator;
pub mod references;
pub mod runtime;
pub mod secrets;
pub mod spec;
pub mod status;
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
    let (sender, receiver) = runtime::queue();
    let (current, _) = watch::channel(None);
    let mut parts = JoinSet::new();
    parts.spawn(runtime::follow(config.runtime_socket.clone(), sender, current));
    parts.spawn(vms::run(context.clone(), receiver));
    // Parts run for good; the first that ends ends the agent, which is started again.
    while let Some(ended) = parts.join_next().await {
        ended?;
    }
    Ok(())
}
