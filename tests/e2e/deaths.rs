//! SIGKILL for our own programs.

use crate::world::{PATIENCE, World};
use imp_testkit::wait::wait_for;
use serde_json::json;
use std::time::Duration;

const PROGRAMS: [&str; 3] = ["imp-agent", "imp-runtime", "imp-operator"];

async fn kill(world: &World, program: &str) {
    // One that is being started again was killed a moment ago.
    wait_for(PATIENCE, &format!("{program} to be there"), async || match world.dev.kill(program) {
        Ok(true) => Ok(()),
        Ok(false) => Err("it does not run".to_owned()),
        Err(e) => Err(format!("{e:#}")),
    })
    .await
    .unwrap();
}

pub async fn fr47_every_program_dies_alone_and_all_together(world: &World) {
    let before = world.life("hello").await.unwrap();
    for program in PROGRAMS {
        kill(world, program).await;
        world.lives_on("hello", &before).await.unwrap();
    }
    // All at once; and a VM ends while nobody looks.
    world.shell("ends", "while [ ! -e /go ]; do sleep 0.2; done; sleep 1; exit 9", json!({})).await.unwrap();
    world.phase("ends", "Running").await.unwrap();
    world.exec("ends", &["touch", "/go"]).unwrap();
    for program in PROGRAMS {
        kill(world, program).await;
    }
    world.lives_on("hello", &before).await.unwrap();
    let vm = world.phase("ends", "Failed").await.unwrap();
    assert_eq!(vm.status.and_then(|s| s.exit_code), Some(9));
    world.delete("ends").await.unwrap();
}

pub async fn fr48_fr51_programs_die_while_vms_are_made_and_deleted(world: &World) {
    let script = "echo x >> /boots; echo boots: $(wc -l < /boots); sleep 1000";
    let names: Vec<String> = (0..4).map(|i| format!("storm-{i}")).collect();
    for name in &names {
        world.shell(name, script, json!({})).await.unwrap();
    }
    // From the first binding to the last workload: each program dies at many of the steps of some VM.
    for round in 0..4 {
        for program in PROGRAMS {
            kill(world, program).await;
            tokio::time::sleep(Duration::from_millis(300 + 170 * round)).await;
        }
    }
    for name in &names {
        world.phase(name, "Running").await.unwrap();
        let log = world.said(name, "boots: ").await.unwrap();
        assert_eq!(log, "boots: 1\n", "{name} booted more than once");
    }
    let addresses: std::collections::BTreeSet<_> = world
        .vms()
        .list(&Default::default())
        .await
        .unwrap()
        .into_iter()
        .map(|vm| vm.status.unwrap().ip)
        .collect();
    assert_eq!(addresses.len(), names.len() + 1, "every VM has an address of its own: {addresses:?}");
    for name in &names {
        world.vms().delete(name, &Default::default()).await.unwrap();
    }
    for program in PROGRAMS {
        kill(world, program).await;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    for name in &names {
        world.gone(name).await.unwrap();
    }
}
