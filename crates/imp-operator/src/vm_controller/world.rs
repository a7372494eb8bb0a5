//! What decisions depend on, watched: nodes and what pods take of them, classes, templates, networks, profiles, and what we
//! promised and have not yet seen in the API.

use anyhow::Context as _;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use imp_api::{
    ClusterImpConfig, ClusterImpNodeProfile, ImpNetwork, ImpVM, ImpVMClass, ImpVMTemplate, VMPhase,
};
use imp_core::{
    placement::{Ledger, Request},
    quantity,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Resource, ResourceExt as _,
    runtime::{
        WatchStreamExt as _,
        reflector::{self, Store},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use std::{
    collections::{BTreeSet, HashMap},
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
    net::Ipv4Addr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// An address that a VM has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reservation {
    /// Namespace and name of the network.
    pub(super) network: (String, String),
    pub(super) address: Ipv4Addr,
    pub(super) mac: String,
}

/// What was decided for a VM, whether or not it stands in the API yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) node: String,
    pub(super) reservation: Option<Reservation>,
}

#[derive(Debug, Default)]
struct Books {
    ledger: Ledger,
    bindings: HashMap<String, Binding>,
    failures: HashMap<String, u32>,
}

/// Everything that is watched, and our books.
#[derive(Debug)]
pub(super) struct World {
    pub(super) vms: Store<ImpVM>,
    pub(super) nodes: Store<Node>,
    pub(super) classes: Store<ImpVMClass>,
    pub(super) templates: Store<ImpVMTemplate>,
    pub(super) networks: Store<ImpNetwork>,
    pub(super) profiles: Store<ClusterImpNodeProfile>,
    pub(super) configs: Store<ClusterImpConfig>,
    pods: Arc<Mutex<Pods>>,
    books: Mutex<Books>,
    /// One VM is placed at a time: two decisions at once would both count what is free.
    placing: Mutex<()>,
    /// Has the VMs that wait looked at again.
    told: mpsc::Sender<()>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The books hold totals that each change keeps whole; a panic between two changes loses nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Watching = Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>;

impl World {
    /// Starts to watch; returns once everything has been seen once. The stream tells of changes that may let waiting VMs
    /// go on; the future is the work of watching.
    pub(super) async fn watch(
        client: &kube::Client,
        vms: Store<ImpVM>,
    ) -> anyhow::Result<(Arc<Self>, impl Stream<Item = ()> + Send + use<>, Watching)> {
        // One place: a change that is not yet taken up stands for those after it.
        let (told, changes) = mpsc::channel(1);
        let (nodes, watch_nodes) = follow(Api::<Node>::all(client.clone()), told.clone(), node_facts);
        let (classes, watch_classes) =
            follow(Api::<ImpVMClass>::all(client.clone()), told.clone(), generation);
        let (templates, watch_templates) =
            follow(Api::<ImpVMTemplate>::all(client.clone()), told.clone(), generation);
        let (networks, watch_networks) =
            follow(Api::<ImpNetwork>::all(client.clone()), told.clone(), generation);
        let (profiles, watch_profiles) =
            follow(Api::<ClusterImpNodeProfile>::all(client.clone()), told.clone(), generation);
        let (configs, watch_configs) =
            follow(Api::<ClusterImpConfig>::all(client.clone()), told.clone(), generation);
        let pods = Arc::new(Mutex::new(Pods::default()));
        let (pods_seen, pods_ready) = tokio::sync::oneshot::channel();
        let watch_pods = follow_pods(client.clone(), Arc::clone(&pods), told.clone(), pods_seen);
        let world = Arc::new(Self {
            vms,
            nodes,
            classes,
            templates,
            networks,
            profiles,
            configs,
            pods,
            books: Mutex::default(),
            placing: Mutex::default(),
            told,
        });
        let mut watching: Watching = Box::pin(async move {
            tokio::try_join!(
                watch_nodes,
                watch_classes,
                watch_templates,
                watch_networks,
                watch_profiles,
                watch_configs,
                watch_pods
            )
            .map(drop)
        });
        let seen = Arc::clone(&world);
        let ready = async move {
            seen.nodes.wait_until_ready().await?;
            seen.classes.wait_until_ready().await?;
            seen.templates.wait_until_ready().await?;
            seen.networks.wait_until_ready().await?;
            seen.profiles.wait_until_ready().await?;
            seen.configs.wait_until_ready().await?;
            pods_ready.await.context("the watch of pods ended")
        };
        tokio::select! {
            ready = ready => ready?,
            ended = &mut watching => ended?,
        }
        Ok((world, ReceiverStream::new(changes), watching))
    }

    /// No other VM is placed while this is held.
    pub(super) fn placing(&self) -> MutexGuard<'_, ()> {
        locked(&self.placing)
    }

    /// CPU (thousandths) and memory (bytes) that pods request on a node.
    pub(super) fn pods_on(&self, node: &str) -> (u64, u64) {
        locked(&self.pods).totals.get(node).copied().unwrap_or_default()
    }

    pub(super) fn ledger(&self) -> Ledger {
        locked(&self.books).ledger.clone()
    }

    /// What is decided for a VM: as the API says, else as promised.
    pub(super) fn binding(&self, vm: &ImpVM) -> Option<Binding> {
        locked(&self.books).bindings.get(&vm.uid()?).cloned()
    }

    /// Writes a VM into the books.
    pub(super) fn promise(&self, vm: &ImpVM, binding: Binding, request: Option<&Request>) {
        let Some(uid) = vm.uid() else { return };
        let mut books = locked(&self.books);
        match request {
            Some(request) => books.ledger.assume(&uid, &binding.node, request),
            None => {
                if books.ledger.release(&uid) {
                    self.freed();
                }
            }
        }
        books.bindings.insert(uid, binding);
    }

    /// A promise could not be written: what the API says holds again.
    pub(super) fn retract(&self, vm: &ImpVM) {
        let bound = vm.status.as_ref().is_some_and(|status| status.node_name.is_some());
        if !bound {
            self.forget(vm);
        }
    }

    pub(super) fn forget(&self, vm: &ImpVM) {
        let Some(uid) = vm.uid() else { return };
        let mut books = locked(&self.books);
        books.ledger.release(&uid);
        books.failures.remove(&uid);
        if books.bindings.remove(&uid).is_some() {
            self.freed();
        }
    }

    /// A VM gave back an address or a part of a node: another may wait for it.
    fn freed(&self) {
        // Full: the others are about to be looked at already.
        let _ = self.told.try_send(());
    }

    /// Takes every bound VM of the API into the books, and what has no object any more out of them. Before a placement.
    pub(super) fn settle(&self, request_of: impl Fn(&ImpVM) -> Option<Request>) {
        let vms = self.vms.state();
        let live: BTreeSet<String> = vms.iter().filter_map(|vm| vm.uid()).collect();
        let mut books = locked(&self.books);
        let gone: Vec<String> = books.bindings.keys().filter(|uid| !live.contains(*uid)).cloned().collect();
        for uid in gone {
            books.ledger.release(&uid);
            books.bindings.remove(&uid);
        }
        for vm in &vms {
            let (Some(uid), Some(binding)) = (vm.uid(), super::dereference::bound(self, vm)) else {
                continue;
            };
            if !books.bindings.contains_key(&uid) {
                if let Some(request) = request_of(vm) {
                    books.ledger.assume(&uid, &binding.node, &request);
                }
                books.bindings.insert(uid, binding);
            }
        }
    }

    /// Addresses and MACs of a network that VMs other than `vm` have.
    pub(super) fn reserved(
        &self,
        vm: &ImpVM,
        network: &(String, String),
    ) -> (BTreeSet<Ipv4Addr>, BTreeSet<String>) {
        let uid = vm.uid();
        let books = locked(&self.books);
        let others = books.bindings.iter().filter(|(other, _)| Some(*other) != uid.as_ref());
        let reservations =
            others.filter_map(|(_, b)| b.reservation.as_ref()).filter(|r| r.network == *network);
        reservations.map(|r| (r.address, r.mac.clone())).unzip()
    }

    pub(super) fn phases(&self) -> Vec<VMPhase> {
        self.vms.state().iter().filter_map(|vm| vm.status.as_ref()?.phase).collect()
    }

    /// Counts failures in a row.
    pub(super) fn failed(&self, vm: &ImpVM) -> u32 {
        let mut books = locked(&self.books);
        let count = books.failures.entry(vm.uid().unwrap_or_default()).or_default();
        *count += 1;
        *count - 1
    }

    pub(super) fn succeeded(&self, vm: &ImpVM) {
        locked(&self.books).failures.remove(&vm.uid().unwrap_or_default());
    }
}

/// Watches a kind into a store, and tells when what matters of an object (its `facts`) has changed.
fn follow<K>(
    api: Api<K>,
    told: mpsc::Sender<()>,
    facts: fn(&K) -> u64,
) -> (Store<K>, impl Future<Output = anyhow::Result<()>> + Send)
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let stream = watcher(api, watcher::Config::default()).default_backoff().reflect(writer);
    let watching = async move {
        let mut known: HashMap<String, u64> = HashMap::new();
        let mut stream = std::pin::pin!(stream);
        // Errors are retried by the watcher, with back-off; they end nothing.
        while let Some(event) = stream.next().await {
            let news = match event {
                Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                    let facts = facts(&object);
                    known.insert(object.uid().unwrap_or_default(), facts) != Some(facts)
                }
                Ok(watcher::Event::Delete(object)) => {
                    known.remove(&object.uid().unwrap_or_default()).is_some()
                }
                Ok(watcher::Event::Init) => false,
                Ok(watcher::Event::InitDone) => true,
                Err(error) => {
                    tracing::warn!(kind = %K::kind(&()), error = &error as &dyn std::error::Error, "the watch is tried again");
                    false
                }
            };
            if news {
                // Full: a change is about to be taken up already.
                let _ = told.try_send(());
            }
        }
        anyhow::bail!("the watch of {} ended", K::kind(&()))
    };
    (store, watching)
}

