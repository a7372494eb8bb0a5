//! The whole of it: kubelet, pods, Imp installed by Helm as a user would.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use imp_testkit::cluster::layout::{REGISTRY_HOST, REGISTRY_PORT};
use imp_testkit::cluster::{Cluster, MARKER};
use imp_testkit::netns;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::runtime::wait::await_condition;
use kube::{Api, Client, ResourceExt as _};

use super::{Built, Place, hello, profiles, registry};
use crate::images::{REGISTRY, TAG};
use crate::progress::Progress;
use crate::workspace;

/// Where Imp is installed.
pub(super) const NAMESPACE: &str = "imp-system";
/// Address of the operator's Service. It is fixed because the cluster has no DNS: the agents' pods know it by /etc/hosts.
pub(super) const OPERATOR_SERVICE_IP: &str = "198.19.0.100";

/// How long Imp's pods may take to be ready.
const PODS_TIMEOUT: Duration = Duration::from_secs(90);

/// Nodes, Imp, a VM.
pub(super) async fn start(
    progress: &Progress,
    place: &Place,
    built: &Built,
    cluster: &mut Cluster,
) -> Result<()> {
    progress.step("start the nodes", || cluster.start_nodes())?;
    let client = progress.wait("API server ready", cluster.wait_api()).await?;
    progress.step("start controller-manager and scheduler", || cluster.start_controllers())?;
    progress.step("example's image into the registry", || {
        registry::push(cluster, &built.images.busybox, "busybox:1.35")
    })?;
    progress.step("install chart imp-crds", || install(place, built, "imp-crds", &[]))?;
    progress.step("install chart imp", || install(place, built, "imp", &values()))?;
    progress.wait("nodes Ready", cluster.wait_nodes_ready(&client)).await?;
    progress.wait("Imp's pods ready", pods_ready(&client, i32::from(cluster.config().nodes))).await?;
    progress.wait("profiles of the nodes", profiles::apply(&client, cluster.config().nodes)).await?;
    hello::run(progress, place, built, &client).await
}

/// Values that the development cluster needs.
fn values() -> Vec<String> {
    vec![
        format!("image.registry={REGISTRY}"),
        format!("image.tag={TAG}"),
        "image.pullPolicy=Never".into(),
        format!("operator.service.clusterIP={OPERATOR_SERVICE_IP}"),
        format!("agent.hostAliases[0].ip={OPERATOR_SERVICE_IP}"),
        format!("agent.hostAliases[0].hostnames[0]=imp-controller-manager.{NAMESPACE}.svc"),
        format!("insecureRegistries[0]={REGISTRY_HOST}:{REGISTRY_PORT}"),
    ]
}

/// `helm upgrade --install`.
fn install(place: &Place, built: &Built, chart: &str, values: &[String]) -> Result<()> {
    let mut command = Command::new(&built.tools.helm);
    let home = place.layout.dir.join("helm");
    command.env(MARKER, place.layout.dir.as_str());
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(variable, &home);
    }
    command.args([
        "--kubeconfig",
        place.dev.join("kubeconfig").as_str(),
        "upgrade",
        "--install",
        "--create-namespace",
    ]);
    command.args(["--namespace", NAMESPACE, chart, workspace::root().join("charts").join(chart).as_str()]);
    command.args(values.iter().flat_map(|v| ["--set-string", v.as_str()]));
    netns::run(&mut command).with_context(|| format!("install the chart {chart}"))
}

/// Waits until the Deployment is available and a pod of each DaemonSet is ready on every node. `helm --wait` does not follow a
/// DaemonSet with OnDelete.
async fn pods_ready(client: &Client, nodes: i32) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let available =
        |d: Option<&Deployment>| d.and_then(|d| d.status.as_ref()?.available_replicas).is_some_and(|n| n > 0);
    let ready =
        |d: Option<&DaemonSet>| d.and_then(|d| d.status.as_ref()).is_some_and(|s| s.number_ready == nodes);
    let all = async {
        await_condition(deployments, "imp-controller-manager", available).await?;
        await_condition(daemon_sets.clone(), "imp-runtime", ready).await?;
        await_condition(daemon_sets, "imp-agent", ready).await
    };
    if let Ok(result) = tokio::time::timeout(PODS_TIMEOUT, all).await {
        return result.map(drop).context("watch Imp's pods");
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let stories: Vec<String> =
        pods.list(&ListParams::default()).await?.items.iter().filter_map(unready).collect();
    bail!(
        "Imp's pods were not ready within {} s: {}; `kubectl -n {NAMESPACE} logs POD` and `describe pod POD` say more",
        PODS_TIMEOUT.as_secs(),
        if stories.is_empty() { "there are none".to_owned() } else { stories.join(", ") }
    )
}

/// A pod that is not ready, and what it waits for.
fn unready(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let conditions = status.conditions.iter().flatten();
    if conditions.clone().any(|c| c.type_ == "Ready" && c.status == "True") {
        return None;
    }
    let waiting = status
        .container_statuses
        .iter()
        .flatten()
        .find_map(|c| c.state.as_ref()?.waiting.as_ref()?.reason.clone());
    let reason = waiting.or_else(|| conditions.clone().find_map(|c| c.message.clone())).unwrap_or_default();
    Some(format!("{} ({reason})", pod.name_any()))
}
