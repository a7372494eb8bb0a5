//! Two whole operators against a real API server: who leads, what they serve and publish, how they end.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use imp_operator::metrics::Metrics;
use imp_operator::{client, runtime};
use imp_testkit::controlplane::{ControlPlane, Options};
use imp_testkit::wait::wait_for;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const NAMESPACE: &str = "imp-system";
const PATIENCE: Duration = Duration::from_secs(30);

/// An operator in this process.
struct Replica {
    config: runtime::Config,
    shutdown: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
}

fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

impl Replica {
    async fn start(plane: &ControlPlane, name: &str) -> Self {
        let config = runtime::Config {
            namespace: NAMESPACE.to_owned(),
            identity: name.to_owned(),
            api_address: free_address(),
            metrics_address: free_address(),
            health_address: free_address(),
        };
        let metrics = Arc::new(Metrics::default());
        let kubeconfig = Kubeconfig::read_from(plane.kubeconfig()).unwrap();
        let cluster =
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
        let client = client::counting(cluster, metrics.clone()).unwrap();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(runtime::run(config.clone(), client, metrics, shutdown.clone()));
        Self { config, shutdown, task }
    }

    /// GET over plain HTTP.
    async fn get(&self, address: SocketAddr, path: &str) -> Result<String, String> {
        let client =
            Client::try_from(kube::Config::new(format!("http://{address}").parse().unwrap())).unwrap();
        let request = http::Request::get(path).body(Vec::new()).unwrap();
        client.request_text(request).await.map_err(|error| error.to_string())
    }

    async fn ready(&self) {
        let ready = async || self.get(self.config.health_address, "/readyz").await;
        wait_for(PATIENCE, "the operator to be ready", ready).await.unwrap();
    }

    async fn end(self) {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap().unwrap();
    }
}

/// Whatever `look` gives once it gives something.
async fn wait<T>(what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    wait_for(PATIENCE, what, async || look().await.ok_or("not yet")).await.unwrap()
}

async fn plane() -> (ControlPlane, Client) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let plane = ControlPlane::start(Options::default()).await.unwrap();
    let client = plane.client().await.unwrap();
    for (path, body) in [
        ("/api/v1/namespaces", json!({"metadata": {"name": NAMESPACE}})),
        (
            "/apis/apiregistration.k8s.io/v1/apiservices",
            json!({"metadata": {"name": "v1alpha1.subresources.imp.dev"}, "spec": {
                "group": "subresources.imp.dev", "version": "v1alpha1", "groupPriorityMinimum": 1000, "versionPriority": 15,
                "service": {"name": "imp-controller-manager", "namespace": NAMESPACE, "port": 443}}}),
        ),
    ] {
        post(&client, path, &body).await;
    }
    for crd in imp_api::crds() {
        let body = serde_json::to_value(crd).unwrap();
        post(&client, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &body).await;
    }
    (plane, client)
}

async fn post(client: &Client, path: &str, body: &Value) {
    let request = http::Request::post(path).header("content-type", "application/json");
    client.request::<Value>(request.body(serde_json::to_vec(body).unwrap()).unwrap()).await.unwrap();
}

#[tokio::test]
async fn one_leads_and_the_next_follows_at_once_when_it_ends() {
    let (plane, client) = plane().await;
    let leases = Api::<Lease>::namespaced(client, NAMESPACE);
    let holder = async || {
        let lease = leases.get_opt("imp-controller-manager").await.unwrap();
        lease.and_then(|lease| lease.spec?.holder_identity).filter(|holder| !holder.is_empty())
    };
    let first = Replica::start(&plane, "first").await;
    assert_eq!(wait("a leader", &holder).await, "first");
    let second = Replica::start(&plane, "second").await;
    first.ready().await;
    second.ready().await;
    let figures = second.get(second.config.metrics_address, "/metrics").await.unwrap();
    assert!(figures.contains("imp_leading 0"), "{figures}");
    assert!(
        figures.contains("imp_api_requests_total{method=\"GET\",resource=\"leases\",code=\"200\"}"),
        "{figures}"
    );
    let figures = first.get(first.config.metrics_address, "/metrics").await.unwrap();
    assert!(figures.contains("imp_leading 1"), "{figures}");
    assert_eq!(holder().await.as_deref(), Some("first"));

    let ended = Instant::now();
    first.end().await;
    wait("the second to lead", async || holder().await.filter(|holder| holder == "second")).await;
    // Without the release it would be 15 s.
    assert!(ended.elapsed() < Duration::from_secs(10), "{:?}", ended.elapsed());
    second.end().await;
    assert_eq!(holder().await, None);
}

