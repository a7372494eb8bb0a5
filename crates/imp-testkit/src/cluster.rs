//! A real Kubernetes on this machine, without Docker: a control plane in one network namespace, nodes with kubelet, containerd
//! and kube-proxy in others.

mod hub;
pub mod layout;
pub mod pki;
mod state;

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Config};

pub use self::state::{State, remove};
use crate::daemon::Daemon;
use crate::node;
use crate::services::Service;
use crate::tools::GoTools;
use layout::{Layout, node_name};
use pki::Pki;

/// Environment variable of every process of a cluster: its directory. `down` finds by it what no record names.
pub const MARKER: &str = "IMP_CLUSTER";
/// A context's name in the person's kubeconfig.
pub const CONTEXT: &str = "imp-dev";

/// What to start.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Names, addresses, paths.
    pub layout: Layout,
    /// Number of nodes, 1 to [`layout::MAX_NODES`].
    pub nodes: u8,
    /// No kubelet, controller-manager or scheduler.
    pub light: bool,
    /// Where a person is to reach the API server; a loopback address.
    pub server: SocketAddr,
    /// Kubernetes' programs.
    pub programs: GoTools,
    /// A program with the subcommands `node-init --stage=STAGE FILE` and `relay LISTEN NETNS TARGET`.
    pub self_program: Utf8PathBuf,
    /// OCI archives that every node has in its image store before it takes pods.
    pub images: Vec<Utf8PathBuf>,
}

/// A cluster that is being started or runs. Dropping the value ends nothing; [`remove`] does.
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    pki: Pki,
    state: State,
}

impl Cluster {
    /// Makes keys, the hub's network and starts etcd, the API server and the relay to it.
    ///
    /// # Errors
    /// When something of that name exists, or a process can't be started.
    pub fn create(config: ClusterConfig) -> Result<Self> {
        let layout = &config.layout;
        std::fs::create_dir_all(&layout.dir).with_context(|| format!("make {}", layout.dir))?;
        let state = State {
            name: layout.name.clone(),
            light: config.light,
            nodes: config.nodes,
            server: config.server,
            complete: false,
            daemons: Vec::new(),
        };
        state.save(&layout.dir)?;
        let pki = Pki::create(layout, config.nodes)?;
        let mut cluster = Self { config, pki, state };
        hub::create_network(&cluster.config.layout, cluster.config.nodes)?;
        for daemon in hub::start_api(&cluster.config, &cluster.pki)? {
            cluster.record(daemon)?;
        }
        cluster.start_relay()?;
        Ok(cluster)
    }

    /// Starts the nodes. They may be started before the API server answers: kubelets wait for it.
    ///
    /// # Errors
    /// When a network, cgroup or process can't be made.
    pub fn start_nodes(&mut self) -> Result<()> {
        for index in 1..=self.config.nodes {
            node::create_network(&self.config.layout, index, self.config.nodes)?;
            let daemon = node::start(&self.config, &self.pki, index)?;
            self.record(daemon)?;
        }
        Ok(())
    }

    /// Starts node `index` without kubelet: `services` run on it instead. `shared` are directories that it must see even where
    /// they are on another file system than `/`.
    ///
    /// # Errors
    /// When a network, cgroup or process can't be made.
    pub fn start_light_node(
        &mut self,
        index: u8,
        services: Vec<Service>,
        shared: &[Utf8PathBuf],
    ) -> Result<()> {
        node::create_network(&self.config.layout, index, self.config.nodes)?;
        let daemon = node::start_light(&self.config, index, services, shared)?;
        self.record(daemon)
    }

    /// Starts controller-manager and scheduler; the API server must be ready.
    ///
    /// # Errors
    /// When a process can't be started.
    pub fn start_controllers(&mut self) -> Result<()> {
        for daemon in hub::start_controllers(&self.config, &self.pki)? {
            self.record(daemon)?;
        }
        Ok(())
    }

    fn start_relay(&mut self) -> Result<()> {
        let layout = &self.config.layout;
        let mut command = Command::new(&self.config.self_program);
        command
            .args([
                "relay",
                &self.config.server.to_string(),
                layout.hub().path().as_str(),
                &layout.api_server().to_string(),
            ])
            .env(MARKER, layout.dir.as_str());
        let daemon = Daemon::start("relay", command, &layout.logs().join("relay.log"))?;
        self.record(daemon)
    }

