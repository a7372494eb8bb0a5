//! Nodes that reboot, and nodes that are gone.

use crate::world::{World, condition, phase};
use imp_api::ImpVM;
use serde_json::json;

pub async fn a_rebooted_node_starts_its_persistent_vms_again(world: &World) {
    let on_2 = json!({"kubernetes.io/hostname": "n2"});
    let policy = json!({"backoff": {"initialDelay": "1s"}});
    let more = json!({"nodeSelector": on_2, "lifecycle": "persistent", "restartPolicy": policy});
    let script = "echo x >> /boots; sync; echo boots: $(wc -l < /boots); sleep 1000";
    world.shell("stays", script, more).await.unwrap();
    world.shell("ends", "sleep 1000", json!({"nodeSelector": on_2})).await.unwrap();
    world.phase("stays", "Running").await.unwrap();
    world.phase("ends", "Running").await.unwrap();
    world.said("stays", "boots: 1").await.unwrap();
    world.dev.reboot(2).unwrap();
    let again =
        |vm: &ImpVM| phase(vm) == "Running" && vm.status.as_ref().is_some_and(|s| s.restart_count == Some(1));
    world.until("stays", "to run again", again).await.unwrap();
    world.said("stays", "boots: 2").await.unwrap();
    let vm = world.phase("ends", "Failed").await.unwrap();
    assert_eq!(condition(&vm, "Ready").1, "HostRebooted", "{vm:?}");
    world.delete("ends").await.unwrap();
}

pub async fn fr64_a_vm_of_a_node_that_is_gone_can_be_deleted(world: &World) {
    let state = world.dev.state().unwrap();
    let node = state.daemons.iter().find(|d| d.name == "node n2").unwrap();
    imp_testkit::node::power_off(node).unwrap();
    world.dev.kubectl(&["delete", "node", "n2"]).unwrap();
    let lost = |vm: &ImpVM| condition(vm, "NodeHealthy").0 == "False";
    let vm = world.until("stays", "to say that its node is lost", lost).await.unwrap();
    assert_eq!(condition(&vm, "NodeHealthy").1, "NodeLost", "{vm:?}");
    world.delete("stays").await.unwrap();
    let events = world.dev.kubectl(&["get", "events", "-A"]).unwrap();
    assert!(events.contains("NodeLost"), "{events}");
}
