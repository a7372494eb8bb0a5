//! The API server and its store, away for a while.

use crate::world::World;
use serde_json::json;
use std::time::Duration;

pub async fn vms_run_on_while_the_api_is_away(world: &World) {
    let before = world.life("hello").await.unwrap();
    let away = |name: &str, seconds: u64| {
        let name = name.to_owned();
        async move {
            let killed = world.dev.take_down(&name).unwrap();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            world.dev.put_up(&killed).unwrap();
        }
    };
    // This one ends while there is nobody to tell.
    let script = "while [ ! -e /go ]; do sleep 0.2; done; sleep 5; exit 7";
    world
        .shell("meanwhile", script, json!({"nodeSelector": {"kubernetes.io/hostname": "n1"}}))
        .await
        .unwrap();
    world.phase("meanwhile", "Running").await.unwrap();
    world.exec("meanwhile", &["touch", "/go"]).unwrap();
    away("kube-apiserver", 60).await;
    world.lives_on("hello", &before).await.unwrap();
    let vm = world.phase("meanwhile", "Failed").await.unwrap();
    assert_eq!(vm.status.and_then(|s| s.exit_code), Some(7));

    // Without its store the API server answers and fails; our programs die meanwhile, too.
    let etcd = world.dev.take_down("etcd").unwrap();
    for program in ["imp-agent", "imp-runtime", "imp-operator"] {
        world.dev.kill(program).unwrap();
    }
    tokio::time::sleep(Duration::from_secs(20)).await;
    world.dev.put_up(&etcd).unwrap();
    world.lives_on("hello", &before).await.unwrap();
    world.delete("meanwhile").await.unwrap();
}