fn generation<K: Resource>(object: &K) -> u64 {
    object.meta().generation.unwrap_or_default().unsigned_abs()
}

/// A node's status changes all the time; only this of it matters to placement.
fn node_facts(node: &Node) -> u64 {
    let mut hasher = DefaultHasher::new();
    let spec = node.spec.as_ref();
    node.metadata.labels.hash(&mut hasher);
    spec.and_then(|s| s.unschedulable).hash(&mut hasher);
    for taint in spec.and_then(|s| s.taints.as_ref()).into_iter().flatten() {
        (&taint.key, &taint.value, &taint.effect).hash(&mut hasher);
    }
    let status = node.status.as_ref();
    for condition in status.and_then(|s| s.conditions.as_ref()).into_iter().flatten() {
        (&condition.type_, &condition.status).hash(&mut hasher);
    }
    for (resource, quantity) in status.and_then(|s| s.allocatable.as_ref()).into_iter().flatten() {
        (resource, &quantity.0).hash(&mut hasher);
    }
    hasher.finish()
}

/// What pods request, kept as numbers: the pods themselves would be most of our memory.
#[derive(Debug, Default)]
struct Pods {
    pods: HashMap<String, (String, u64, u64)>,
    totals: HashMap<String, (u64, u64)>,
}

impl Pods {
    fn set(&mut self, uid: String, pod: Option<(String, u64, u64)>) -> bool {
        let old = match pod.clone() {
            Some(new) => self.pods.insert(uid, new),
            None => self.pods.remove(&uid),
        };
        if old == pod {
            return false;
        }
        if let Some((node, cpu, memory)) = old
            && let Some(total) = self.totals.get_mut(&node)
        {
            total.0 -= cpu;
            total.1 -= memory;
        }
        if let Some((node, cpu, memory)) = pod {
            let total = self.totals.entry(node).or_default();
            total.0 += cpu;
            total.1 += memory;
        }
        true
    }
}

