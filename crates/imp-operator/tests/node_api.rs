//! The node API over TLS against a real API server, called by the agent's own client with real pod-bound tokens.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use imp_agent::operator::{Operator, OperatorError};
use imp_api::ImpVM;
use imp_operator::ca::{Authority, Purpose, Store};
use imp_operator::metrics::Metrics;
use imp_operator::node_api;
use imp_operator::subresources::authn::RequestHeader;
use imp_operator::subresources::server::{self, ServerTls};
use imp_testkit::controlplane::{ControlPlane, Options};
use imp_testkit::wait::wait_for;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret, ServiceAccount};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use serde_json::{Value, json};
use tokio::sync::{OnceCell, watch};

const NAMESPACE: &str = "imp-system";

/// One control plane for all tests of this file.
async fn plane() -> &'static ControlPlane {
    static PLANE: OnceCell<ControlPlane> = OnceCell::const_new();
    PLANE
        .get_or_init(async || {
            let _ = rustls::crypto::ring::default_provider().install_default();
            let plane = ControlPlane::start(Options::default()).await.unwrap();
            prepare(&plane.client().await.unwrap()).await;
            plane
        })
        .await
}

async fn create(client: &Client, path: &str, body: Value) {
    let request = http::Request::post(path)
        .header("content-type", "application/json")
        .body(serde_json::to_vec(&body).unwrap())
        .unwrap();
    client.request::<Value>(request).await.unwrap_or_else(|error| panic!("create {body}: {error}"));
}

/// Kinds, accounts, nodes n1 and n2 with an agent's pod each, VMs `a` on n1 and `b` on n2, Secrets.
async fn prepare(client: &Client) {
    for crd in imp_api::crds() {
        create(
            client,
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            serde_json::to_value(crd).unwrap(),
        )
        .await;
    }
    create(client, "/api/v1/namespaces", json!({"metadata": {"name": NAMESPACE}})).await;
    for (namespace, account) in [(NAMESPACE, "imp-agent"), (NAMESPACE, "other"), ("default", "imp-agent")] {
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        create(client, &accounts, json!({"metadata": {"name": account}})).await;
    }
    let account = json!({"metadata": {"name": "default"}, "imagePullSecrets": [{"name": "pull"}]});
    create(client, "/api/v1/namespaces/default/serviceaccounts", account).await;
    for node in ["n1", "n2"] {
        create(client, "/api/v1/nodes", json!({"metadata": {"name": node}})).await;
    }
    for (namespace, pod, account, node) in [
        (NAMESPACE, "agent-n1", "imp-agent", "n1"),
        (NAMESPACE, "agent-n2", "imp-agent", "n2"),
        (NAMESPACE, "other-n1", "other", "n1"),
        ("default", "agent-n1", "imp-agent", "n1"),
    ] {
        let pod = json!({"metadata": {"name": pod}, "spec": {"nodeName": node, "serviceAccountName": account,
            "containers": [{"name": "c", "image": "c"}]}});
        create(client, &format!("/api/v1/namespaces/{namespace}/pods"), pod).await;
    }
    let secrets = "/api/v1/namespaces/default/secrets";
    create(client, secrets, json!({"metadata": {"name": "db"}, "stringData": {"password": "hush"}})).await;
    create(
        client,
        secrets,
        json!({"metadata": {"name": "pull"}, "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": "{\"auths\":{}}"}}),
    )
    .await;
    for (name, node, secret) in [("a", "n1", "db"), ("b", "n2", "db"), ("lacks", "n1", "absent")] {
        vm(client, name, node, secret).await;
    }
}

async fn vm(client: &Client, name: &str, node: &str, secret: &str) {
    let body = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name},
        "spec": {"classRef": {"name": "small"}, "image": "app:1", "env": [
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": secret, "key": "password"}}},
            {"name": "URL", "value": "db://$(PASSWORD)@$(NODE)"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}});
    let api = Api::<ImpVM>::default_namespaced(client.clone());
    let body: ImpVM = serde_json::from_value(body).unwrap();
    // A kind is served a moment after it was defined.
    wait_for(Duration::from_secs(30), "ImpVMs to be served", async || {
        api.create(&PostParams::default(), &body).await.map_err(|error| error.to_string())
    })
    .await
    .unwrap();
    let bind = Patch::Merge(json!({"status": {"nodeName": node}}));
    api.patch_status(name, &PatchParams::default(), &bind).await.unwrap();
}

