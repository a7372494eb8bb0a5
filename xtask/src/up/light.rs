//! `up --light`: the same programs with no kubelet and no pods, under etcd and API server alone. What a kubelet, a scheduler and
//! the controller-manager would make is made here once: the Node with a Ready condition that stays as it is (no node controller
//! watches it), the EndpointSlice of the operator's Service, and tokens that are bound to pods as a kubelet's would be.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;
use imp_testkit::cluster::layout::{HUB_IP, REGISTRY_HOST, REGISTRY_PORT, node_ip, node_name};
use imp_testkit::cluster::{Cluster, MARKER};
use imp_testkit::files::write_private;
use imp_testkit::netns;
use imp_testkit::services::{Condition, Service};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use super::full::NAMESPACE;
use super::{Built, Place, hello, profiles, registry};
use crate::progress::Progress;
use crate::workspace;

/// How long tokens are valid; longer than a development cluster lives.
const TOKEN_SECONDS: i64 = 30 * 24 * 3600;

/// Imp as plain processes, a VM.
pub(super) async fn start(
    progress: &Progress,
    place: &Place,
    built: &Built,
    cluster: &mut Cluster,
) -> Result<()> {
    // What needs no API server is done while that starts.
    progress.step("start the nodes", || start_nodes(built, cluster))?;
    progress.step("example's image into the registry", || {
        registry::push(cluster, &built.images.busybox, "busybox:1.35")
    })?;
    let manifests = progress.step("render the charts", || manifests(place, built))?;
    let client = progress.wait("API server ready", cluster.wait_api()).await?;
    progress.step("apply definitions, roles, services", || apply(place, built, &manifests))?;
    progress.wait("node and tokens", prepare(cluster, &client)).await?;
    progress.step("start the operator", || start_operator(built, cluster))?;
    progress.wait("profiles of the nodes", profiles::apply(&client, cluster.config().nodes)).await?;
    hello::run(progress, place, built, &client).await
}

/// What the charts hold besides workloads, with the namespace in front.
fn manifests(place: &Place, built: &Built) -> Result<String> {
    let mut all = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n");
    for chart in ["imp-crds", "imp"] {
        let mut command = Command::new(&built.tools.helm);
        command.env("HELM_CACHE_HOME", place.layout.dir.join("helm")).env(MARKER, place.layout.dir.as_str());
        command.args([
            "template",
            chart,
            workspace::root().join("charts").join(chart).as_str(),
            "--namespace",
            NAMESPACE,
        ]);
        // Helm built from its module knows no version of Kubernetes.
        command.args(["--kube-version", "1.34.0"]);
        let text = netns::output(&mut command).with_context(|| format!("render the chart {chart}"))?;
        for document in text.split("\n---").filter(|d| !is_workload(d)) {
            all.push_str("\n---\n");
            all.push_str(document.trim_start_matches("---"));
        }
    }
    Ok(all)
}

fn is_workload(document: &str) -> bool {
    document.lines().any(|l| matches!(l.trim_end(), "kind: Deployment" | "kind: DaemonSet"))
}

fn apply(place: &Place, built: &Built, manifests: &str) -> Result<()> {
    let mut command = Command::new(built.tools.kubernetes("kubectl"));
    command.args([
        "--kubeconfig",
        place.dev.join("kubeconfig").as_str(),
        "apply",
        "--server-side",
        "-f",
        "-",
    ]);
    let mut child = command
        .env(MARKER, place.layout.dir.as_str())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("run kubectl")?;
    let mut input = child.stdin.take().context("kubectl has no standard input")?;
    // When kubectl gives up early, its own message below says why.
    let _ = input.write_all(manifests.as_bytes());
    drop(input);
    let output = child.wait_with_output().context("wait for kubectl")?;
    if !output.status.success() {
        bail!("apply the rendered charts: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

async fn prepare(cluster: &Cluster, client: &Client) -> Result<()> {
    create_endpoints(client).await?;
    write_credentials(cluster, client, "imp-controller-manager", "imp-controller-manager", None).await?;
    for index in 1..=cluster.config().nodes {
        let node = node_name(index);
        create_node(client, index).await?;
        write_credentials(cluster, client, "imp-agent", &format!("imp-agent-{node}"), Some(&node)).await?;
    }
    Ok(())
}

fn manager() -> PatchParams {
    PatchParams::apply("imp-dev").force()
}

async fn create_node(client: &Client, index: u8) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let name = node_name(index);
    let labels = json!({
        "imp/enabled": "true", "kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux",
    });
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    nodes.patch(&name, &manager(), &Patch::Apply(node)).await.with_context(|| format!("make node {name}"))?;
    let (cpu, memory) = profiles::capacity()?;
    let resources = json!({"cpu": cpu.to_string(), "memory": format!("{memory}Ki"), "pods": "110"});
    let now = k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let ready = json!({
        "type": "Ready", "status": "True", "reason": "LightNode", "lastHeartbeatTime": now, "lastTransitionTime": now,
        "message": "a network namespace of `cargo xtask up --light`; no kubelet reports on it",
    });
    let status = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {
            "capacity": resources, "allocatable": resources, "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": node_ip(index).to_string()}, {"type": "Hostname", "address": name}],
        },
    });
    nodes
        .patch_status(&name, &manager(), &Patch::Apply(status))
        .await
        .with_context(|| format!("set the status of node {name}"))?;
    // Each new node is tainted as not ready, for a controller to take the taint off; here is none.
    let untainted = json!({"spec": {"taints": null}});
    nodes
        .patch(&name, &PatchParams::default(), &Patch::Merge(untainted))
        .await
        .with_context(|| format!("take the taint off node {name}"))?;
    Ok(())
}

