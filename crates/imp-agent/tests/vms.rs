//! The agent between a real API server and a scripted runtime.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use futures::StreamExt as _;
use imp_proto::v1::*;
use imp_testkit::controlplane::{Component, ControlPlane, Options};
use imp_testkit::wait::wait_for;
use kube::api::DeleteParams;
use kube::{Client, ResourceExt as _};
use serde_json::json;
use support::*;

struct Stage {
    plane: ControlPlane,
    client: Client,
    runtime: FakeRuntime,
    dir: tempfile::TempDir,
}

impl Stage {
    async fn set(automatic: bool) -> Self {
        let plane = ControlPlane::start(Options::default()).await.unwrap();
        let client = plane.client().await.unwrap();
        install(&client).await;
        Self { plane, client, runtime: FakeRuntime::new(automatic), dir: tempfile::tempdir().unwrap() }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("runtime.sock")
    }

    async fn put(&self, uid: &str) -> VmSpec {
        wait_for(PATIENCE, "the VM to be put", async || {
            self.runtime.known(|known| known.specs.get(uid).cloned()).ok_or("not put")
        })
        .await
        .unwrap()
    }
}

fn plain() -> serde_json::Value {
    json!({"classRef": {"name": "small"}, "image": "app:1"})
}

#[tokio::test]
async fn a_bound_vm_is_put_and_runs_with_two_status_writes() {
    let stage = Stage::set(false).await;
    let _serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    let unbound = create(&stage.client, "unbound", plain()).await;
    let vm = create(&stage.client, "a", plain()).await;
    let uid = vm.uid().unwrap();
    let bound = bind(&stage.client, "a").await;
    let spec = stage.put(&uid).await;
    assert_eq!((spec.attempt, spec.resources.unwrap().memory_mib), (0, 128));
    stage.runtime.states(&uid, &[VmState::Pulling, VmState::Preparing, VmState::Booting]);
    let starting = wait_vm(&stage.client, "a", "Starting", |vm| phase(vm) == "Starting").await;
    assert_eq!(condition(&starting, "ImageReady"), ("True".into(), "ImagePresent".into()));
    stage.runtime.states(&uid, &[VmState::Configuring, VmState::Running]);
    let running = wait_vm(&stage.client, "a", "Running", |vm| phase(vm) == "Running").await;
    let status = running.status.clone().unwrap();
    assert_eq!(condition(&running, "Ready"), ("True".into(), "Running".into()));
    assert_eq!((status.runtime_pid, status.image_digest.as_deref()), (Some(77), Some("sha256:abc")));
    assert_eq!(status.vmm.unwrap().accelerator.as_deref(), Some("tcg"));
    assert_eq!(status.node_name.as_deref(), Some(NODE), "the operator's part stands");
    assert!(
        stage.runtime.known(|known| !known.specs.contains_key(&unbound.uid().unwrap())),
        "only bound VMs are put"
    );
    // Every write is a modification that a watch sees.
    let bound_at = bound.resource_version().unwrap();
    let params = kube::api::WatchParams::default().fields("metadata.name=a");
    let mut changes = vms(&stage.client).watch(&params, &bound_at).await.unwrap().boxed();
    let mut seen = Vec::new();
    while let Some(Ok(kube::api::WatchEvent::Modified(vm))) = changes.next().await {
        seen.push(phase(&vm));
        if vm.resource_version() == running.resource_version() {
            break;
        }
    }
    assert_eq!(seen, ["Starting", "Running"], "two writes of the agent's from binding to Running");
    // Usage is no news: nothing is written for it.
    let version = running.resource_version();
    stage
        .runtime
        .report(&uid, |status| status.usage = Some(Usage { cpu_nanoseconds: 5, ..Default::default() }));
    // A VM that comes later is served, so the report before it has been looked at.
    let later = create(&stage.client, "later", plain()).await;
    bind(&stage.client, "later").await;
    stage.put(&later.uid().unwrap()).await;
    assert_eq!(vms(&stage.client).get("a").await.unwrap().resource_version(), version, "fr90");
    assert_ne!(bound.resource_version(), version);
}

