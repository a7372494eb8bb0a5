//! exec, log and console through a real API server's aggregation layer: API server → operator's routes → agent over
//! mutual TLS → scripted runtime; and who is refused on the way.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::routing::{get, post};
use futures::{AsyncReadExt as _, SinkExt as _, StreamExt as _};
use imp_operator::subresources::{Subresources, authn::RequestHeader, node::NodeTls, router, server};
use imp_testkit::controlplane::{ControlPlane, Options};
use imp_testkit::wait::wait_for;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use rcgen::{CertificateParams, CertificateSigningRequestParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::json;
use support::*;
use tokio_tungstenite::tungstenite::Message;

struct Authority {
    pem: String,
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "Imp test CA");
        let certificate = params.self_signed(&key).unwrap();
        Self { pem: certificate.pem(), der: certificate.der().clone(), issuer: Issuer::new(params, key) }
    }

    fn issue(&self, name: &str, names: &[&str]) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let key = KeyPair::generate().unwrap();
        let mut params =
            CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (vec![certificate.der().clone()], PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())))
    }

    fn sign(&self, csr: &str) -> String {
        CertificateSigningRequestParams::from_pem(csr).unwrap().signed_by(&self.issuer).unwrap().pem()
    }

    /// A client configuration that trusts this authority and shows a certificate of it.
    fn client(&self, name: &str) -> rustls::ClientConfig {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.der.clone()).unwrap();
        let (chain, key) = self.issue(name, &[]);
        let mut config = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        config
    }
}

struct Stage {
    plane: ControlPlane,
    client: Client,
    authority: Arc<Authority>,
    nodes: NodeTls,
    runtime: FakeRuntime,
    serving: Option<Serving>,
    dir: tempfile::TempDir,
}

impl Stage {
    /// Everything up, VM `default/a` running, and the aggregated API available.
    async fn set() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Service imp-controller-manager leads to this process by name, for which endpoints are not looked at.
        let flags = vec!["--enable-aggregator-routing=false".to_owned()];
        let plane =
            ControlPlane::start(Options { apiserver_flags: flags, ..Options::default() }).await.unwrap();
        let client = plane.client().await.unwrap();
        install(&client).await;
        let authority = Arc::new(Authority::new());
        let nodes = NodeTls::default();
        nodes.store(Some(Arc::new(authority.client("imp-controller-manager"))));
        let port = operator(&client, &authority, &nodes).await;
        publish(&client, &authority, port).await;
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("runtime.sock");
        let token = dir.path().join("token");
        std::fs::write(&token, "a token").unwrap();
        let runtime = FakeRuntime::new(true);
        let serving = runtime.serve(&socket);
        let mut config = config(&socket);
        config.operator_url = format!("https://localhost:{port}");
        config.token_file = token;
        let agent = client.clone();
        tokio::spawn(async move { imp_agent::run(config, agent).await.unwrap() });
        create(&client, "a", json!({"classRef": {"name": "small"}, "image": "app:1"})).await;
        bind(&client, "a").await;
        wait_vm(&client, "a", "Running", |vm| phase(vm) == "Running").await;
        let stage = Self { plane, client, authority, nodes, runtime, serving: Some(serving), dir };
        wait_for(PATIENCE, "the log of the VM", async || {
            stage.log(&stage.client, "tailLines=1").await.map_err(|e| e.to_string())
        })
        .await
        .unwrap();
        stage
    }

    async fn log(&self, client: &Client, query: &str) -> kube::Result<String> {
        let request = http::Request::get(format!("{}/log?{query}", path("a"))).body(Vec::new()).unwrap();
        let mut text = String::new();
        let stream = client.request_stream(request).await?;
        std::pin::pin!(stream).read_to_string(&mut text).await.unwrap();
        Ok(text)
    }

    async fn exec(&self, client: &Client, query: &str) -> kube::Result<kube::client::Connection> {
        client
            .connect(http::Request::get(format!("{}/exec?{query}", path("a"))).body(Vec::new()).unwrap())
            .await
    }

    /// A client of `user` who has `verbs` on `resources` of the aggregated API.
    async fn person(&self, user: &str, resources: &[&str], verbs: &[&str]) -> Client {
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": user},
            "rules": [{"apiGroups": ["subresources.imp.dev"], "resources": resources, "verbs": verbs}]});
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": user},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]});
        apply(&self.client, "/apis/rbac.authorization.k8s.io/v1/clusterroles", &role).await;
        apply(&self.client, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await;
        self.plane.client_of(user, None).await.unwrap()
    }
}

