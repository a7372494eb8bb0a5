//! A scripted stand-in for the runtime, for these tests alone: it speaks the runtime's protocol on a unix socket and
//! reports what the test tells it to.

#![allow(
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "support of tests; each test program uses its part"
)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use imp_api::{ImpVM, ImpVMClass};
use imp_proto::v1::runtime_server::{Runtime, RuntimeServer};
use imp_proto::v1::watch_vms_response::Event;
use imp_proto::v1::*;
use imp_testkit::wait::wait_for;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tonic::{Request, Response, Status, Streaming};

pub const NODE: &str = "node-1";
pub const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
pub struct Known {
    pub specs: HashMap<String, VmSpec>,
    pub secrets: HashMap<String, Option<VmSecrets>>,
    pub statuses: HashMap<String, VmStatus>,
    pub deleted: Vec<String>,
    pub puts: usize,
}

#[derive(Clone, Debug)]
pub struct FakeRuntime {
    pub known: Arc<Mutex<Known>>,
    changes: broadcast::Sender<Event>,
    /// VMs run as soon as they are put, step by step.
    pub automatic: bool,
}

impl FakeRuntime {
    pub fn new(automatic: bool) -> Self {
        Self { known: Arc::default(), changes: broadcast::channel(1024).0, automatic }
    }

    pub fn known<T>(&self, look: impl FnOnce(&mut Known) -> T) -> T {
        look(&mut self.known.lock().unwrap())
    }

    /// Changes what is reported of a VM.
    pub fn report(&self, uid: &str, change: impl FnOnce(&mut VmStatus)) {
        let status = self.known(|known| {
            let status = known.statuses.get_mut(uid).expect("a VM that was put");
            change(status);
            status.clone()
        });
        let _ = self.changes.send(Event::Vm(status));
    }

    pub fn states(&self, uid: &str, states: &[VmState]) {
        for state in states {
            self.report(uid, |status| go(status, *state));
        }
    }

    pub fn remove(&self, uid: &str) {
        self.known(|known| {
            known.statuses.remove(uid);
            known.specs.remove(uid);
        });
        let _ = self.changes.send(Event::Removed(uid.to_owned()));
    }