#[tokio::test]
async fn how_a_workload_ended_is_told_once_and_the_attempt_is_not_put_again() {
    let stage = Stage::set(true).await;
    let serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    let uid = create(&stage.client, "a", plain()).await.uid().unwrap();
    bind(&stage.client, "a").await;
    wait_vm(&stage.client, "a", "Running", |vm| phase(vm) == "Running").await;
    stage.runtime.report(&uid, |status| {
        go(status, VmState::Stopped);
        status.exit = Some(WorkloadExit {
            status: Some(ExitStatus { code: 42, ..Default::default() }),
            ..Default::default()
        });
    });
    let failed = wait_vm(&stage.client, "a", "Failed", |vm| phase(vm) == "Failed").await;
    assert_eq!(failed.status.as_ref().unwrap().exit_code, Some(42), "fr60");
    assert_eq!(condition(&failed, "Ready"), ("False".into(), "Failed".into()));
    // A runtime that lost everything is not made to boot the attempt again.
    let puts = stage.runtime.known(|known| known.puts);
    drop(serving);
    stage.runtime.known(|known| (known.specs.clear(), known.statuses.clear()));
    let _serving = stage.runtime.serve(&stage.socket());
    let second = create(&stage.client, "b", plain()).await.uid().unwrap();
    bind(&stage.client, "b").await;
    stage.put(&second).await;
    assert_eq!(stage.runtime.known(|known| known.puts), puts + 1, "only the second VM was put");
    // A new attempt is.
    as_operator(&stage.client, "a", json!({"nodeName": NODE, "phase": "Scheduled", "restartCount": 1})).await;
    let spec = wait_for(PATIENCE, "attempt 1", async || {
        stage
            .runtime
            .known(|known| known.specs.get(&uid).cloned())
            .filter(|spec| spec.attempt == 1)
            .ok_or("not put")
    })
    .await
    .unwrap();
    assert_eq!(spec.attempt, 1);
    let running = wait_vm(&stage.client, "a", "Running again", |vm| phase(vm) == "Running").await;
    assert_eq!(running.status.unwrap().exit_code, None, "the exit code was attempt 0's");
}

#[tokio::test]
async fn fr64_a_deleted_vm_is_released_when_nothing_is_left() {
    let stage = Stage::set(false).await;
    let _serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    let uid = create(&stage.client, "a", plain()).await.uid().unwrap();
    bind(&stage.client, "a").await;
    stage.put(&uid).await;
    // Field report 53: the pull does not stand in the way.
    stage.runtime.states(&uid, &[VmState::Pulling]);
    vms(&stage.client).delete("a", &DeleteParams::default()).await.unwrap();
    let terminating = wait_vm(&stage.client, "a", "Terminating", |vm| phase(vm) == "Terminating").await;
    assert_eq!(condition(&terminating, "NodeReleased").0, "False", "it is still there");
    assert_eq!(stage.runtime.known(|known| known.deleted.clone()), vec![uid.clone()]);
    stage.runtime.remove(&uid);
    wait_vm(&stage.client, "a", "release", |vm| condition(vm, "NodeReleased").0 == "True").await;
}

#[tokio::test]
async fn an_unknown_vm_is_released_at_once() {
    let stage = Stage::set(true).await;
    create(&stage.client, "a", plain()).await;
    bind(&stage.client, "a").await;
    vms(&stage.client).delete("a", &DeleteParams::default()).await.unwrap();
    let _serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    wait_vm(&stage.client, "a", "release", |vm| condition(vm, "NodeReleased").0 == "True").await;
    assert_eq!(stage.runtime.known(|known| known.puts), 0);
}

#[tokio::test]
async fn a_vm_whose_object_is_gone_is_deleted_but_not_by_an_outage() {
    let stage = Stage::set(true).await;
    let _serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    let kept = create(&stage.client, "kept", plain()).await.uid().unwrap();
    let gone = create(&stage.client, "gone", plain()).await.uid().unwrap();
    for name in ["kept", "gone"] {
        bind(&stage.client, name).await;
        wait_vm(&stage.client, name, "Running", |vm| phase(vm) == "Running").await;
    }
    // The outage, from which the agent must conclude nothing; meanwhile a workload ends.
    stage.plane.kill(Component::ApiServer).unwrap();
    stage.runtime.report(&kept, |status| {
        go(status, VmState::Stopped);
        status.exit = Some(WorkloadExit { status: Some(ExitStatus::default()), ..Default::default() });
    });
    stage.plane.spawn(Component::ApiServer).unwrap();
    stage.plane.wait_ready().await.unwrap();
    wait_vm(&stage.client, "kept", "the status to catch up", |vm| phase(vm) == "Succeeded").await;
    assert_eq!(stage.runtime.known(|known| known.deleted.clone()), Vec::<String>::new());
    // The object vanishes without the agent having released it.
    let patch = kube::api::Patch::Merge(json!({"metadata": {"finalizers": null}}));
    vms(&stage.client).patch("gone", &Default::default(), &patch).await.unwrap();
    vms(&stage.client).delete("gone", &DeleteParams::default()).await.unwrap();
    wait_for(PATIENCE, "the orphan to be deleted", async || {
        let deleted = stage.runtime.known(|known| known.deleted.clone());
        if deleted.contains(&gone) { Ok(()) } else { Err(format!("{deleted:?}")) }
    })
    .await
    .unwrap();
    assert!(stage.runtime.known(|known| !known.deleted.contains(&kept)));
}

