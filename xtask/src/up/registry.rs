//! A registry inside the cluster's network with the image of the example.

use std::process::Command;

use anyhow::{Context as _, Result};
use camino::Utf8Path;
use imp_testkit::cluster::layout::{HUB_IP, REGISTRY_PORT};
use imp_testkit::cluster::{Cluster, MARKER};
use imp_testkit::netns;
use serde_json::json;

/// Starts Debian's docker-registry in the hub. It serves plain HTTP: it is reachable from the cluster's own network alone.
pub(super) fn start(cluster: &mut Cluster) -> Result<()> {
    let layout = cluster.config().layout.clone();
    let dir = layout.dir.join("registry");
    std::fs::create_dir_all(&dir).with_context(|| format!("make {dir}"))?;
    let config = json!({
        "version": 0.1, "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": dir}},
        "http": {"addr": format!("{HUB_IP}:{REGISTRY_PORT}")},
    });
    let file = dir.join("config.json");
    std::fs::write(&file, config.to_string()).with_context(|| format!("write {file}"))?;
    cluster.start_in_hub("registry", "docker-registry", &["serve", file.as_str()], &[])
}

/// Puts an OCI archive into it.
pub(super) fn push(cluster: &Cluster, archive: &Utf8Path, reference: &str) -> Result<()> {
    let hub = cluster.config().layout.hub();
    let target = format!("docker://{HUB_IP}:{REGISTRY_PORT}/{reference}");
    let mut command: Command = hub.command("skopeo");
    command.args(["copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false", "--retry-times=5"]);
    command.args([&format!("oci-archive:{archive}"), &target]);
    command.env(MARKER, cluster.config().layout.dir.as_str());
    netns::run(&mut command).context("push the example's image to the development registry")
}
