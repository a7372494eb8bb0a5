//! What the chart lets operator, agents and people do, asked of a real API server with real tokens.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use imp_api::{ClusterImpNodeProfile, ImpVM};
use imp_testkit::tools;
use imp_testkit::wait::wait_for;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::authorization::v1::SelfSubjectAccessReview;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Secret, ServiceAccount};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::environment::{client, output, plane};

const NAMESPACE: &str = "imp-system";
/// What of the chart is about rights; its workloads are left out.
const KINDS: [&str; 7] = [
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
];

fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// Installs the rights of the chart, and two nodes with a pod of the agent each.
async fn install() {
    static DONE: OnceCell<Result<(), String>> = OnceCell::const_new();
    let done = DONE.get_or_init(async || try_install().await.map_err(|error| format!("{error:#}"))).await;
    done.as_ref().unwrap_or_else(|error| panic!("install the chart's rights: {error}"));
}

async fn try_install() -> Result<()> {
    let plane = plane().await;
    let client = plane.client().await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &object(json!({"metadata": {"name": NAMESPACE}}))).await?;
    let helm = tokio::task::spawn_blocking(tools::ensure_go_tools).await??.helm;
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/imp");
    let all = output(Command::new(helm).args([
        "template",
        "imp",
        chart,
        "--namespace",
        NAMESPACE,
        "--kube-version",
        "1.34.0",
    ]))?;
    let rights: Vec<&str> = all
        .split("\n---\n")
        .filter(|document| {
            document
                .lines()
                .any(|line| line.strip_prefix("kind: ").is_some_and(|kind| KINDS.contains(&kind.trim())))
        })
        .collect();
    let mut kubectl = plane
        .kubectl()
        .args(["apply", "--filename", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    kubectl.stdin.take().context("no standard input")?.write_all(rights.join("\n---\n").as_bytes())?;
    anyhow::ensure!(kubectl.wait()?.success(), "kubectl apply failed");

    let nodes: Api<Node> = Api::all(client.clone());
    let pods: Api<Pod> = Api::namespaced(client, NAMESPACE);
    for node in ["n1", "n2"] {
        nodes.create(&PostParams::default(), &object(json!({"metadata": {"name": node}}))).await?;
        let pod = json!({"metadata": {"name": format!("agent-{node}")}, "spec": {"nodeName": node,
            "serviceAccountName": "imp-agent", "containers": [{"name": "agent", "image": "agent"}]}});
        pods.create(&PostParams::default(), &object(pod)).await?;
    }
    Ok(())
}

/// A client with a token of a ServiceAccount, bound to a pod if one is given, as the kubelet would give it.
async fn client_of(account: &str, pod: Option<&str>) -> Client {
    let accounts: Api<ServiceAccount> = Api::namespaced(client().await, NAMESPACE);
    let bound = pod.map(|pod| json!({"apiVersion": "v1", "kind": "Pod", "name": pod}));
    let request: TokenRequest = object(
        json!({"metadata": {}, "spec": {"audiences": [], "expirationSeconds": 600, "boundObjectRef": bound}}),
    );
    let answer = accounts.create_token_request(account, &PostParams::default(), &request).await.unwrap();
    let token = answer.status.unwrap().token;
    let mut kubeconfig = Kubeconfig::read_from(plane().await.kubeconfig()).unwrap();
    kubeconfig.auth_infos[0].auth_info = Some(object(json!({"token": token})));
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// `auth can-i VERB GROUP/RESOURCE[/SUBRESOURCE]` in a namespace; none: in all.
async fn can(client: &Client, verb: &str, what: &str, namespace: Option<&str>) -> bool {
    let parts: Vec<&str> = what.split('/').collect();
    let review = json!({"spec": {"resourceAttributes": {"verb": verb, "group": parts[0], "resource": parts[1],
        "subresource": parts.get(2), "namespace": namespace}}});
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    reviews.create(&PostParams::default(), &object(review)).await.unwrap().status.unwrap().allowed
}

async fn expect(client: &Client, table: &[(&str, &str, Option<&str>, bool)]) {
    let mut wrong = Vec::new();
    for (verb, what, namespace, expected) in table {
        if can(client, verb, what, *namespace).await != *expected {
            wrong.push(format!("{verb} {what} in {namespace:?} should be {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn fr101_an_agent_can_do_little() {
    install().await;
    let agent = client_of("imp-agent", Some("agent-n1")).await;
    expect(
        &agent,
        &[
            ("list", "imp.dev/impvms", None, true),
            ("watch", "imp.dev/impvms", None, true),
            ("patch", "imp.dev/impvms/status", Some("default"), true),
            ("patch", "imp.dev/clusterimpnodeprofiles/status", None, true),
            ("update", "coordination.k8s.io/leases", Some(NAMESPACE), true),
            ("get", "/secrets", Some("default"), false),
            ("get", "/secrets", Some(NAMESPACE), false),
            ("list", "/secrets", None, false),
            ("get", "/configmaps", Some("default"), false),
            ("patch", "/nodes", None, false),
            ("patch", "/nodes/status", None, false),
            ("create", "/pods", Some("default"), false),
            ("patch", "imp.dev/impvms", Some("default"), false),
            ("delete", "imp.dev/impvms", Some("default"), false),
            ("create", "imp.dev/impvms", Some("default"), false),
            ("update", "coordination.k8s.io/leases", Some("kube-system"), false),
            ("create", "authentication.k8s.io/tokenreviews", None, false),
            ("create", "/serviceaccounts/token", Some(NAMESPACE), false),
        ],
    )
    .await;
}

#[tokio::test]
async fn the_operator_can_do_what_it_does_and_no_more() {
    install().await;
    let operator = client_of("imp-controller-manager", None).await;
    expect(
        &operator,
        &[
            ("patch", "imp.dev/impvms", Some("default"), true),
            ("delete", "imp.dev/impvms", Some("default"), true),
            ("patch", "imp.dev/impvms/status", Some("default"), true),
            ("get", "/secrets", Some("default"), true),
            ("get", "/configmaps", Some("default"), true),
            ("get", "/serviceaccounts", Some("default"), true),
            ("create", "/serviceaccounts/token", Some(NAMESPACE), false),
            ("create", "authentication.k8s.io/tokenreviews", None, true),
            ("create", "authorization.k8s.io/subjectaccessreviews", None, true),
            ("update", "coordination.k8s.io/leases", Some(NAMESPACE), true),
            ("list", "/secrets", None, false),
            ("patch", "/secrets", Some("default"), false),
            ("create", "/pods", Some("default"), false),
            ("patch", "/nodes", None, false),
            ("delete", "/nodes", None, false),
            ("create", "rbac.authorization.k8s.io/clusterrolebindings", None, false),
            ("create", "imp.dev/impvms", Some("default"), false),
        ],
    )
    .await;
}

#[tokio::test]
async fn the_operator_follows_its_ca_and_no_other_secret() {
    install().await;
    let operator = client_of("imp-controller-manager", None).await;
    let ca = ListParams::default().fields("metadata.name=imp-ca");
    let secrets: Api<Secret> = Api::namespaced(operator.clone(), NAMESPACE);
    secrets.list(&ca).await.unwrap();
    assert!(secrets.list(&ListParams::default()).await.is_err());
    Api::<ConfigMap>::namespaced(operator.clone(), NAMESPACE).list(&ca).await.unwrap();
    let service = ListParams::default().fields("metadata.name=v1alpha1.subresources.imp.dev");
    Api::<APIService>::all(operator).list(&service).await.unwrap();
}

#[tokio::test]
async fn the_runtime_has_no_rights() {
    install().await;
    let runtime = client_of("imp-runtime", None).await;
    expect(
        &runtime,
        &[
            ("list", "imp.dev/impvms", None, false),
            ("get", "/nodes", None, false),
            ("get", "/secrets", Some(NAMESPACE), false),
            ("patch", "imp.dev/impvms/status", Some("default"), false),
        ],
    )
    .await;
}

/// Fails with the policy's answer, or says what else happened.
fn denied<T>(result: Result<T, kube::Error>, expected: &str) -> Result<(), String> {
    match result {
        Ok(_) => Err("it was allowed".to_owned()),
        Err(error) if error.to_string().contains(expected) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

#[tokio::test]
async fn fr101_an_agent_writes_what_is_its_own_nodes_alone() {
    install().await;
    let admin: Api<ImpVM> = Api::default_namespaced(client().await);
    for node in ["n1", "n2"] {
        let vm = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": format!("on-{node}")},
            "spec": {"templateRef": {"name": "t"}}});
        admin.create(&PostParams::default(), &object(vm)).await.unwrap();
        let bind = Patch::Merge(json!({"status": {"nodeName": node}}));
        admin.patch_status(&format!("on-{node}"), &PatchParams::default(), &bind).await.unwrap();
    }
    let agent = client_of("imp-agent", Some("agent-n1")).await;
    let vms: Api<ImpVM> = Api::default_namespaced(agent.clone());
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    let parameters = PatchParams::default();
    // A policy holds a moment after it was made.
    wait_for(Duration::from_secs(30), "the policy to hold", async || {
        denied(vms.patch_status("on-n2", &parameters, &running).await, "the VM is not bound to node n1")
    })
    .await
    .unwrap();
    vms.patch_status("on-n1", &parameters, &running).await.unwrap();
    for node in [json!("n2"), Value::Null] {
        let rebind = Patch::Merge(json!({"status": {"nodeName": node}}));
        denied(vms.patch_status("on-n1", &parameters, &rebind).await, "may not change where a VM is bound")
            .unwrap();
    }

    let profiles: Api<ClusterImpNodeProfile> = Api::all(agent.clone());
    let profile = |node: &str| object(json!({"metadata": {"name": node}, "spec": {}}));
    profiles.create(&PostParams::default(), &profile("n1")).await.unwrap();
    denied(profiles.create(&PostParams::default(), &profile("n2")).await, "the profile of its own node, n1")
        .unwrap();

    let leases: Api<Lease> = Api::namespaced(agent, NAMESPACE);
    let lease = |name: &str| object(json!({"metadata": {"name": name}}));
    leases.create(&PostParams::default(), &lease("imp-node-n1")).await.unwrap();
    for other in ["imp-node-n2", "imp-controller-manager"] {
        denied(leases.create(&PostParams::default(), &lease(other)).await, "the lease of its own node, n1")
            .unwrap();
    }

    // A token that was not given to a pod on a node has no node.
    let nowhere: Api<ImpVM> = Api::default_namespaced(client_of("imp-agent", None).await);
    denied(nowhere.patch_status("on-n1", &parameters, &running).await, "not bound to a node").unwrap();
}