/// The node API on a port of this machine.
struct Stage {
    client: Client,
    authority: Arc<Authority>,
    metrics: Arc<Metrics>,
    port: u16,
    dir: tempfile::TempDir,
}

impl Stage {
    async fn set() -> Self {
        let client = plane().await.client().await.unwrap();
        let authority = Arc::new(Store::new(client.clone(), NAMESPACE).load_or_create(None).await.unwrap());
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "imp-ca"},
            "data": {"ca.crt": authority.pem()}});
        let maps = Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE);
        maps.patch("imp-ca", &PatchParams::apply("test"), &Patch::Apply(map)).await.unwrap();
        // The operator's own names do not lead here.
        let identity = authority.issue("test", &["localhost".to_owned()], Purpose::Server).unwrap();
        let tls = ServerTls::default();
        let config = server::config(RequestHeader::default(), identity.chain, identity.key).unwrap();
        tls.store(Some(Arc::new(config)));
        let metrics = Arc::new(Metrics::default());
        let (_, known) = watch::channel(Some(authority.clone()));
        let router = node_api::router(client.clone(), NAMESPACE, known, metrics.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(server::serve(listener, tls, router));
        Self { client, authority, metrics, port, dir: tempfile::tempdir().unwrap() }
    }

    /// The agent's client with `token`.
    fn with_token(&self, token: &str) -> Operator {
        let file = tempfile::NamedTempFile::new_in(self.dir.path()).unwrap().into_temp_path().keep().unwrap();
        std::fs::write(&file, token).unwrap();
        let url = format!("https://localhost:{}", self.port);
        Operator::new(self.client.clone(), NAMESPACE.to_owned(), url, file)
    }

    /// The agent's client with a token of a ServiceAccount, bound to a pod if one is given.
    async fn agent(&self, namespace: &str, account: &str, pod: Option<&str>) -> Operator {
        let bound = pod.map(|pod| json!({"apiVersion": "v1", "kind": "Pod", "name": pod}));
        let request: TokenRequest = serde_json::from_value(json!({"metadata": {},
            "spec": {"audiences": [], "expirationSeconds": 600, "boundObjectRef": bound}}))
        .unwrap();
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace);
        let answer = accounts.create_token_request(account, &PostParams::default(), &request).await.unwrap();
        self.with_token(&answer.status.unwrap().token)
    }

    async fn vm(&self, name: &str) -> ImpVM {
        Api::<ImpVM>::default_namespaced(self.client.clone()).get(name).await.unwrap()
    }
}

/// HTTP status and message of a refusal.
fn refusal<T>(result: Result<T, OperatorError>) -> (u16, String) {
    match result.err() {
        Some(OperatorError::Refused { code, message, .. }) => (code, message),
        other => panic!("no refusal: {other:?}"),
    }
}

#[tokio::test]
async fn fr101_a_node_gets_the_secrets_of_its_own_vms_alone() {
    let stage = Stage::set().await;
    let n1 = stage.agent(NAMESPACE, "imp-agent", Some("agent-n1")).await;
    let n2 = stage.agent(NAMESPACE, "imp-agent", Some("agent-n2")).await;
    let (a, b) = (stage.vm("a").await, stage.vm("b").await);
    for (agent, vm, node) in [(&n1, &a, "n1"), (&n2, &b, "n2")] {
        let secrets = agent.vm_secrets(vm).await.unwrap();
        let env: Vec<_> = secrets.env.iter().map(|var| (var.name.as_str(), var.value.as_str())).collect();
        assert_eq!(env, [("PASSWORD", "hush"), ("URL", "db://hush@$(NODE)"), ("NODE", node)]);
        assert_eq!(secrets.docker_config_json, [b"{\"auths\":{}}".as_slice()]);
    }
    for (agent, vm) in [(&n1, &b), (&n2, &a)] {
        let (code, message) = refusal(agent.vm_secrets(vm).await);
        assert!(
            code == 403 && message.contains("not bound to node") && !message.contains("hush"),
            "{message}"
        );
    }
    let text = stage.metrics.render();
    assert!(text.contains("imp_node_api_requests_total{route=\"vm\",code=\"403\"} 2"), "{text}");
}