/// The operator runs in the hub.
async fn create_endpoints(client: &Client) -> Result<()> {
    let slices: Api<k8s_openapi::api::discovery::v1::EndpointSlice> =
        Api::namespaced(client.clone(), NAMESPACE);
    let name = "imp-controller-manager";
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HUB_IP.to_string()], "conditions": {"ready": true}}],
        "ports": [{"name": "https", "port": imp_api::names::port::OPERATOR_API, "protocol": "TCP"}],
    });
    slices
        .patch(name, &manager(), &Patch::Apply(slice))
        .await
        .context("make the EndpointSlice of the operator")?;
    Ok(())
}

/// Makes a pod object, bound to `node` if one is given, a token of `account` that is bound to the pod, and from it
/// `POD.token` and `POD.kubeconfig`.
async fn write_credentials(
    cluster: &Cluster,
    client: &Client,
    account: &str,
    pod: &str,
    node: Option<&str>,
) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let mut spec = json!({"serviceAccountName": account, "containers": [{"name": "process", "image": "imp.dev/process"}]});
    if let Some(node) = node {
        spec["nodeName"] = json!(node);
    }
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec});
    let object = pods
        .patch(pod, &manager(), &Patch::Apply(object))
        .await
        .with_context(|| format!("make the pod object {pod}"))?;
    let request = TokenRequest {
        spec: TokenRequestSpec {
            bound_object_ref: Some(BoundObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                name: Some(pod.into()),
                uid: object.uid(),
            }),
            expiration_seconds: Some(TOKEN_SECONDS),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    let answer = accounts
        .create_token_request(account, &PostParams::default(), &request)
        .await
        .with_context(|| format!("get a token of ServiceAccount {account}"))?;
    let token = answer.status.context("the TokenRequest was answered without a token")?.token;
    let layout = &cluster.config().layout;
    write_private(&layout.pki().join(format!("{pod}.token")), &token)?;
    let kubeconfig: Value = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
        "clusters": [{"name": "cluster", "cluster": {
            "server": format!("https://{}", layout.api_server()), "certificate-authority": cluster.pki().path("ca.crt"),
        }}],
        "users": [{"name": account, "user": {"token": token}}],
        "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": account, "namespace": NAMESPACE}}],
    });
    // Whole or not at all: the agent is started as soon as the file is there.
    let new = layout.pki().join(format!("{pod}.kubeconfig.new"));
    write_private(&new, &kubeconfig.to_string())?;
    fs::rename(&new, layout.pki().join(format!("{pod}.kubeconfig"))).with_context(|| format!("rename {new}"))
}

/// Where a program finds its kill points: a directory in the one that our own environment names, if it does. Tests set it.
fn kill_dir(name: &str) -> Option<String> {
    Some(format!("{}/{name}", std::env::var(imp_killpoint::VARIABLE).ok()?))
}

fn log_filter() -> String {
    std::env::var("RUST_LOG").unwrap_or_else(|_| "info".to_owned())
}