    /// Serves on `socket` until the returned guard is dropped; every connection ends then, as when the runtime dies.
    pub fn serve(&self, socket: &Path) -> Serving {
        let _ = std::fs::remove_file(socket);
        let listener = tokio::net::UnixListener::bind(socket).unwrap();
        let runtime = self.clone();
        let mut connections = tokio::task::JoinSet::new();
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = TowerToHyperService::new(RuntimeServer::new(runtime.clone()));
                connections.spawn(
                    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Serving { task, socket: socket.to_owned() }
    }
}

#[derive(Debug)]
pub struct Serving {
    task: tokio::task::JoinHandle<()>,
    socket: PathBuf,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// What a runtime would report in `state`.
pub fn go(status: &mut VmStatus, state: VmState) {
    let now = Some(std::time::SystemTime::now().into());
    let timings = status.timings.get_or_insert_default();
    timings.accepted = timings.accepted.or(now);
    if state == VmState::Running {
        timings.workload_started = timings.workload_started.or(now);
    }
    status.state = state.into();
    let begun = (VmState::Booting..=VmState::Stopping).contains(&state);
    status.image = Some(ImageStatus {
        digest: "sha256:abc".into(),
        ready: state > VmState::Pulling,
        ..Default::default()
    });
    status.network = Some(NetworkStatus { ready: begun, message: String::new() });
    status.vmm = begun.then(|| VmmStatus {
        driver: "qemu".into(),
        version: "9".into(),
        accelerator: "tcg".into(),
        pid: 77,
        started_at: now,
    });
    status.guest = Some(GuestStatus {
        connected: (VmState::Configuring..=VmState::Stopping).contains(&state),
        ..Default::default()
    });
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Runtime for FakeRuntime {
    async fn put_vm(&self, request: Request<PutVmRequest>) -> Result<Response<PutVmResponse>, Status> {
        let request = request.into_inner();
        let spec = request.spec.unwrap();
        let uid = spec.vm.clone().unwrap().uid;
        let (status, fresh) = self.known(|known| {
            known.puts += 1;
            let fresh = known.specs.get(&uid).is_none_or(|known| known.attempt != spec.attempt);
            let mut status = known.statuses.get(&uid).cloned().unwrap_or_default();
            if fresh {
                status = VmStatus { vm: spec.vm.clone(), attempt: spec.attempt, ..Default::default() };
                go(&mut status, VmState::Pending);
            }
            status.observed_generation = spec.generation;
            known.statuses.insert(uid.clone(), status.clone());
            known.specs.insert(uid.clone(), spec.clone());
            known.secrets.insert(uid.clone(), request.secrets);
            (status, fresh)
        });
        let _ = self.changes.send(Event::Vm(status.clone()));
        if fresh && self.automatic {
            use VmState::{Booting, Configuring, Preparing, Pulling, Running};
            self.states(&uid, &[Pulling, Preparing, Booting, Configuring, Running]);
        }
        Ok(Response::new(PutVmResponse { status: Some(status) }))
    }

    async fn delete_vm(
        &self,
        request: Request<DeleteVmRequest>,
    ) -> Result<Response<DeleteVmResponse>, Status> {
        let uid = request.into_inner().vm.unwrap().uid;
        let gone = self.known(|known| {
            known.deleted.push(uid.clone());
            !known.statuses.contains_key(&uid)
        });
        if !gone {
            self.report(&uid, |status| go(status, VmState::Stopping));
            if self.automatic {
                self.remove(&uid);
            }
        }
        Ok(Response::new(DeleteVmResponse { gone }))
    }

    type WatchVmsStream = Answers<WatchVmsResponse>;
    async fn watch_vms(&self, _: Request<WatchVmsRequest>) -> Result<Response<Self::WatchVmsStream>, Status> {
        let changes = BroadcastStream::new(self.changes.subscribe());
        let now: Vec<Event> = self.known(|known| known.statuses.values().cloned().map(Event::Vm).collect());
        let events = futures::stream::iter(now.into_iter().chain([Event::Synced(true)]))
            .chain(changes.filter_map(async |event| event.ok()));
        Ok(Response::new(events.map(|event| Ok(WatchVmsResponse { event: Some(event) })).boxed()))
    }

    async fn list_vms(&self, _: Request<ListVmsRequest>) -> Result<Response<ListVmsResponse>, Status> {
        let vms = self.known(|known| known.statuses.values().cloned().collect());
        Ok(Response::new(ListVmsResponse { vms, specs: Vec::new() }))
    }

    type ExecStream = Answers<ExecResponse>;
    /// Echoes standard input until it is closed; the first argument is the exit code.
    async fn exec(
        &self,
        request: Request<Streaming<ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        use exec_request::Message as In;
        use exec_response::Message as Out;
        let mut requests = request.into_inner();
        let Some(ExecRequest { message: Some(In::Start(start)) }) = requests.message().await? else {
            return Err(Status::invalid_argument("the first message must be start"));
        };
        let code: i32 = start.argv.last().and_then(|code| code.parse().ok()).unwrap_or(0);
        let (answers, receiver) = tokio::sync::mpsc::channel(4);
        tokio::spawn(async move {
            let say = async |message| answers.send(Ok(ExecResponse { message: Some(message) })).await;
            let _ = say(Out::Started(())).await;
            let _ = say(Out::Stderr(bytes::Bytes::from("started\n"))).await;
            let mut open = start.stdin;
            while open {
                match requests.message().await {
                    Ok(Some(ExecRequest { message: Some(In::Stdin(data)) })) => {
                        drop(say(Out::Stdout(data)).await);
                    }
                    Ok(Some(ExecRequest { message: Some(In::Resize(size)) })) => {
                        drop(say(Out::Stdout(format!("{}x{}\n", size.width, size.height).into())).await);
                    }
                    Ok(Some(ExecRequest { message: Some(In::CloseStdin(())) }) | None) | Err(_) => {
                        open = false;
                    }
                    Ok(Some(_)) => {}
                }
            }
            let _ = say(Out::Exit(ExitStatus { code, ..Default::default() })).await;
        });
        Ok(Response::new(tokio_stream::wrappers::ReceiverStream::new(receiver).boxed()))
    }

    type AttachStream = Answers<ExecResponse>;
    async fn attach(
        &self,
        request: Request<Streaming<ExecRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        self.exec(request).await
    }

    type LogsStream = Answers<LogsResponse>;
    async fn logs(&self, request: Request<LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let lines: Vec<String> = (1..=10).map(|line| format!("line {line}\n")).collect();
        let skip =
            request.tail_lines.map_or(0, |tail| lines.len().saturating_sub(usize::try_from(tail).unwrap()));
        let time = Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 5 });
        let chunks: Vec<_> = lines[skip..]
            .iter()
            .map(|line| {
                Ok(LogsResponse { stream: OutputStream::Stdout.into(), data: line.clone().into(), time })
            })
            .collect();
        Ok(Response::new(futures::stream::iter(chunks).boxed()))
    }

    type ConsoleStream = Answers<ConsoleResponse>;
    async fn console(
        &self,
        request: Request<Streaming<ConsoleRequest>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let echo = request.into_inner().filter_map(async |message| match message.ok()?.message? {
            console_request::Message::Start(_) => Some(Ok(ConsoleResponse { output: "login: ".into() })),
            console_request::Message::Input(input) => Some(Ok(ConsoleResponse { output: input })),
        });
        Ok(Response::new(echo.boxed()))
    }