#[tokio::test]
async fn fr48_a_runtime_that_lost_a_running_vm_is_reported_not_repaired_by_a_second_boot() {
    let stage = Stage::set(true).await;
    let serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    create(&stage.client, "a", plain()).await;
    bind(&stage.client, "a").await;
    wait_vm(&stage.client, "a", "Running", |vm| phase(vm) == "Running").await;
    drop(serving);
    let puts = stage.runtime.known(|known| {
        known.specs.clear();
        known.statuses.clear();
        known.puts
    });
    let _serving = stage.runtime.serve(&stage.socket());
    let failed = wait_vm(&stage.client, "a", "Failed", |vm| phase(vm) == "Failed").await;
    assert_eq!(condition(&failed, "Ready").1, "VmLost");
    assert_eq!(stage.runtime.known(|known| known.puts), puts);
}

#[tokio::test]
async fn a_missing_class_is_told_and_waited_for() {
    let stage = Stage::set(true).await;
    let _serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    create(&stage.client, "a", json!({"classRef": {"name": "absent"}, "image": "app:1"})).await;
    bind(&stage.client, "a").await;
    wait_vm(&stage.client, "a", "the reason", |vm| condition(vm, "Ready").1 == "ReferenceNotFound").await;
    let class = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVMClass", "metadata": {"name": "absent"},
        "spec": {"vcpu": 1, "memoryMiB": 128, "diskGiB": 1}});
    let classes = kube::Api::<imp_api::ImpVMClass>::all(stage.client.clone());
    classes.create(&Default::default(), &serde_json::from_value(class).unwrap()).await.unwrap();
    wait_vm(&stage.client, "a", "Running", |vm| phase(vm) == "Running").await;
}

#[tokio::test]
async fn the_node_tells_how_it_is_and_when_its_runtime_is_away() {
    let stage = Stage::set(true).await;
    let serving = stage.runtime.serve(&stage.socket());
    let _agent = agent(&stage.client, &stage.socket());
    let profiles = kube::Api::<imp_api::ClusterImpNodeProfile>::all(stage.client.clone());
    let ready = async |wanted: &str| {
        wait_for(PATIENCE, &format!("the profile's Ready to be {wanted}"), async || {
            let profile = profiles.get(NODE).await.map_err(|e| e.to_string())?;
            let found = profile
                .status
                .iter()
                .flat_map(|s| &s.conditions)
                .any(|c| c.type_ == "Ready" && c.status == wanted);
            if found { Ok(profile) } else { Err(format!("{:?}", profile.status)) }
        })
        .await
        .unwrap()
    };
    let status = ready("True").await.status.unwrap();
    assert_eq!(status.capacity.unwrap().cpus, Some(4));
    assert!(!status.vmms[0].hardware_virtualization, "emulation is not silent");
    assert!(status.agent_endpoint.unwrap().starts_with("127.0.0.1:"));
    let leases = kube::Api::<k8s_openapi::api::coordination::v1::Lease>::namespaced(
        stage.client.clone(),
        "imp-system",
    );
    wait_for(PATIENCE, "the heartbeat", async || {
        leases.get("imp-node-node-1").await.map(drop).map_err(|e| e.to_string())
    })
    .await
    .unwrap();
    drop(serving);
    ready("False").await;
    let _serving = stage.runtime.serve(&stage.socket());
    ready("True").await;
    // A profile that somebody deleted comes back.
    profiles.delete(NODE, &DeleteParams::default()).await.unwrap();
    ready("True").await;
}