/// The operator in the hub, started again whenever it ends, as a kubelet would: it ends itself when it loses its lease.
fn start_operator(built: &Built, cluster: &mut Cluster) -> Result<()> {
    let layout = &cluster.config().layout;
    let service = Service {
        name: "imp-operator".to_owned(),
        command: vec![built.programs.path("imp-operator").into_string()],
        log: layout.logs().join("imp-operator.log"),
        after: None,
        once: false,
    };
    let file = layout.dir.join("operator.json");
    fs::write(&file, serde_json::to_vec_pretty(&[service])?).with_context(|| format!("write {file}"))?;
    let mut environment = vec![
        ("KUBECONFIG", layout.pki().join("imp-controller-manager.kubeconfig").into_string()),
        ("POD_NAME", "imp-controller-manager".to_owned()),
        ("POD_NAMESPACE", NAMESPACE.to_owned()),
        ("RUST_LOG", log_filter()),
    ];
    environment.extend(kill_dir("imp-operator").map(|dir| (imp_killpoint::VARIABLE, dir)));
    let program = cluster.config().self_program.clone();
    cluster.start_in_hub("operator", program.as_str(), &["keep", file.as_str()], &environment)
}

/// Runtime and, once it has its credentials, agent on each node, kept running by its PID 1.
fn start_nodes(built: &Built, cluster: &mut Cluster) -> Result<()> {
    for index in 1..=cluster.config().nodes {
        let services = services(built, cluster, index, &log_filter())?;
        cluster.start_light_node(index, services, &shared(built))?;
    }
    Ok(())
}

/// Directories that a node must see even where they are on another file system than `/`.
fn shared(built: &Built) -> Vec<Utf8PathBuf> {
    let programs = built.programs.path("imp-runtime");
    let files =
        [Some(programs.as_path()), Some(built.boot.kernel.as_path()), Some(built.boot.initrd.as_path())];
    let directories = files.into_iter().filter_map(|p| p?.parent().map(ToOwned::to_owned));
    // What a program takes off there must be seen from outside.
    directories.chain(std::env::var(imp_killpoint::VARIABLE).ok().map(Utf8PathBuf::from)).collect()
}

fn services(built: &Built, cluster: &Cluster, index: u8, log: &str) -> Result<Vec<Service>> {
    let layout = &cluster.config().layout;
    let (name, pki) = (node_name(index), layout.pki());
    // The runtime wants both files in one directory, under their usual names.
    let boot = layout.dir.join("boot");
    fs::create_dir_all(&boot).with_context(|| format!("make {boot}"))?;
    for (file, source) in [("vmlinux", &built.boot.kernel), ("initramfs.cpio", &built.boot.initrd)] {
        let link = boot.join(file);
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(source, &link).with_context(|| format!("link {link}"))?;
    }
    let service = |program: &str, environment: &[(&str, String)], args: &[String]| {
        let variables = environment.iter().map(|(k, v)| format!("{k}={v}"));
        let mut command =
            vec!["/usr/bin/env".to_owned(), format!("RUST_LOG={log}"), format!("NODE_NAME={name}")];
        command.extend(variables);
        command.extend(
            kill_dir(&format!("{name}-{program}")).map(|dir| format!("{}={dir}", imp_killpoint::VARIABLE)),
        );
        command.push(built.programs.path(program).into_string());
        command.extend_from_slice(args);
        Service {
            name: program.to_owned(),
            command,
            log: layout.logs().join(format!("{name}-{program}.log")),
            after: None,
            once: false,
        }
    };
    let runtime = service(
        "imp-runtime",
        &[],
        &[format!("--boot-dir={boot}"), format!("--insecure-registry={REGISTRY_HOST}:{REGISTRY_PORT}")],
    );
    let port = imp_api::names::port::OPERATOR_API;
    let kubeconfig = pki.join(format!("imp-agent-{name}.kubeconfig"));
    let mut agent = service(
        "imp-agent",
        &[
            ("KUBECONFIG", kubeconfig.to_string()),
            ("IMP_TOKEN_FILE", pki.join(format!("imp-agent-{name}.token")).into_string()),
            ("NODE_IP", node_ip(index).to_string()),
            ("POD_NAMESPACE", NAMESPACE.to_owned()),
            ("IMP_OPERATOR_URL", format!("https://imp-controller-manager.{NAMESPACE}.svc:{port}")),
        ],
        &[],
    );
    // The kubeconfig is written last.
    agent.after = Some(Condition::File(kubeconfig));
    Ok(vec![runtime, agent])
}