    async fn node_info(&self, _: Request<NodeInfoRequest>) -> Result<Response<NodeInfoResponse>, Status> {
        Ok(Response::new(NodeInfoResponse {
            runtime_version: "0.1.0".into(),
            boot_id: "boot-1".into(),
            architecture: "amd64".into(),
            cpu_model: "Test CPU".into(),
            cpus: 4,
            memory_bytes: 8 << 30,
            kernel: "6.1".into(),
            vmms: vec![VmmInfo {
                driver: "qemu".into(),
                version: "9".into(),
                hardware_virtualization: false,
                message: "no KVM".into(),
            }],
            disk_free_bytes: 1 << 40,
        }))
    }

    async fn list_images(
        &self,
        _: Request<ListImagesRequest>,
    ) -> Result<Response<ListImagesResponse>, Status> {
        Ok(Response::new(ListImagesResponse::default()))
    }
}

/// Makes the CRDs, a class, and waits until they are served.
pub async fn install(client: &Client) {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
    let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(client.clone());
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "imp-system"}});
    namespaces
        .patch("imp-system", &PatchParams::apply("test").force(), &Patch::Apply(namespace))
        .await
        .unwrap();
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in imp_api::crds() {
        api.patch(&crd.name_any(), &PatchParams::apply("test").force(), &Patch::Apply(&crd)).await.unwrap();
    }
    let classes = Api::<ImpVMClass>::all(client.clone());
    let class: ImpVMClass = serde_json::from_value(json!({
        "apiVersion": "imp.dev/v1alpha1", "kind": "ImpVMClass", "metadata": {"name": "small"},
        "spec": {"vcpu": 1, "memoryMiB": 128, "diskGiB": 1}
    }))
    .unwrap();
    wait_for(PATIENCE, "the CRDs to be served", async || {
        classes
            .patch("small", &PatchParams::apply("test").force(), &Patch::Apply(&class))
            .await
            .map_err(|e| e.to_string())
    })
    .await
    .unwrap();
    let vms = Api::<ImpVM>::all(client.clone());
    wait_for(PATIENCE, "ImpVMs to be served", async || {
        vms.list(&Default::default()).await.map_err(|e| e.to_string())
    })
    .await
    .unwrap();
}

/// Creates a VM; a finalizer stands in for the operator's.
pub async fn create(client: &Client, name: &str, spec: serde_json::Value) -> ImpVM {
    let vm = serde_json::from_value(json!({
        "apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM",
        "metadata": {"name": name, "namespace": "default", "finalizers": ["imp.dev/vm"]}, "spec": spec
    }))
    .unwrap();
    vms(client).create(&PostParams::default(), &vm).await.unwrap()
}

pub fn vms(client: &Client) -> Api<ImpVM> {
    Api::namespaced(client.clone(), "default")
}

/// Writes the operator's part of the status.
pub async fn as_operator(client: &Client, name: &str, status: serde_json::Value) -> ImpVM {
    let body = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name}, "status": status});
    vms(client)
        .patch_status(name, &PatchParams::apply("imp-operator").force(), &Patch::Apply(&body))
        .await
        .unwrap()
}

pub async fn bind(client: &Client, name: &str) -> ImpVM {
    as_operator(client, name, json!({"nodeName": NODE, "phase": "Scheduled", "restartCount": 0})).await
}

pub fn phase(vm: &ImpVM) -> String {
    vm.status.as_ref().and_then(|status| status.phase).map(|phase| phase.to_string()).unwrap_or_default()
}

pub fn condition(vm: &ImpVM, kind: &str) -> (String, String) {
    let found = vm.status.iter().flat_map(|s| &s.conditions).find(|c| c.type_ == kind);
    found.map(|c| (c.status.clone(), c.reason.clone())).unwrap_or_default()
}

pub async fn wait_vm(client: &Client, name: &str, what: &str, check: impl Fn(&ImpVM) -> bool) -> ImpVM {
    wait_for(PATIENCE, what, async || {
        let vm = vms(client).get(name).await.map_err(|e| e.to_string())?;
        if check(&vm) { Ok(vm) } else { Err(format!("{:?}", vm.status)) }
    })
    .await
    .unwrap()
}

/// How these tests configure the agent.
pub fn config(socket: &Path) -> imp_agent::config::Config {
    use clap::Parser as _;
    let mut config = imp_agent::config::Config::parse_from([
        "imp-agent",
        "--node-name",
        NODE,
        "--node-ip",
        "127.0.0.1",
        "--streams-address",
        "127.0.0.1:0",
        "--metrics-address",
        "127.0.0.1:0",
        "--health-address",
        "127.0.0.1:0",
    ]);
    config.runtime_socket = socket.to_owned();
    config.timings.orphan_grace = Duration::from_millis(100);
    config.timings.runtime_lost = Duration::from_millis(200);
    config
}

/// Starts the agent in this process.
pub fn agent(client: &Client, socket: &Path) -> tokio::task::JoinHandle<()> {
    let (config, client) = (config(socket), client.clone());
    tokio::spawn(async move { imp_agent::run(config, client).await.unwrap() })
}