fn path(vm: &str) -> String {
    format!("/apis/subresources.imp.dev/v1alpha1/namespaces/default/impvms/{vm}")
}

async fn apply(client: &Client, collection: &str, object: &serde_json::Value) {
    let name = object["metadata"]["name"].as_str().unwrap();
    let request = http::Request::patch(format!("{collection}/{name}?fieldManager=test&force=true"))
        .header("content-type", "application/apply-patch+yaml")
        .body(serde_json::to_vec(object).unwrap())
        .unwrap();
    client.request::<serde_json::Value>(request).await.unwrap();
}

/// Serves the operator's routes, and a node API that signs what it is given.
async fn operator(client: &Client, authority: &Arc<Authority>, nodes: &NodeTls) -> u16 {
    let front = RequestHeader::default();
    tokio::spawn(front.clone().follow(client.clone()));
    wait_for(PATIENCE, "the API server's CA", async || front.is_ready().then_some(()).ok_or("not read"))
        .await
        .unwrap();
    let (chain, key) =
        authority.issue("imp-controller-manager", &["imp-controller-manager.imp-system.svc", "localhost"]);
    let tls = server::ServerTls::default();
    tls.store(Some(Arc::new(server::config(front.clone(), chain, key).unwrap())));
    let signer = authority.clone();
    let routes = router(Subresources { client: client.clone(), front, nodes: nodes.clone() })
        .route(
            "/node/v1/vms/{namespace}/{name}",
            get(async || Json(json!({"env": [{"name": "PASSWORD", "value": "s3cret"}]}))),
        )
        .route("/node/v1/certificate", post(move |csr: String| std::future::ready(signer.sign(&csr))));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(server::serve(listener, tls, routes));
    port
}

/// Tells the API server where the aggregated API is, and the agent whom to trust.
async fn publish(client: &Client, authority: &Authority, port: u16) {
    use base64::Engine as _;
    let bundle = base64::engine::general_purpose::STANDARD.encode(&authority.pem);
    apply(
        client,
        "/api/v1/namespaces",
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "imp-system"}}),
    )
    .await;
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "imp-controller-manager"},
        "spec": {"type": "ExternalName", "externalName": "localhost"}});
    apply(client, "/api/v1/namespaces/imp-system/services", &service).await;
    let ca = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "imp-ca"}, "data": {"ca.crt": authority.pem}});
    apply(client, "/api/v1/namespaces/imp-system/configmaps", &ca).await;
    let api = json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "v1alpha1.subresources.imp.dev"},
        "spec": {"group": "subresources.imp.dev", "version": "v1alpha1", "groupPriorityMinimum": 1000, "versionPriority": 15, "caBundle": bundle,
                 "service": {"name": "imp-controller-manager", "namespace": "imp-system", "port": port}}});
    apply(client, "/apis/apiregistration.k8s.io/v1/apiservices", &api).await;
}

/// Everything of a stream by channel, and its outcome.
async fn read_all(
    mut stream: impl futures::Stream<Item = Result<Message, tokio_tungstenite::tungstenite::Error>> + Unpin,
) -> (BTreeMap<u8, Vec<u8>>, Status) {
    let mut output: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
    while let Some(Ok(message)) = stream.next().await {
        let Message::Binary(data) = message else { continue };
        if data[0] == 3 {
            return (output, serde_json::from_slice(&data[1..]).unwrap());
        }
        output.entry(data[0]).or_default().extend_from_slice(&data[1..]);
    }
    panic!("no outcome; {output:?}");
}

