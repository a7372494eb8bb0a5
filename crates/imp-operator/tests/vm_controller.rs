//! The controller of ImpVMs against a real API server. The node's part is played by the test, which writes what an agent writes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use imp_api::{ImpVM, VMPhase, names};
use imp_operator::metrics::Metrics;
use imp_operator::vm_controller;
use imp_testkit::controlplane::{ControlPlane, Options};
use imp_testkit::wait::wait_for;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(30);

struct World {
    _plane: ControlPlane,
    client: Client,
    shutdown: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl World {
    async fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let plane = ControlPlane::start(Options::default()).await.unwrap();
        let client = plane.client().await.unwrap();
        let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        for crd in imp_api::crds() {
            post(&client, crds, &serde_json::to_value(&crd).unwrap()).await;
        }
        wait_for(PATIENCE, "the API to be served", async || {
            Api::<ImpVM>::all(client.clone()).list(&Default::default()).await.map_err(|e| e.to_string())
        })
        .await
        .unwrap();
        let world = Self { _plane: plane, client, shutdown: CancellationToken::new() };
        world
            .apply(
                "impvmclasses",
                None,
                json!({"kind": "ImpVMClass", "metadata": {"name": "small"},
            "spec": {"vcpu": 1, "memoryMiB": 1024, "diskGiB": 1}}),
            )
            .await;
        world
            .apply(
                "impnetworks",
                Some("default"),
                json!({"kind": "ImpNetwork", "metadata": {"name": "lab"},
            "spec": {"subnet": "10.7.0.0/29"}}),
            )
            .await;
        world
    }

    fn operator(&self) -> tokio::task::JoinHandle<anyhow::Result<()>> {
        let metrics = Arc::new(Metrics::default());
        tokio::spawn(vm_controller::run(self.client.clone(), metrics, self.shutdown.clone()))
    }

    async fn apply(&self, plural: &str, namespace: Option<&str>, mut body: Value) {
        body["apiVersion"] = json!("imp.dev/v1alpha1");
        let within = namespace.map(|n| format!("/namespaces/{n}")).unwrap_or_default();
        post(&self.client, &format!("/apis/imp.dev/v1alpha1{within}/{plural}"), &body).await;
    }

    async fn node(&self, name: &str, memory: &str) {
        let nodes = Api::<Node>::all(self.client.clone());
        let node = json!({"metadata": {"name": name, "labels": {"imp/enabled": "true", "kubernetes.io/arch": "amd64"}}});
        nodes.create(&Default::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
        let status = json!({"status": {"allocatable": {"cpu": "8", "memory": memory},
            "conditions": [{"type": "Ready", "status": "True"}]}});
        nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        // The API server taints a node until its controller finds it ready; here is no controller.
        let clean = json!({"spec": {"taints": []}});
        nodes.patch(name, &PatchParams::default(), &Patch::Merge(clean)).await.unwrap();
    }

    async fn vm(&self, name: &str, more: Value) {
        let mut spec =
            json!({"classRef": {"name": "small"}, "networkRef": {"name": "lab"}, "image": "busybox"});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.apply(
            "impvms",
            Some("default"),
            json!({"kind": "ImpVM", "metadata": {"name": name}, "spec": spec}),
        )
        .await;
    }

    fn vms(&self) -> Api<ImpVM> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn until(&self, name: &str, what: &str, check: impl Fn(&ImpVM) -> bool) -> ImpVM {
        let look = async || {
            let vm = self.vms().get(name).await.map_err(|e| e.to_string())?;
            if check(&vm) { Ok(vm) } else { Err(serde_json::to_string(&vm.status).unwrap()) }
        };
        wait_for(PATIENCE, &format!("{name} {what}"), look).await.unwrap()
    }

    async fn bound(&self, name: &str) -> ImpVM {
        self.until(name, "to be bound", |vm| vm.status.as_ref().is_some_and(|s| s.node_name.is_some())).await
    }

    async fn waits(&self, name: &str, words: &str) -> ImpVM {
        let says = |vm: &ImpVM| {
            condition(vm, "Scheduled").is_some_and(|(status, text)| status == "False" && text.contains(words))
        };
        self.until(name, &format!("to wait with {words:?}"), says).await
    }

    /// What an agent applies.
    async fn agent(&self, name: &str, status: Value) {
        let body = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name}, "status": status});
        let params = PatchParams::apply(names::field_manager::AGENT).force();
        self.vms().patch_status(name, &params, &Patch::Apply(body)).await.unwrap();
    }

    async fn gone(&self, name: &str) {
        let look = async || match self.vms().get_opt(name).await.map_err(|e| e.to_string())? {
            None => Ok(()),
            Some(vm) => Err(format!("{:?} {:?}", vm.metadata.finalizers, vm.status)),
        };
        wait_for(PATIENCE, &format!("{name} to be gone"), look).await.unwrap();
    }

    async fn delete(&self, name: &str) {
        self.vms().delete(name, &DeleteParams::default()).await.unwrap();
    }

    async fn events(&self, reason: &str) -> usize {
        let events =
            Api::<Event>::namespaced(self.client.clone(), "default").list(&Default::default()).await.unwrap();
        events.items.iter().filter(|e| e.reason.as_deref() == Some(reason)).count()
    }
}