#[tokio::test]
async fn what_is_wrong_with_a_vm_is_told_by_its_status() {
    let stage = Stage::set().await;
    let n1 = stage.agent(NAMESPACE, "imp-agent", Some("agent-n1")).await;
    let mut earlier = stage.vm("a").await;
    earlier.metadata.uid = Some("another".to_owned());
    assert_eq!(refusal(n1.vm_secrets(&earlier).await).0, 409);
    let mut gone = stage.vm("a").await;
    gone.metadata.name = Some("gone".to_owned());
    assert_eq!(refusal(n1.vm_secrets(&gone).await).0, 404);
    let (code, message) = refusal(n1.vm_secrets(&stage.vm("lacks").await).await);
    assert!(
        code == 424 && message.contains("Secret \"absent\"") && message.contains("PASSWORD"),
        "{message}"
    );
}

#[tokio::test]
async fn fr101_nobody_but_an_agent_with_a_node_gets_anything() {
    let stage = Stage::set().await;
    let a = stage.vm("a").await;
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
    for (who, agent, expected) in [
        ("another account", stage.agent(NAMESPACE, "other", Some("other-n1")).await, 403),
        ("the name in another namespace", stage.agent("default", "imp-agent", Some("agent-n1")).await, 403),
        ("a token without a pod", stage.agent(NAMESPACE, "imp-agent", None).await, 403),
        ("nonsense", stage.with_token("nonsense"), 401),
    ] {
        assert_eq!(refusal(agent.vm_secrets(&a).await).0, expected, "{who}");
        assert_eq!(refusal(agent.sign(request.clone()).await).0, expected, "{who}");
    }
    // The same request of an agent is answered.
    let n1 = stage.agent(NAMESPACE, "imp-agent", Some("agent-n1")).await;
    n1.sign(request).await.unwrap();
}

#[tokio::test]
async fn a_certificate_is_in_the_name_of_the_callers_node_whatever_it_asks_for() {
    let stage = Stage::set().await;
    let n1 = stage.agent(NAMESPACE, "imp-agent", Some("agent-n1")).await;
    let key = rcgen::KeyPair::generate().unwrap();
    let wanted = rcgen::CertificateParams::new(vec!["n2".to_owned()]).unwrap();
    let chain = n1.sign(wanted.serialize_request(&key).unwrap().pem().unwrap()).await.unwrap();
    let leaf = CertificateDer::from_pem_slice(chain.as_bytes()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(stage.authority.certificate().clone()).unwrap();
    let verifier = WebPkiServerVerifier::builder(Arc::new(roots)).build().unwrap();
    let verify = |name: &'static str| {
        let name = ServerName::try_from(name).unwrap();
        verifier.verify_server_cert(&leaf, &[], &name, &[], UnixTime::now())
    };
    verify("n1").unwrap();
    verify("n2").unwrap_err();
    let (code, message) = refusal(n1.sign("nonsense".to_owned()).await);
    assert!(code == 400 && message.contains("PKCS #10"), "{message}");
}

#[tokio::test]
async fn of_racers_one_makes_the_ca_and_all_have_it() {
    let client = plane().await.client().await.unwrap();
    let name = "racers";
    let namespace = Namespace {
        metadata: kube::core::ObjectMeta { name: Some(name.to_owned()), ..Default::default() },
        ..Default::default()
    };
    Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
    let racers = (0..8).map(|_| {
        let client = client.clone();
        async move { Store::new(client, name).load_or_create(None).await.unwrap() }
    });
    let found = futures::future::join_all(racers).await;
    let secret = Api::<Secret>::namespaced(client, name).get("imp-ca").await.unwrap();
    let kept = &secret.data.as_ref().unwrap()["tls.crt"].0;
    assert!(found.iter().all(|authority| authority.pem().as_bytes() == kept));
    assert_eq!(secret.metadata.generation, None);
    assert_eq!(secret.managed_fields().len(), 1, "written once");
}