fn code(error: kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exec_log_and_console_reach_the_vm_through_the_api_server() {
    let stage = Stage::set().await;
    // Log.
    assert_eq!(stage.log(&stage.client, "tailLines=2").await.unwrap(), "line 9\nline 10\n");
    let stamped = stage.log(&stage.client, "tailLines=1&timestamps=true").await.unwrap();
    assert_eq!(stamped, "2027-01-15T08:00:00.000000005Z line 10\n");
    assert_eq!(stage.log(&stage.client, "limitBytes=10").await.unwrap().len(), 10);
    // Exec: input comes back, standard error is apart, the exit code is told.
    let connection = stage
        .exec(&stage.client, "command=echo&command=42&stdin=true&stdout=true&stderr=true")
        .await
        .unwrap();
    assert!(connection.supports_stream_close(), "v5");
    let (mut sink, stream) = connection.into_stream().split();
    sink.send(Message::Binary(b"\0hello".to_vec().into())).await.unwrap();
    sink.send(Message::Binary(b"\x04{\"Width\":80,\"Height\":24}".to_vec().into())).await.unwrap();
    sink.send(Message::Binary(vec![255, 0].into())).await.unwrap();
    let (output, outcome) = read_all(stream).await;
    assert_eq!(output[&1], b"hello80x24\n");
    assert_eq!(output[&2], b"started\n");
    assert_eq!(outcome.reason.as_deref(), Some("NonZeroExitCode"));
    assert_eq!(outcome.details.unwrap().causes.unwrap()[0].message.as_deref(), Some("42"));
    // Console.
    let request = http::Request::get(format!("{}/console", path("a"))).body(Vec::new()).unwrap();
    let (mut sink, mut stream) = stage.client.connect(request).await.unwrap().into_stream().split();
    sink.send(Message::Binary(b"\0root\r".to_vec().into())).await.unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"root\r") {
        let Message::Binary(data) = stream.next().await.unwrap().unwrap() else { continue };
        seen.extend_from_slice(&data[1..]);
    }
    assert_eq!(seen, b"login: root\r");
    // What cannot be is told before any upgrade.
    assert_eq!(code(stage.exec(&stage.client, "stdout=true").await.err().unwrap()), 400, "no command");
    let absent = http::Request::get(format!("{}/log", path("absent"))).body(Vec::new()).unwrap();
    assert_eq!(code(stage.client.request_text(absent).await.unwrap_err()), 404);
    create(&stage.client, "unbound", json!({"classRef": {"name": "small"}, "image": "app:1"})).await;
    let unbound = http::Request::get(format!("{}/log", path("unbound"))).body(Vec::new()).unwrap();
    assert_eq!(code(stage.client.request_text(unbound).await.unwrap_err()), 409);
    // kubectl finds the API.
    let found = stage
        .plane
        .kubectl()
        .args(["api-resources", "--api-group=subresources.imp.dev", "-o", "name"])
        .output()
        .unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_what_is_asked_at_every_call() {
    let stage = Stage::set().await;
    let command = "command=true&stdout=true";
    let nobody = stage.person("nobody", &["impvms/other"], &["get"]).await;
    let reader = stage.person("reader", &["impvms/log", "impvms/exec"], &["get"]).await;
    let editor = stage.person("editor", &["impvms/exec"], &["get", "create"]).await;
    // The positive control comes first, so that a refusal below means what it says.
    wait_for(PATIENCE, "editor's role", async || {
        stage.exec(&editor, command).await.map(drop).map_err(|e| e.to_string())
    })
    .await
    .unwrap();
    wait_for(PATIENCE, "reader's role", async || {
        stage.log(&reader, "").await.map(drop).map_err(|e| e.to_string())
    })
    .await
    .unwrap();
    assert_eq!(code(stage.exec(&nobody, command).await.err().unwrap()), 403);
    assert_eq!(code(stage.log(&nobody, "").await.unwrap_err()), 403);
    assert_eq!(code(stage.log(&editor, "").await.unwrap_err()), 403, "exec is no log");
    // The API server lets a GET through; the operator's own review refuses to let a reader run commands.
    let refused = stage.exec(&reader, command).await.err().unwrap();
    assert!(refused.to_string().contains("cannot create resource"), "{refused}");
    assert_eq!(code(refused), 403);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_operator_opens_streams_and_only_of_vms_of_the_node() {
    use imp_proto::v1::node_streams_client::NodeStreamsClient;
    use imp_proto::v1::{LogsRequest, VmRef};
    let stage = Stage::set().await;
    let profiles = Api::<imp_api::ClusterImpNodeProfile>::all(stage.client.clone());
    let endpoint = profiles.get(NODE).await.unwrap().status.unwrap().agent_endpoint.unwrap();
    let logs = async |name: &str, config: rustls::ClientConfig, uid: String| {
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let endpoint = endpoint.clone();
        let channel = tonic::transport::Endpoint::from_static("http://agent")
            .connect_with_connector(tower::service_fn(move |_| {
                let (connector, endpoint) = (connector.clone(), endpoint.clone());
                async move {
                    let stream = tokio::net::TcpStream::connect(endpoint).await?;
                    let server = rustls::pki_types::ServerName::try_from(NODE).unwrap();
                    connector.connect(server, stream).await.map(hyper_util::rt::TokioIo::new)
                }
            }))
            .await
            .map_err(|error| format!("{error:?}"))?;
        let vm = Some(VmRef { uid, namespace: "default".into(), name: name.into() });
        let answer = NodeStreamsClient::new(channel).logs(LogsRequest { vm, ..Default::default() }).await;
        answer.map(drop).map_err(|status| format!("{:?}", status.code()))
    };
    let uid = vms(&stage.client).get("a").await.unwrap().uid().unwrap();
    assert_eq!(logs("a", stage.authority.client("imp-controller-manager"), uid.clone()).await, Ok(()));
    assert_eq!(
        logs("a", stage.authority.client("imp-controller-manager"), "other".into()).await,
        Err("NotFound".into())
    );
    let other_agent = logs("a", stage.authority.client("node:node-2"), uid.clone()).await;
    assert!(other_agent.is_err(), "another agent's certificate is of the same CA");
    let mut stranger = rustls::RootCertStore::empty();
    stranger.add(stage.authority.der.clone()).unwrap();
    let stranger = rustls::ClientConfig::builder().with_root_certificates(stranger).with_no_client_auth();
    assert!(logs("a", stranger, uid).await.is_err(), "no certificate at all");
    // The operator without the right certificate is told that the node cannot be reached.
    stage.nodes.store(Some(Arc::new(stage.authority.client("someone"))));
    // A client that does not try a 503 again.
    let kubeconfig = kube::config::Kubeconfig::read_from(stage.plane.kubeconfig()).unwrap();
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
    config.default_retry = false;
    assert_eq!(code(stage.log(&Client::try_from(config).unwrap(), "").await.unwrap_err()), 503);
    assert!(stage.runtime.known(|known| known.deleted.is_empty()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_go_to_the_runtime_and_again_when_it_was_restarted() {
    let mut stage = Stage::set().await;
    let env = json!([{"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]);
    let uid =
        create(&stage.client, "b", json!({"classRef": {"name": "small"}, "image": "app:1", "env": env}))
            .await
            .uid()
            .unwrap();
    bind(&stage.client, "b").await;
    let secrets = async |stage: &Stage| {
        wait_for(PATIENCE, "the secrets", async || {
            let put = stage.runtime.known(|known| known.secrets.get(&uid).cloned().flatten());
            put.map(|secrets| secrets.env[0].value.clone()).ok_or("not put")
        })
        .await
        .unwrap()
    };
    assert_eq!(secrets(&stage).await, "s3cret");
    wait_vm(&stage.client, "b", "Running", |vm| phase(vm) == "Running").await;
    let spec = stage.runtime.known(|known| known.specs[&uid].clone());
    assert!(spec.needs_secrets && spec.workload.unwrap().env.is_empty());
    // The runtime holds them in memory only; its VMs live on.
    let socket = stage.dir.path().join("runtime.sock");
    stage.runtime.known(|known| known.secrets.clear());
    stage.serving = None;
    stage.serving = Some(stage.runtime.serve(&socket));
    assert_eq!(secrets(&stage).await, "s3cret");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_alone_make_nobody_anybody() {
    let stage = Stage::set().await;
    let api = Api::<k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService>::all(
        stage.client.clone(),
    );
    let port =
        api.get("v1alpha1.subresources.imp.dev").await.unwrap().spec.unwrap().service.unwrap().port.unwrap();
    let mut config = kube::Config::new(format!("https://localhost:{port}").parse().unwrap());
    config.root_cert = Some(vec![stage.authority.der.to_vec()]);
    config.headers = vec![
        (http::HeaderName::from_static("x-remote-user"), http::HeaderValue::from_static("admin")),
        (http::HeaderName::from_static("x-remote-group"), http::HeaderValue::from_static("system:masters")),
    ];
    let direct = Client::try_from(config).unwrap();
    assert_eq!(code(stage.log(&direct, "").await.unwrap_err()), 401);
    let params = PatchParams::apply("test").force();
    let profile = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ClusterImpNodeProfile", "metadata": {"name": NODE}, "spec": {"maxImpVMs": 3}});
    // What a person sets in the profile is theirs.
    let profiles = Api::<imp_api::ClusterImpNodeProfile>::all(stage.client.clone());
    let object = profiles.patch(NODE, &params, &Patch::Apply(profile)).await.unwrap();
    assert_eq!(object.status.unwrap().runtime_version.as_deref(), Some("0.1.0"));
}
