//! What every part of the agent shares.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use imp_api::ImpVM;
use imp_proto::v1;
use kube::{Client, ResourceExt as _};
use tokio::sync::watch;

use crate::config::Timings;
use crate::metrics::Metrics;
use crate::secrets::Secrets;
use crate::writer::{Events, StatusWriter};

/// What every part of the agent shares.
#[derive(Debug)]
pub struct Context {
    /// Client of the API server.
    pub client: ClientHandle,
    /// Name of the node.
    pub node: String,
    /// How long to wait for what.
    pub timings: Timings,
    /// Environment and pull secrets of VMs.
    pub secrets: Secrets,
    /// Writes ImpVM statuses.
    pub status: StatusWriter,
    /// Records events.
    pub events: Events,
    /// Counts.
    pub metrics: Metrics,
    /// VMs that are bound to this node.
    pub bound: Bound,
    /// Whether the agent is of use.
    pub ready: Ready,
    /// The runtime's description of the node while it is connected.
    pub runtime: watch::Sender<Option<Arc<v1::NodeInfoResponse>>>,
}

impl Context {
    /// Notes that the runtime connected, or went away.
    pub fn runtime_seen(&self, info: Option<v1::NodeInfoResponse>) {
        self.runtime.send_replace(info.map(Arc::new));
    }
}

/// A [`Client`] that can be printed.
#[derive(Clone)]
pub struct ClientHandle(pub Client);

impl std::fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl std::ops::Deref for ClientHandle {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0
    }
}

/// The VMs that are bound to this node, by UID: whose streams may be opened.
#[derive(Debug, Default)]
pub struct Bound(RwLock<HashMap<String, (String, String)>>);

impl Bound {
    /// Notes that a VM is bound here.
    pub fn insert(&self, vm: &ImpVM) {
        let Some(uid) = vm.uid() else { return };
        let name = (vm.namespace().unwrap_or_default(), vm.name_any());
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(uid, name);
    }

    /// Notes that a VM is bound here no more.
    pub fn remove(&self, uid: &str) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }

    /// Whether this very VM is bound here.
    #[must_use]
    pub fn contains(&self, vm: &v1::VmRef) -> bool {
        let bound = self.0.read().unwrap_or_else(PoisonError::into_inner);
        bound.get(&vm.uid).is_some_and(|(namespace, name)| *namespace == vm.namespace && *name == vm.name)
    }
}

/// Whether the agent is of use: it has listed its VMs, and the runtime answers.
#[derive(Debug, Default)]
pub struct Ready {
    api: AtomicBool,
    runtime: AtomicBool,
}

impl Ready {
    /// Notes whether the API's VMs were listed.
    pub fn api(&self, synced: bool) {
        self.api.store(synced, Ordering::Relaxed);
    }

    /// Notes whether the runtime is connected and told its VMs.
    pub fn runtime(&self, synced: bool) {
        self.runtime.store(synced, Ordering::Relaxed);
    }

    /// Why the agent is of no use, if so.
    ///
    /// # Errors
    /// What is missing, for people.
    pub fn check(&self) -> Result<(), &'static str> {
        match (self.api.load(Ordering::Relaxed), self.runtime.load(Ordering::Relaxed)) {
            (true, true) => Ok(()),
            (false, _) => Err("the API server has not listed this node's ImpVMs yet"),
            (true, false) => Err("the runtime does not answer on its socket"),
        }
    }
}
