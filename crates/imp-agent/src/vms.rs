//! The controller of the node's VMs: what the API wants goes to the runtime, what the runtime reports goes to the API.
//!
//! One task owns all state (`Vms`); it hears of objects, reports and due times, and lets `reconcile` do one VM at a
//! time, each VM never twice at once. Both sides are level-triggered: whatever is missed is found again in the next list
//! of the API or the next watch of the runtime.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use imp_api::ImpVM;
use imp_proto::v1;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Resource as _, ResourceExt as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::time::DelayQueue;
use tokio_util::time::delay_queue;

use crate::context::Context;
use crate::runtime::{Client, RuntimeEvent};

mod publish;
mod reconcile;

use reconcile::{Outcome, View};

/// What is known of one VM.
#[derive(Debug, Default)]
struct Vm {
    /// Its object, while it is bound to this node.
    object: Option<Arc<ImpVM>>,
    /// What the runtime last reported on this connection.
    report: Option<v1::VmStatus>,
    /// The runtime said on this connection that nothing is left.
    removed: bool,
    /// What earlier passes leave for later ones.
    memory: Memory,
    /// The next pass without an event.
    timer: Option<delay_queue::Key>,
    /// A pass is under way; `true`: something happened meanwhile.
    busy: Option<bool>,
}

/// What one pass over a VM leaves for the next.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// What was put, and on which connection.
    put: Option<Put>,
    /// On which connection the deletion was asked for.
    deletion: Option<u64>,
    /// The runtime said that nothing is left, which the object may not say yet.
    gone: bool,
    /// When the status was last written.
    written: Option<Instant>,
    /// When the VM's current report was first worth a write.
    pending: Option<Instant>,
    /// Since when the API knows no such VM of this node.
    orphaned: Option<Instant>,
    /// What holds for the VM with its template and class, as far as the status needs it.
    effective: Option<Effective>,
    /// Failed passes in a row.
    failures: u32,
    /// Why the VM could not be put.
    blocked: Option<imp_core::phase::Blocked>,
    /// The reason whose event was last recorded, with its attempt.
    told: Option<(u32, &'static str)>,
}

/// What holds for a VM with its template and class.
#[derive(Clone, Debug)]
struct Effective {
    image: String,
    probes: imp_api::ProbeSpec,
}

/// A wish that the runtime has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Put {
    epoch: u64,
    generation: i64,
    attempt: u32,
}

/// The controller's state.
#[derive(Debug)]
struct Vms {
    context: Arc<Context>,
    vms: HashMap<String, Vm>,
    /// UIDs of a list of the API that is under way.
    listing: Vec<String>,
    /// A complete list of the API has been seen.
    api_synced: bool,
    connection: Option<(u64, Client)>,
    /// The runtime has told all its VMs on this connection.
    runtime_synced: bool,
    timers: DelayQueue<String>,
    passes: JoinSet<(String, Outcome)>,
}

/// Runs the controller until `runtime` ends.
pub async fn run(context: Arc<Context>, mut runtime: mpsc::Receiver<RuntimeEvent>) {
    let api = Api::<DeserializeGuard<ImpVM>>::all(context.client.0.clone());
    let bound = watcher::Config::default().fields(&format!("status.nodeName={}", context.node));
    let mut objects = watcher(api, bound).default_backoff().boxed();
    let mut vms = Vms {
        context,
        vms: HashMap::new(),
        listing: Vec::new(),
        api_synced: false,
        connection: None,
        runtime_synced: false,
        timers: DelayQueue::new(),
        passes: JoinSet::new(),
    };
    loop {
        tokio::select! {
            event = objects.try_next() => match event {
                Ok(Some(event)) => vms.on_object(event),
                Ok(None) => return,
                // The objects seen so far stand: an API server that is away says nothing about VMs.
                Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "the watch on ImpVMs broke; it is begun again"),
            },
            event = runtime.recv() => match event {
                Some(event) => vms.on_runtime(event),
                None => return,
            },
            Some(due) = vms.timers.next() => {
                let uid = due.into_inner();
                if let Some(vm) = vms.vms.get_mut(&uid) {
                    vm.timer = None;
                }
                vms.kick(&uid);
            }
            Some(done) = vms.passes.join_next() => match done {
                Ok((uid, outcome)) => vms.on_done(&uid, outcome),
                Err(error) => tracing::error!(error = &error as &dyn std::error::Error, "a pass over a VM broke off: this is a fault of imp-agent"),
            },
        }
    }
}

impl Vms {
    fn on_object(&mut self, event: watcher::Event<DeserializeGuard<ImpVM>>) {
        match event {
            watcher::Event::Init => self.listing.clear(),
            watcher::Event::InitApply(object) => {
                self.listing.extend(object.meta().uid.clone());
                self.on_applied(object);
            }
            watcher::Event::Apply(object) => self.on_applied(object),
            watcher::Event::Delete(object) => {
                if let Some(uid) = &object.meta().uid {
                    self.on_gone(uid);
                }
            }
            watcher::Event::InitDone => {
                self.api_synced = true;
                let listed = std::mem::take(&mut self.listing);
                let all: Vec<String> = self.vms.keys().filter(|uid| !listed.contains(uid)).cloned().collect();
                for uid in all {
                    self.on_gone(&uid);
                }
                self.context.ready.api(true);
            }
        }
    }