async fn post(client: &Client, path: &str, body: &Value) {
    let request = http::Request::post(path).header("content-type", "application/json");
    let request = request.body(serde_json::to_vec(body).unwrap()).unwrap();
    client.request::<Value>(request).await.unwrap_or_else(|e| panic!("{path}: {e}"));
}

fn condition(vm: &ImpVM, kind: &str) -> Option<(String, String)> {
    let conditions = vm.status.iter().flat_map(|s| &s.conditions);
    conditions.filter(|c| c.type_ == kind).map(|c| (c.status.clone(), c.message.clone())).next()
}

fn phase(vm: &ImpVM) -> Option<VMPhase> {
    vm.status.as_ref()?.phase
}

fn released() -> Value {
    json!({"type": "NodeReleased", "status": "True", "reason": "Released", "message": "nothing is left",
        "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

#[tokio::test]
async fn a_vm_waits_with_its_reason_and_is_bound_when_what_it_lacks_comes() {
    let world = World::start().await;
    let _operator = world.operator();
    world.vm("a", json!({"classRef": {"name": "big"}})).await;
    world.waits("a", "ImpVMClass \"big\" does not exist").await;
    world
        .apply(
            "impvmclasses",
            None,
            json!({"kind": "ImpVMClass", "metadata": {"name": "big"},
        "spec": {"vcpu": 2, "memoryMiB": 2048, "diskGiB": 1}}),
        )
        .await;
    world.waits("a", "no node has the label imp/enabled=true").await;
    world.node("n1", "1Gi").await;
    world.waits("a", "insufficient memory (needs 2112Mi").await;
    assert_eq!(phase(&world.vms().get("a").await.unwrap()), Some(VMPhase::Pending));
    world.node("n2", "4Gi").await;
    let vm = world.bound("a").await;
    let status = vm.status.clone().unwrap();
    assert_eq!(status.node_name.as_deref(), Some("n2"));
    assert_eq!(status.ip.as_deref(), Some("10.7.0.2"));
    assert!(status.mac_address.unwrap().starts_with("02:"));
    assert_eq!(phase(&vm), Some(VMPhase::Scheduled));
    assert_eq!(condition(&vm, "SpecHonored").unwrap().0, "True");
    assert!(vm.finalizers().contains(&names::VM_FINALIZER.to_owned()));
    wait_for(
        PATIENCE,
        "the event",
        async || if world.events("Scheduled").await == 1 { Ok(()) } else { Err("none") },
    )
    .await
    .unwrap();
    assert!(world.events("Unschedulable").await >= 2, "each reason is told");
}

#[tokio::test]
async fn addresses_and_memory_are_promised_once_and_given_back() {
    let world = World::start().await;
    world.node("n1", "16Gi").await;
    // All at once, before the operator begins: it must count what it has not yet seen of its own writes.
    for n in 0..6 {
        world.vm(&format!("v{n}"), json!({})).await;
    }
    let _operator = world.operator();
    let look = async || {
        let vms = world.vms().list(&Default::default()).await.map_err(|e| e.to_string())?.items;
        let ips: Vec<String> = vms.iter().filter_map(|vm| vm.status.as_ref()?.ip.clone()).collect();
        let waiting = vms
            .iter()
            .filter(|vm| condition(vm, "Scheduled").is_some_and(|(_, m)| m.contains("all 5 addresses")))
            .count();
        if ips.len() == 5 && waiting == 1 { Ok((vms, ips)) } else { Err(format!("{ips:?}, {waiting} wait")) }
    };
    let (vms, mut ips) = wait_for(PATIENCE, "five addresses and one that waits", look).await.unwrap();
    ips.sort();
    ips.dedup();
    assert_eq!(ips.len(), 5, "fr23: no two VMs have one address");
    let macs: std::collections::BTreeSet<_> =
        vms.iter().filter_map(|vm| vm.status.as_ref()?.mac_address.clone()).collect();
    assert_eq!(macs.len(), 5);
    let holder = vms.iter().find(|vm| vm.status.as_ref().is_some_and(|s| s.ip.is_some())).unwrap().name_any();
    let waiter = vms.iter().find(|vm| vm.status.as_ref().is_some_and(|s| s.ip.is_none())).unwrap().name_any();
    world.delete(&holder).await;
    world.agent(&holder, json!({"conditions": [released()]})).await;
    world.gone(&holder).await;
    world.bound(&waiter).await;
}

#[tokio::test]
async fn fr64_deletion_ends_whatever_the_state() {
    let world = World::start().await;
    let _operator = world.operator();
    world.vm("unbound", json!({})).await;
    world.waits("unbound", "no node").await;
    world.delete("unbound").await;
    world.gone("unbound").await;

    world.node("n1", "16Gi").await;
    for name in ["released", "lost", "classless"] {
        world.vm(name, json!({})).await;
        world.bound(name).await;
    }
    world.delete("released").await;
    // The node has not answered yet: a look at another change must not let it go.
    world.agent("released", json!({"phase": "Terminating"})).await;
    let vm = world.until("released", "to be Terminating", |vm| phase(vm) == Some(VMPhase::Terminating)).await;
    assert!(!vm.finalizers().is_empty());
    world.agent("released", json!({"phase": "Terminating", "conditions": [released()]})).await;
    world.gone("released").await;

    let classes = Api::<imp_api::ImpVMClass>::all(world.client.clone());
    classes.delete("small", &DeleteParams::default()).await.unwrap();
    world.delete("classless").await;
    world.agent("classless", json!({"conditions": [released()]})).await;
    world.gone("classless").await;

    world.delete("lost").await;
    let nodes = Api::<Node>::all(world.client.clone());
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
    world.gone("lost").await;
}

#[tokio::test]
async fn an_ended_vm_is_started_again_by_its_policy_and_only_by_it() {
    let world = World::start().await;
    let _operator = world.operator();
    world.node("n1", "16Gi").await;
    let quick = json!({"backoff": {"maxRetries": 1, "initialDelay": "1s", "maxDelay": "1s"}, "onExhaustion": "manual-reset"});
    world.vm("kept", json!({"lifecycle": "persistent", "restartPolicy": quick})).await;
    world.vm("once", json!({})).await;
    let ended = |phase: &str, at: i64| json!({"phase": phase, "finishedAt": k8s_openapi::jiff::Timestamp::from_second(at).unwrap().to_string()});
    let now = k8s_openapi::jiff::Timestamp::now().as_second();
    for name in ["kept", "once"] {
        world.bound(name).await;
        world.agent(name, json!({"phase": "Running"})).await;
        world.agent(name, ended("Failed", now)).await;
    }
    let restarted = |n: i32| move |vm: &ImpVM| vm.status.as_ref().is_some_and(|s| s.restart_count == Some(n));
    let vm = world.until("kept", "to be started again", restarted(1)).await;
    assert_eq!(phase(&vm), Some(VMPhase::Scheduled));
    world.agent("kept", ended("Failed", now)).await;
    let exhausted = |vm: &ImpVM| phase(vm) == Some(VMPhase::RetryExhausted);
    world.until("kept", "to be given up", exhausted).await;
    let reset = json!({"metadata": {"annotations": {names::annotation::RESET_RETRIES: "true"}}});
    world.vms().patch("kept", &PatchParams::default(), &Patch::Merge(reset)).await.unwrap();
    let vm = world.until("kept", "to go on", restarted(2)).await;
    assert_eq!(vm.status.unwrap().retries_from, Some(2));
    world.until("kept", "to lose the annotation", |vm| vm.annotations().is_empty()).await;
    let once = world.vms().get("once").await.unwrap();
    assert_eq!(
        (phase(&once), once.status.unwrap().restart_count),
        (Some(VMPhase::Failed), Some(0)),
        "ephemeral, no policy"
    );
}

#[tokio::test]
async fn fr90_nothing_is_written_that_changes_nothing() {
    let world = World::start().await;
    world.node("n1", "16Gi").await;
    let operator = world.operator();
    world.vm("a", json!({})).await;
    world.bound("a").await;
    world.agent("a", json!({"phase": "Running"})).await;
    let before = world.until("a", "to run", |vm| phase(vm) == Some(VMPhase::Running)).await;
    // Another VM's binding shows that the operator has looked at everything since.
    world.vm("b", json!({})).await;
    world.bound("b").await;
    operator.abort();
    let _second = world.operator();
    world.vm("c", json!({})).await;
    world.bound("c").await;
    let after = world.vms().get("a").await.unwrap();
    assert_eq!(before.resource_version(), after.resource_version());
    let ips: std::collections::BTreeSet<_> = world
        .vms()
        .list(&Default::default())
        .await
        .unwrap()
        .items
        .into_iter()
        .filter_map(|vm| vm.status?.ip)
        .collect();
    assert_eq!(ips.len(), 3, "a new operator knows the addresses that the old one gave");
}
