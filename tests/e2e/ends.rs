//! How VMs end, and what they wait for, as a person reads it on the object.

use crate::world::{World, condition};
use serde_json::json;

pub async fn fr60_ends_are_on_the_object(world: &World) {
    for (name, script, phase, code, signal) in [
        ("end-0", "exit 0", "Succeeded", 0, None),
        ("end-42", "exit 42", "Failed", 42, None),
        ("end-segv", "kill -SEGV $$", "Failed", 139, Some(11)),
    ] {
        world.shell(name, script, json!({})).await.unwrap();
        let vm = world.phase(name, phase).await.unwrap();
        let status = vm.status.clone().unwrap();
        assert_eq!((status.exit_code, status.signal), (Some(code), signal), "{status:?}");
        assert!(status.finished_at.is_some() && status.runtime_pid.unwrap_or(0) == 0, "{status:?}");
        assert_eq!(condition(&vm, "Ready").0, "False");
    }
    world.shell("end-missing", "", json!({"command": ["/no/such/program"]})).await.unwrap();
    let vm = world.phase("end-missing", "Failed").await.unwrap();
    let (ready, reason, message) = condition(&vm, "Ready");
    assert_eq!((ready.as_str(), reason.as_str()), ("False", "WorkloadStartFailed"), "{message}");
    assert!(message.contains("/no/such/program"), "{message}");
    world.shell("end-panic", "echo c > /proc/sysrq-trigger; sleep 60", json!({})).await.unwrap();
    let vm = world.phase("end-panic", "Failed").await.unwrap();
    assert_eq!(condition(&vm, "Ready").1, "KernelPanic", "{vm:?}");
    for name in ["end-0", "end-42", "end-segv", "end-missing", "end-panic"] {
        world.delete(name).await.unwrap();
    }
}

pub async fn what_a_vm_refers_to_heals_when_it_comes(world: &World) {
    let env = json!([{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "late", "key": "token"}}}]);
    world.shell("late", "echo token is $TOKEN; sleep 1000", json!({"env": env})).await.unwrap();
    let waits = |vm: &imp_api::ImpVM| condition(vm, "Ready").1 == "SecretUnavailable";
    let vm = world.until("late", "to say which secret it waits for", waits).await.unwrap();
    let message = condition(&vm, "Ready").2;
    assert!(
        message.ends_with("variable \"TOKEN\": Secret \"late\" does not exist in the VM's namespace"),
        "{message}"
    );
    world.dev.kubectl(&["create", "secret", "generic", "late", "--from-literal=token=hush"]).unwrap();
    world.phase("late", "Running").await.unwrap();
    world.said("late", "token is hush").await.unwrap();
    let object = world.dev.kubectl(&["get", "impvm", "late", "-o", "yaml"]).unwrap();
    assert!(!object.contains("hush"), "a secret is on the object: {object}");
    let events = world.dev.kubectl(&["get", "events", "-A", "-o", "yaml"]).unwrap();
    assert!(events.contains("late") && !events.contains("hush"), "a secret is in an event");
    world.delete("late").await.unwrap();
    world.dev.kubectl(&["delete", "secret", "late"]).unwrap();

    world.shell("nowhere", "true", json!({"image": "registry.imp-dev.local:5000/nothing:1"})).await.unwrap();
    let vm = world
        .until("nowhere", "to miss its image", |vm| condition(vm, "ImageReady").0 == "False")
        .await
        .unwrap();
    let (_, reason, message) = condition(&vm, "ImageReady");
    assert!(reason == "ImageNotFound" && message.contains("nothing"), "{reason}: {message}");
    world.delete("nowhere").await.unwrap();
}

pub async fn a_killed_vmm_is_restarted_on_its_disk_and_address(world: &World) {
    let policy = json!({"backoff": {"initialDelay": "1s"}});
    let more = json!({"lifecycle": "persistent", "restartPolicy": policy});
    let script = "echo x >> /boots; sync; echo boots: $(wc -l < /boots); sleep 1000";
    world.shell("phoenix", script, more).await.unwrap();
    let first = world.phase("phoenix", "Running").await.unwrap().status.unwrap();
    world.said("phoenix", "boots: 1").await.unwrap();
    world.on_node(1, &format!("kill -9 {}", first.runtime_pid.unwrap())).unwrap();
    let crashed = |vm: &imp_api::ImpVM| {
        let status = vm.status.clone().unwrap_or_default();
        status.restart_count == Some(1) && crate::world::phase(vm) == "Running"
    };
    let second = world.until("phoenix", "to run again", crashed).await.unwrap().status.unwrap();
    world.said("phoenix", "boots: 2").await.unwrap();
    assert_eq!((second.ip, second.node_name), (first.ip, first.node_name));
    assert_ne!(second.runtime_pid, first.runtime_pid);
    let story = world.dev.kubectl(&["describe", "impvm", "phoenix"]).unwrap();
    assert!(story.contains("VmmCrashed") && story.contains("Restarting"), "{story}");
    world.delete("phoenix").await.unwrap();
}