#[tokio::test]
async fn the_ca_is_published_restored_and_served_with() {
    let (plane, client) = plane().await;
    let secrets = Api::<Secret>::namespaced(client.clone(), NAMESPACE);
    let maps = Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE);
    let services = Api::<APIService>::all(client.clone());
    let replica = Replica::start(&plane, "only").await;
    replica.ready().await;
    let secret = secrets.get("imp-ca").await.unwrap().data.unwrap();
    let ca = String::from_utf8(secret["tls.crt"].0.clone()).unwrap();
    let published = async || {
        let text = maps.get_opt("imp-ca").await.unwrap()?.data?.remove("ca.crt")?;
        let bundle = services.get("v1alpha1.subresources.imp.dev").await.unwrap().spec?.ca_bundle?.0;
        (text == ca && bundle == ca.as_bytes()).then_some(())
    };
    wait("the CA to be published", &published).await;

    // Who tampers with it is put right.
    let nonsense = Patch::Merge(json!({"data": {"ca.crt": "nonsense"}}));
    maps.patch("imp-ca", &PatchParams::default(), &nonsense).await.unwrap();
    let nobody = Patch::Merge(json!({"spec": {"caBundle": null}}));
    services.patch("v1alpha1.subresources.imp.dev", &PatchParams::default(), &nobody).await.unwrap();
    wait("the CA to be published again", &published).await;
    maps.delete("imp-ca", &DeleteParams::default()).await.unwrap();
    secrets.delete("imp-ca", &DeleteParams::default()).await.unwrap();
    wait("the CA to be published once more", &published).await;
    let restored = wait("the Secret", async || secrets.get_opt("imp-ca").await.unwrap()).await.data.unwrap();
    assert!(restored == secret, "what is in use is restored, not made anew");

    // By its Service's name, with the published CA, and no other.
    for (name, works) in [("imp-controller-manager.imp-system.svc", true), ("n1", false)] {
        let mut config =
            kube::Config::new(format!("https://{}", replica.config.api_address).parse().unwrap());
        config.root_cert = Some(vec![CertificateDer::from_pem_slice(ca.as_bytes()).unwrap().to_vec()]);
        config.tls_server_name = Some(name.to_owned());
        config.default_retry = false;
        let client = Client::try_from(config).unwrap();
        for (path, expected) in [("/node/v1/vms/default/a?uid=u", 401), ("/apis", 401), ("/nowhere", 404)] {
            let request = http::Request::get(path).body(Vec::new()).unwrap();
            match client.request_text(request).await {
                Err(kube::Error::Api(status)) if works => assert_eq!(status.code, expected, "{path}"),
                Err(error) => assert!(!works, "{path}: {error}"),
                Ok(text) => panic!("{path}: {text}"),
            }
        }
    }
    replica.end().await;
}

#[tokio::test]
async fn who_loses_the_lease_ends() {
    let (plane, client) = plane().await;
    let leases = Api::<Lease>::namespaced(client, NAMESPACE);
    let replica = Replica::start(&plane, "old").await;
    let mut lease = wait("a leader", async || leases.get_opt("imp-controller-manager").await.unwrap()).await;
    // A renewal may come between reading and writing.
    wait_for(PATIENCE, "the lease to be taken", async || {
        let taken = Patch::Merge(
            json!({"spec": {"holderIdentity": "new", "renewTime": lease.spec.as_ref().unwrap().renew_time},
            "metadata": {"resourceVersion": lease.metadata.resource_version}}),
        );
        let done = leases.patch("imp-controller-manager", &PatchParams::default(), &taken).await;
        lease = leases.get("imp-controller-manager").await.unwrap();
        done.map(drop).map_err(|error| error.to_string())
    })
    .await
    .unwrap();
    let error = tokio::time::timeout(PATIENCE, replica.task).await.unwrap().unwrap().unwrap_err();
    assert!(format!("{error:#}").contains("\"new\" took the lease"), "{error:#}");
    let holder = leases.get("imp-controller-manager").await.unwrap().spec.unwrap().holder_identity;
    assert_eq!(holder.as_deref(), Some("new"), "it is not given up for another");
}

#[tokio::test]
async fn the_program_ends_in_order_on_sigterm() {
    let (plane, client) = plane().await;
    let leases = Api::<Lease>::namespaced(client, NAMESPACE);
    let holder = async || leases.get_opt("imp-controller-manager").await.unwrap()?.spec?.holder_identity;
    let address = || free_address().to_string();
    let program = tokio::process::Command::new(env!("CARGO_BIN_EXE_imp-operator"))
        .env_clear()
        .env("KUBECONFIG", plane.kubeconfig())
        .env("POD_NAME", "program")
        .env("IMP_LOG_FORMAT", "json")
        .env("IMP_API_ADDRESS", address())
        .env("IMP_METRICS_ADDRESS", address())
        .env("IMP_HEALTH_ADDRESS", address())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    wait("the program to lead", async || holder().await.filter(|holder| holder == "program")).await;
    let pid = program.id().unwrap().to_string();
    assert!(tokio::process::Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    let output = tokio::time::timeout(PATIENCE, program.wait_with_output()).await.unwrap().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    assert_eq!(holder().await.as_deref(), Some(""));
    for line in log.lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
    assert!(log.contains("SIGTERM") && !log.contains("PRIVATE KEY"), "{log}");
}
