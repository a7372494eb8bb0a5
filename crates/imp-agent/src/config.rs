//! Flags and environment of the agent.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

/// The controller of one node: takes bound VMs to the node's runtime, publishes their status, serves their streams.
#[derive(Clone, Debug, Parser)]
#[command(name = "imp-agent", version, about)]
pub struct Config {
    /// Name of the node's object.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// Address of the node by which the operator reaches the agent.
    #[arg(long, env = "NODE_IP")]
    pub node_ip: IpAddr,
    /// Unix socket of the runtime.
    #[arg(long, env = "IMP_RUNTIME_SOCKET", default_value = "/run/imp/runtime.sock")]
    pub runtime_socket: PathBuf,
    /// Where streams are served to the operator, over mutual TLS.
    #[arg(long, env = "IMP_STREAMS_ADDRESS", default_value = "0.0.0.0:9443")]
    pub streams_address: SocketAddr,
    /// Where /metrics is served.
    #[arg(long, env = "IMP_METRICS_ADDRESS", default_value = "0.0.0.0:8080")]
    pub metrics_address: SocketAddr,
    /// Where /healthz and /readyz are served.
    #[arg(long, env = "IMP_HEALTH_ADDRESS", default_value = "0.0.0.0:8081")]
    pub health_address: SocketAddr,
    /// The operator's node API.
    #[arg(
        long,
        env = "IMP_OPERATOR_URL",
        default_value = "https://imp-controller-manager.imp-system.svc:443"
    )]
    pub operator_url: String,
    /// Namespace of Imp: of the node leases and of ConfigMap imp-ca.
    #[arg(long, env = "POD_NAMESPACE", default_value = "imp-system")]
    pub namespace: String,
    /// File with the agent's token, for the operator's node API. Read again for each call, since it is rotated.
    #[arg(
        long,
        env = "IMP_TOKEN_FILE",
        default_value = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    )]
    pub token_file: PathBuf,
    /// Kubeconfig to use instead of the pod's service account.
    #[arg(long, env = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Timings; tests shorten them.
    #[arg(skip)]
    pub timings: Timings,
}

/// How long the agent waits for what.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Between two renewals of the node's Lease.
    pub heartbeat: Duration,
    /// How long a VM of the runtime must be unknown to the API before it is looked up and, if really gone, deleted.
    pub orphan_grace: Duration,
    /// How long the runtime may be away before the node's profile says so.
    pub runtime_lost: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(10),
            orphan_grace: Duration::from_secs(10),
            runtime_lost: Duration::from_secs(15),
        }
    }
}
