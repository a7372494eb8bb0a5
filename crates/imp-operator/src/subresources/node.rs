//! From a VM's name to its node's agent.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use hyper_util::rt::TokioIo;
use imp_api::{ClusterImpNodeProfile, ImpVM, VMPhase};
use imp_proto::v1::VmRef;
use imp_proto::v1::node_streams_client::NodeStreamsClient;
use kube::{Api, Client, ResourceExt as _};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use super::error::ApiError;

/// How long a node's agent may take to answer.
const CONNECT: Duration = Duration::from_secs(10);

/// How the operator proves itself to agents: a client configuration that trusts Imp's CA alone, shows a certificate of
/// that CA with common name `imp-controller-manager`, and offers ALPN `h2`. Whoever holds the CA keeps it current.
pub type NodeTls = Arc<ArcSwapOption<rustls::ClientConfig>>;

/// A VM that has a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Target {
    pub(super) vm: VmRef,
    pub(super) node: String,
    pub(super) phase: Option<VMPhase>,
}

impl Target {
    /// # Errors
    /// 409 unless the VM's workload runs.
    pub(super) fn must_run(&self) -> Result<(), ApiError> {
        if self.phase == Some(VMPhase::Running) {
            Ok(())
        } else {
            Err(self.wrong_phase("its workload does not run"))
        }
    }

    /// # Errors
    /// 409 unless the VM may have a VMM.
    pub(super) fn must_live(&self) -> Result<(), ApiError> {
        match self.phase {
            Some(VMPhase::Starting | VMPhase::Running | VMPhase::Terminating) => Ok(()),
            _ => Err(self.wrong_phase("no virtual machine runs")),
        }
    }

    fn wrong_phase(&self, what: &str) -> ApiError {
        let phase = self.phase.map_or("unknown", VMPhase::as_str);
        let VmRef { namespace, name, .. } = &self.vm;
        ApiError::conflict(format!(
            "ImpVM {name:?} is in phase {phase}: {what}. See `kubectl describe impvm {name} -n {namespace}`"
        ))
    }
}

/// Looks a VM up.
///
/// # Errors
/// 404 when there is none, 409 when it has no node.
pub(super) async fn find(client: &Client, namespace: &str, name: &str) -> Result<Target, ApiError> {
    let api = Api::<ImpVM>::namespaced(client.clone(), namespace);
    let found = api
        .get_opt(name)
        .await
        .map_err(|error| ApiError::unavailable(format!("ImpVM {name:?} cannot be read: {error}")))?;
    let vm = found.ok_or_else(|| ApiError::not_found(format!("impvms.imp.dev {name:?} not found")))?;
    let uid = vm.uid().unwrap_or_default();
    let status = vm.status.unwrap_or_default();
    let node = status.node_name.filter(|node| !node.is_empty()).ok_or_else(|| {
        ApiError::conflict(format!(
            "ImpVM {name:?} is not bound to a node yet. See `kubectl describe impvm {name} -n {namespace}`"
        ))
    })?;
    Ok(Target {
        vm: VmRef { uid, namespace: namespace.to_owned(), name: name.to_owned() },
        node,
        phase: status.phase,
    })
}

/// Opens a connection to the agent of `node`. One per call: a handshake takes milliseconds, and a dead connection is
/// nobody else's trouble.
///
/// # Errors
/// 503 when the node tells no endpoint or its agent does not answer.
pub(super) async fn connect(
    client: &Client,
    tls: &NodeTls,
    node: &str,
) -> Result<NodeStreamsClient<Channel>, ApiError> {
    let api = Api::<ClusterImpNodeProfile>::all(client.clone());
    let profile = api.get_opt(node).await.map_err(|error| {
        ApiError::unavailable(format!("the profile of node {node} cannot be read: {error}"))
    })?;
    let endpoint = profile.and_then(|profile| profile.status?.agent_endpoint);
    let endpoint = endpoint.ok_or_else(|| {
        ApiError::unavailable(format!(
            "node {node} tells no endpoint of its agent: is a pod of DaemonSet imp-agent ready there?"
        ))
    })?;
    let config = tls.load_full().ok_or_else(|| {
        ApiError::unavailable("the operator has no certificate for its agents yet; try again")
    })?;
    let name = ServerName::try_from(node.to_owned())
        .map_err(|_| ApiError::internal(format!("node name {node:?} is no DNS name")))?;
    let address = endpoint.clone();
    let connector = tower::service_fn(move |_| {
        let (address, config, name) = (address.clone(), config.clone(), name.clone());
        async move {
            let stream = TcpStream::connect(&address).await?;
            stream.set_nodelay(true)?;
            TlsConnector::from(config).connect(name, stream).await.map(TokioIo::new)
        }
    });
    // The URI only fills HTTP/2's :authority.
    let agent = Endpoint::from_static("http://agent.imp")
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10));
    let channel = agent.connect_with_connector(connector);
    let unreachable = |why: String| {
        ApiError::unavailable(format!("the agent of node {node} cannot be reached at {endpoint}: {why}"))
    };
    match tokio::time::timeout(CONNECT, channel).await {
        Ok(Ok(channel)) => Ok(NodeStreamsClient::new(channel)),
        Ok(Err(error)) => Err(unreachable(causes(&error))),
        Err(_) => Err(unreachable(format!("no answer within {} s", CONNECT.as_secs()))),
    }
}

/// tonic's own text is "transport error"; what matters are its causes.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = next.to_string();
        cause = next.source();
    }
    text
}