/// Node and requests of a pod that takes part of a node.
fn requests(pod: &Pod) -> Option<(String, u64, u64)> {
    let spec = pod.spec.as_ref()?;
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let of = |resources: Option<&k8s_openapi::api::core::v1::ResourceRequirements>| {
        let requests = resources.and_then(|r| r.requests.as_ref());
        let get = |name: &str| requests.and_then(|r| r.get(name)).map(|q| q.0.clone());
        let cpu = get("cpu").and_then(|q| quantity::parse_cpu_millis(&q).ok()).unwrap_or(0);
        (cpu, get("memory").and_then(|q| quantity::parse_bytes(&q).ok()).unwrap_or(0))
    };
    let (mut cpu, mut memory) = (0, 0);
    for container in &spec.containers {
        let (c, m) = of(container.resources.as_ref());
        (cpu, memory) = (cpu + c, memory + m);
    }
    // Init containers run one after another, before the others (sidecars among them are counted too low; they are rare).
    for container in spec.init_containers.iter().flatten() {
        let (c, m) = of(container.resources.as_ref());
        (cpu, memory) = (cpu.max(c), memory.max(m));
    }
    let overhead = spec.overhead.as_ref();
    let over = |name: &str| overhead.and_then(|o| o.get(name)).map(|q| q.0.clone());
    cpu += over("cpu").and_then(|q| quantity::parse_cpu_millis(&q).ok()).unwrap_or(0);
    memory += over("memory").and_then(|q| quantity::parse_bytes(&q).ok()).unwrap_or(0);
    Some((spec.node_name.clone()?, cpu, memory))
}

