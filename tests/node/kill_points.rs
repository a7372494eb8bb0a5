//! SIGKILL for the runtime at every journal and remote step of a VM's life, twice where the step comes twice: the VM boots once,
//! runs, is deleted, and nothing is left.

use crate::harness::{Node, Options, PATIENCE, processes, shell, uid};
use anyhow::{Context as _, Result, ensure};
use imp_killpoint::RUNTIME;
use imp_proto::v1 as pb;
use std::time::Instant;

/// Half of the points each, so that both run at a time.
#[tokio::test]
async fn fr48_killed_anywhere_in_the_first_half_of_a_life() {
    every(&RUNTIME[..RUNTIME.len() / 2]).await;
}

#[tokio::test]
async fn fr48_killed_anywhere_in_the_second_half_of_a_life() {
    every(&RUNTIME[RUNTIME.len() / 2..]).await;
}

async fn every(points: &[&'static str]) {
    for point in points {
        life(point).await.unwrap_or_else(|e| panic!("killed at {point}: {e:#}"));
    }
}

/// Does what an agent does: puts the wish again and again until what is wanted is there, whoever dies meanwhile.
async fn insist(
    node: &mut Node,
    deaths: &mut u32,
    mut step: impl AsyncFnMut(&Node) -> Result<bool>,
) -> Result<()> {
    let start = Instant::now();
    loop {
        let done = step(node).await;
        if node.was_killed()? {
            *deaths += 1;
            node.boot().await?;
            continue;
        }
        match done {
            Ok(true) => return Ok(()),
            result if start.elapsed() > PATIENCE => {
                result?;
                anyhow::bail!("it does not get there; log: {}", node.log());
            }
            _ => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
        }
    }
}

async fn life(point: &'static str) -> Result<()> {
    let options = Options { kill_at: Some(point), ..Default::default() };
    let mut node = Node::start_with("point", options).await?;
    let mut deaths = 0;
    let spec =
        shell("echo boot >> /boots; echo boots: $(wc -l < /boots); trap 'exit 0' TERM; sleep 1000 & wait")?;
    insist(&mut node, &mut deaths, async |node| {
        let status = node.put(&spec).await?;
        ensure!(
            !matches!(status.state(), pb::VmState::Failed | pb::VmState::Stopped),
            "it ended: {status:?}"
        );
        Ok(status.state() == pb::VmState::Running && status.guest.is_some_and(|g| g.connected))
    })
    .await
    .context("to Running")?;
    insist(&mut node, &mut deaths, async |node| Ok(node.logs(&spec).await?.contains("boots: ")))
        .await
        .context("to its first words")?;
    ensure!(node.logs(&spec).await? == "boots: 1\n", "it booted more than once: {}", node.logs(&spec).await?);
    ensure!(processes(&uid(&spec)).len() == 1, "there is more than one VMM");
    insist(&mut node, &mut deaths, async |node| node.delete(&spec, None).await)
        .await
        .context("to its end")?;
    node.removed(&spec).await?;
    ensure!(deaths > 0, "the runtime never came to this point");
    Ok(())
}