    /// Starts a program in the hub's network namespace and records it.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start_in_hub(
        &mut self,
        name: &str,
        program: &str,
        args: &[&str],
        environment: &[(&str, String)],
    ) -> Result<()> {
        let layout = &self.config.layout;
        let mut command = hub::hub_command(layout, program);
        command.args(args).envs(environment.iter().map(|(k, v)| (k, v)));
        let daemon = Daemon::start(name, command, &layout.logs().join(format!("{name}.log")))?;
        self.record(daemon)
    }

    /// Adds a process to the record, so that [`remove`] ends it.
    ///
    /// # Errors
    /// When the record can't be written.
    pub fn record(&mut self, daemon: Daemon) -> Result<()> {
        self.state.daemons.push(daemon);
        self.state.save(&self.config.layout.dir)
    }

    /// Marks the start as complete.
    ///
    /// # Errors
    /// When the record can't be written.
    pub fn complete(&mut self) -> Result<()> {
        self.state.complete = true;
        self.state.save(&self.config.layout.dir)
    }

    /// The record of its processes.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What was asked for.
    #[must_use]
    pub fn config(&self) -> &ClusterConfig {
        &self.config
    }

    /// Keys and certificates.
    #[must_use]
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// The person's kubeconfig.
    ///
    /// # Errors
    /// When a certificate can't be read.
    pub fn kubeconfig(&self) -> Result<String> {
        self.pki.person_kubeconfig(self.config.server, CONTEXT)
    }

    /// A client with a person's rights (an administrator).
    ///
    /// # Errors
    /// When a certificate can't be read.
    pub async fn client(&self) -> Result<Client> {
        let kubeconfig = Kubeconfig::from_yaml(&self.kubeconfig()?)?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    /// Waits until the API server says that it is ready.
    ///
    /// # Errors
    /// When one of the processes has ended, or after a minute.
    pub async fn wait_api(&self) -> Result<Client> {
        let client = self.client().await?;
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let request = http::Request::get("/readyz").body(Vec::new())?;
            match client.request_text(request).await {
                Ok(_) => return Ok(client),
                Err(e) if Instant::now() > end => {
                    return Err(e).with_context(|| {
                        format!("the API server was not ready in a minute; see {}", self.config.layout.logs())
                    });
                }
                Err(_) => self.check_alive()?,
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Fails with the last words of a process that should run and does not.
    ///
    /// # Errors
    /// When there is one.
    pub fn check_alive(&self) -> Result<()> {
        let Some(dead) = self.state.dead() else { return Ok(()) };
        bail!("{} ended; the end of {}:\n{}", dead.name, dead.log, dead.log_tail(15));
    }

    /// Waits until every node is Ready.
    ///
    /// # Errors
    /// When a process has ended, or after two minutes.
    pub async fn wait_nodes_ready(&self, client: &Client) -> Result<()> {
        let nodes: Api<Node> = Api::all(client.clone());
        for index in 1..=self.config.nodes {
            let name = node_name(index);
            let ready = await_condition(nodes.clone(), &name, node_is_ready);
            self.within(Duration::from_secs(120), ready, &format!("node {name} was not Ready")).await?;
        }
        Ok(())
    }

    /// Waits until pods can be made in namespace `default`: the controller-manager works.
    ///
    /// # Errors
    /// When a process has ended, or after a minute.
    pub async fn wait_controllers(&self, client: &Client) -> Result<()> {
        let accounts: Api<ServiceAccount> = Api::default_namespaced(client.clone());
        let exists = await_condition(accounts, "default", |a: Option<&ServiceAccount>| a.is_some());
        self.within(Duration::from_secs(60), exists, "the controller-manager made no ServiceAccount").await
    }

    /// Waits for something, but not on when a process has ended meanwhile.
    async fn within<T, E: std::error::Error + Send + Sync + 'static>(
        &self,
        timeout: Duration,
        what: impl Future<Output = Result<T, E>>,
        problem: &str,
    ) -> Result<()> {
        let mut look = tokio::time::interval(Duration::from_secs(1));
        let mut what = std::pin::pin!(tokio::time::timeout(timeout, what));
        loop {
            tokio::select! {
                done = &mut what => {
                    let logs = self.config.layout.logs();
                    done.with_context(|| format!("{problem} within {} s; see {logs}", timeout.as_secs()))?.context(problem.to_owned())?;
                    return Ok(());
                }
                _ = look.tick() => self.check_alive()?,
            }
        }
    }
}

fn node_is_ready(node: Option<&Node>) -> bool {
    node.and_then(|n| n.status.as_ref())
        .and_then(|s| s.conditions.as_ref())
        .is_some_and(|c| c.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
}