async fn follow_pods(
    client: kube::Client,
    pods: Arc<Mutex<Pods>>,
    told: mpsc::Sender<()>,
    seen: tokio::sync::oneshot::Sender<()>,
) -> anyhow::Result<()> {
    let config = watcher::Config::default().fields("spec.nodeName!=");
    let mut stream = std::pin::pin!(watcher(Api::<Pod>::all(client), config).default_backoff());
    let mut seen = Some(seen);
    let mut listed = BTreeSet::new();
    loop {
        let news = match stream.try_next().await {
            Ok(Some(watcher::Event::Apply(pod))) => {
                locked(&pods).set(pod.uid().unwrap_or_default(), requests(&pod))
            }
            Ok(Some(watcher::Event::Delete(pod))) => locked(&pods).set(pod.uid().unwrap_or_default(), None),
            Ok(Some(watcher::Event::Init)) => {
                listed.clear();
                false
            }
            Ok(Some(watcher::Event::InitApply(pod))) => {
                listed.insert(pod.uid().unwrap_or_default());
                locked(&pods).set(pod.uid().unwrap_or_default(), requests(&pod))
            }
            Ok(Some(watcher::Event::InitDone)) => {
                let mut pods = locked(&pods);
                let gone: Vec<String> =
                    pods.pods.keys().filter(|uid| !listed.contains(*uid)).cloned().collect();
                for uid in gone {
                    pods.set(uid, None);
                }
                if let Some(seen) = seen.take() {
                    // Nobody waits any more: the operator ends.
                    let _ = seen.send(());
                }
                true
            }
            Ok(None) => anyhow::bail!("the watch of pods ended"),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the watch of pods is tried again");
                false
            }
        };
        if news {
            let _ = told.try_send(());
        }
    }
}
