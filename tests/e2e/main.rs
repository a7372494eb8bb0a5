//! All programs under a light cluster: what is true on the object, and what survives the death of any of them.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and nobody uses these modules"
)]

mod deaths;
mod ends;
mod kill_points;
mod nodes;
mod outages;
mod world;
mod writes;

use world::World;

/// One cluster for all steps that leave it as they found it: each start takes its time.
#[tokio::test]
async fn a_cluster_tells_the_truth_whoever_dies() {
    let world = World::start(&[]).await.unwrap();
    writes::fr90_nothing_is_written_where_nothing_happens(&world).await;
    ends::fr60_ends_are_on_the_object(&world).await;
    ends::what_a_vm_refers_to_heals_when_it_comes(&world).await;
    ends::a_killed_vmm_is_restarted_on_its_disk_and_address(&world).await;
    deaths::fr47_every_program_dies_alone_and_all_together(&world).await;
    deaths::fr48_fr51_programs_die_while_vms_are_made_and_deleted(&world).await;
    world.nothing_is_left(1).await;
}

/// The same for what is outside of Imp: the API server, its store, the nodes.
#[tokio::test]
async fn a_cluster_comes_back_from_outages() {
    let world = World::start(&["--nodes=2"]).await.unwrap();
    outages::vms_run_on_while_the_api_is_away(&world).await;
    nodes::a_rebooted_node_starts_its_persistent_vms_again(&world).await;
    nodes::fr64_a_vm_of_a_node_that_is_gone_can_be_deleted(&world).await;
    world.nothing_is_left(1).await;
}

/// Operator and agent die at each of their remote steps, twice where it comes twice, from their first start on.
#[tokio::test]
async fn fr48_a_vm_lives_once_wherever_operator_and_agent_die() {
    let kills = kill_points::Kills::new().unwrap();
    kills.at_start();
    let world = World::start_with(&[], Some(kills.dir())).await.unwrap();
    kills.taken_at_start(&world).await;
    let expiring = kills.expires_begin(&world).await;
    kills.lives(&world).await;
    kills.restart(&world).await;
    kills.reset(&world).await;
    kills.orphan(&world).await;
    kills.expires_end(&world, &expiring).await;
    kills.profile(&world).await;
    kills.every_point_was_tried();
    world.nothing_is_left(1).await;
}
