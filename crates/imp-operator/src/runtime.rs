//! What runs in an operator: servers in every replica, controllers in the leader.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use imp_api::names;
use imp_kube::lease::{ApiStore, Election, Timings};
use imp_kube::server;
use kube::Client;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::certificates::Certificates;
use crate::metrics::Metrics;
use crate::subresources::authn::RequestHeader;
use crate::subresources::{self, Subresources};
use crate::{node_api, publish, vm_controller};

/// How long the leader's controllers may take to end after a signal, before the lease is left to end by itself.
const END: Duration = Duration::from_secs(5);

/// The operator: binds ImpVMs to nodes, keeps their life, serves the aggregated API and the node API.
#[derive(Clone, Debug, Parser)]
#[command(name = "imp-operator", version, about)]
pub struct Config {
    /// Namespace of Imp: of the lease, the CA and the agents' ServiceAccount.
    #[arg(long, env = "POD_NAMESPACE", default_value = names::SYSTEM_NAMESPACE)]
    pub namespace: String,
    /// Name in the lease; no two replicas may have the same.
    #[arg(long, env = "POD_NAME")]
    pub identity: String,
    /// Where the aggregated API and the node API are served, over TLS.
    #[arg(long, env = "IMP_API_ADDRESS", default_value_t = any(names::port::OPERATOR_API))]
    pub api_address: SocketAddr,
    /// Where /metrics is served.
    #[arg(long, env = "IMP_METRICS_ADDRESS", default_value_t = any(names::port::METRICS))]
    pub metrics_address: SocketAddr,
    /// Where /healthz and /readyz are served.
    #[arg(long, env = "IMP_HEALTH_ADDRESS", default_value_t = any(names::port::PROBES))]
    pub health_address: SocketAddr,
}

fn any(port: u16) -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], port))
}

/// Runs the operator until `shutdown`.
///
/// # Errors
/// When a part cannot start or go on, or the lease was lost: the process must end then, and be started again.
pub async fn run(
    config: Config,
    client: Client,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let certificates = Certificates::default();
    // Dropped, and so ended, whichever way this function is left.
    let mut parts = servers(&config, &client, &certificates, &metrics, &shutdown).await?;
    tokio::select! {
        result = lead(&config, &client, &certificates, &metrics, &shutdown) => result,
        error = failure(&mut parts, &shutdown) => Err(error),
    }
}

/// Waits until a part fails. Servers end by themselves after a signal, the rest never.
async fn failure(parts: &mut JoinSet<anyhow::Result<()>>, shutdown: &CancellationToken) -> anyhow::Error {
    loop {
        match parts.join_next().await {
            Some(Ok(Ok(()))) if shutdown.is_cancelled() => {}
            Some(Ok(Ok(()))) => {
                return anyhow::anyhow!("a part of the operator ended: this is a fault of imp-operator");
            }
            Some(Ok(Err(error))) => return error,
            Some(Err(error)) => {
                return anyhow::Error::new(error)
                    .context("a part of the operator broke off: this is a fault of imp-operator");
            }
            None => std::future::pending().await,
        }
    }
}

/// Starts what every replica does.
async fn servers(
    config: &Config,
    client: &Client,
    certificates: &Certificates,
    metrics: &Arc<Metrics>,
    shutdown: &CancellationToken,
) -> anyhow::Result<JoinSet<anyhow::Result<()>>> {
    let health = server::bind(config.health_address, "health").await?;
    let figures = server::bind(config.metrics_address, "metrics").await?;
    let api = server::bind(config.api_address, "API").await?;
    let front = RequestHeader::default();
    let ready = {
        let (front, certificates) = (front.clone(), certificates.clone());
        move || match (certificates.is_ready(), front.is_ready()) {
            (true, true) => Ok(()),
            (false, _) => Err("Imp's CA has not been read yet"),
            (true, false) => Err("how the API server authenticates has not been read yet"),
        }
    };
    let render = {
        let metrics = metrics.clone();
        move || metrics.render()
    };
    let nodes =
        node_api::router(client.clone(), &config.namespace, certificates.authority(), metrics.clone());
    // The fallback of the aggregated API answers what nobody knows.
    let routes = subresources::router(Subresources {
        client: client.clone(),
        front: front.clone(),
        nodes: certificates.nodes.clone(),
    })
    .merge(nodes);
    let mut parts = JoinSet::new();
    let until = shutdown.clone();
    parts.spawn(async move { Ok(server::serve(health, "health", server::probes(ready), until).await?) });
    let until = shutdown.clone();
    parts.spawn(async move { Ok(server::serve(figures, "metrics", server::metrics(render), until).await?) });
    let tls = certificates.server.clone();
    parts.spawn(async move {
        subresources::server::serve(api, tls, routes).await;
        Ok(())
    });
    let following = front.clone().follow(client.clone());
    parts.spawn(async move {
        following.await;
        Ok(())
    });
    let keeping = certificates.clone().keep(client.clone(), config.namespace.clone(), front);
    parts.spawn(async move {
        keeping.await;
        Ok(())
    });
    Ok(parts)
}

/// Waits for the lease, and does the leader's work as long as it is ours.
async fn lead(
    config: &Config,
    client: &Client,
    certificates: &Certificates,
    metrics: &Arc<Metrics>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let store = ApiStore::new(client.clone(), &config.namespace, names::OPERATOR_NAME);
    let mut election = Election::new(store, config.identity.clone(), Timings::default());
    if !election.acquire(shutdown).await {
        return Ok(());
    }
    imp_killpoint::operator("lease-taken");
    metrics.set_leading(true);
    let mut controllers = controllers(config, client, certificates, metrics, shutdown);
    let renewing = async {
        election.renew(shutdown).await?;
        anyhow::Ok(())
    };
    tokio::select! {
        renewed = renewing => renewed?,
        error = failure(&mut controllers, shutdown) => return Err(error.context("a controller cannot go on")),
    }
    let end = async { while controllers.join_next().await.is_some() {} };
    if tokio::time::timeout(END, end).await.is_ok() {
        election.release().await;
    } else {
        tracing::warn!("a controller did not end in time; the lease ends by itself");
    }
    Ok(())
}

/// Starts what only the leader does. All of it ends with `shutdown`.
fn controllers(
    config: &Config,
    client: &Client,
    certificates: &Certificates,
    metrics: &Arc<Metrics>,
    shutdown: &CancellationToken,
) -> JoinSet<anyhow::Result<()>> {
    let mut controllers = JoinSet::new();
    controllers.spawn(vm_controller::run(client.clone(), metrics.clone(), shutdown.clone()));
    let map = publish::config_map(client.clone(), config.namespace.clone(), certificates.authority());
    let until = shutdown.clone();
    controllers.spawn(async move {
        until.run_until_cancelled(map).await;
        Ok(())
    });
    let service = publish::api_service(client.clone(), certificates.authority());
    let until = shutdown.clone();
    controllers.spawn(async move {
        until.run_until_cancelled(service).await;
        Ok(())
    });
    controllers
}