    fn on_applied(&mut self, object: DeserializeGuard<ImpVM>) {
        let object = match object.0 {
            Ok(object) => object,
            // Of another version of the CRD, perhaps. What is known of the VM stands, and nothing is ended for it.
            Err(invalid) => {
                let name = invalid.metadata.name.as_deref().unwrap_or_default();
                let namespace = invalid.metadata.namespace.as_deref();
                tracing::error!(vm = name, namespace, error = %invalid.error, "an ImpVM is not understood and left alone: is imp-agent of the version of the CRDs?");
                return;
            }
        };
        let Some(uid) = object.uid() else { return };
        self.context.bound.insert(&object);
        self.vms.entry(uid.clone()).or_default().object = Some(Arc::new(object));
        self.kick(&uid);
    }

    fn on_gone(&mut self, uid: &str) {
        self.context.bound.remove(uid);
        if let Some(vm) = self.vms.get_mut(uid) {
            vm.object = None;
            self.kick(uid);
        }
    }

    fn on_runtime(&mut self, event: RuntimeEvent) {
        match event {
            RuntimeEvent::Connected(epoch, client, info) => {
                self.connection = Some((epoch, client));
                self.runtime_synced = false;
                for vm in self.vms.values_mut() {
                    (vm.report, vm.removed) = (None, false);
                }
                self.context.runtime_seen(Some(*info));
            }
            RuntimeEvent::Vm(status) => {
                let Some(uid) = status.vm.as_ref().map(|vm| vm.uid.clone()) else { return };
                let vm = self.vms.entry(uid.clone()).or_default();
                self.context.metrics.observe(vm.report.as_ref(), &status);
                vm.removed = false;
                vm.report = Some(*status);
                self.kick(&uid);
            }
            RuntimeEvent::Removed(uid) => {
                let vm = self.vms.entry(uid.clone()).or_default();
                (vm.report, vm.removed) = (None, true);
                self.kick(&uid);
            }
            RuntimeEvent::Synced => {
                self.runtime_synced = true;
                self.context.ready.runtime(true);
                let all: Vec<String> = self.vms.keys().cloned().collect();
                for uid in all {
                    self.kick(&uid);
                }
            }
            RuntimeEvent::Disconnected => {
                self.connection = None;
                self.runtime_synced = false;
                self.context.ready.runtime(false);
                self.context.runtime_seen(None);
            }
        }
    }

    /// Begins a pass over a VM, or notes that the one under way must be followed by another.
    fn kick(&mut self, uid: &str) {
        let Some(vm) = self.vms.get_mut(uid) else { return };
        if let Some(again) = &mut vm.busy {
            *again = true;
            return;
        }
        if let Some(timer) = vm.timer.take() {
            self.timers.remove(&timer);
        }
        vm.busy = Some(false);
        let view = View {
            uid: uid.to_owned(),
            object: vm.object.clone(),
            report: vm.report.clone(),
            removed: vm.removed,
            memory: vm.memory.clone(),
            connection: self.connection.clone().filter(|_| self.runtime_synced),
            api_synced: self.api_synced,
        };
        let context = self.context.clone();
        let uid = uid.to_owned();
        self.passes.spawn(async move {
            let outcome = reconcile::reconcile(&context, view).await;
            (uid, outcome)
        });
    }

    fn on_done(&mut self, uid: &str, outcome: Outcome) {
        let Some(vm) = self.vms.get_mut(uid) else { return };
        let again = vm.busy.take().unwrap_or(false);
        vm.memory = outcome.memory;
        if !again {
            // Nothing newer came from the watch meanwhile: what the write returned is the newest.
            if let (Some(written), true) = (outcome.object, vm.object.is_some()) {
                vm.object = Some(Arc::new(written));
            }
        }
        if vm.object.is_none() && vm.report.is_none() {
            if let Some(timer) = vm.timer.take() {
                self.timers.remove(&timer);
            }
            self.vms.remove(uid);
        } else if again {
            self.kick(uid);
        } else if let Some(wait) = outcome.again {
            self.set_timer(uid, wait);
        }
        self.count();
    }

    fn set_timer(&mut self, uid: &str, wait: Duration) {
        let key = self.timers.insert(uid.to_owned(), wait);
        if let Some(vm) = self.vms.get_mut(uid) {
            vm.timer = Some(key);
        }
    }

    fn count(&self) {
        let phases = self.vms.values().filter_map(|vm| vm.object.as_ref()?.status.as_ref()?.phase);
        self.context.metrics.count(phases);
    }
}
