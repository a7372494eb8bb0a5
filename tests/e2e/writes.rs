//! How much is written to the API server.

use crate::world::World;
use imp_testkit::writes::{count, since};
use serde_json::json;
use std::time::Duration;

/// The most writes that a VM may take from its creation to Running, its own creation not counted.
const MOST: u64 = 6;
/// Longer than any interval at which the programs do something by the clock (heartbeats, samples of usage).
const IDLE: Duration = Duration::from_secs(40);

pub async fn fr90_nothing_is_written_where_nothing_happens(world: &World) {
    world.phase("hello", "Running").await.unwrap();
    let before = settled(world).await;
    tokio::time::sleep(IDLE).await;
    let written = since(&before, &count(&world.client).await.unwrap());
    assert!(written.is_empty(), "written in {IDLE:?} in which nothing happened: {written:?}");

    world.shell("counted", "sleep 1000", json!({})).await.unwrap();
    world.phase("counted", "Running").await.unwrap();
    let after = settled(world).await;
    let written = since(&before, &after);
    let total: u64 = written.values().sum::<u64>() - 1;
    assert!((1..=MOST).contains(&total), "{total} writes for one VM: {written:?}");
    world.delete("counted").await.unwrap();
}

/// The count once it has stopped growing.
async fn settled(world: &World) -> std::collections::BTreeMap<String, u64> {
    let mut last = count(&world.client).await.unwrap();
    loop {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let now = count(&world.client).await.unwrap();
        if now == last {
            return now;
        }
        last = now;
    }
}
