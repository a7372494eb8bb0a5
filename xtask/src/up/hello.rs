//! The first VM.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use imp_api::ImpVM;
use imp_testkit::cluster::MARKER;
use imp_testkit::netns;
use kube::runtime::wait::await_condition;
use kube::{Api, Client};

use super::{Built, Place};
use crate::progress::Progress;
use crate::workspace;

/// Applies `examples/hello.yaml` and waits until the VM runs.
pub(super) async fn run(progress: &Progress, place: &Place, built: &Built, client: &Client) -> Result<()> {
    let example = workspace::root().join("examples/hello.yaml");
    progress.step("apply examples/hello.yaml", || {
        let mut command = Command::new(built.tools.kubernetes("kubectl"));
        command.args([
            "--kubeconfig",
            place.dev.join("kubeconfig").as_str(),
            "apply",
            "-f",
            example.as_str(),
        ]);
        netns::run(command.env(MARKER, place.layout.dir.as_str()))
    })?;
    let vms: Api<ImpVM> = Api::namespaced(client.clone(), "default");
    progress.wait("VM hello Running", running(&vms)).await
}

async fn running(vms: &Api<ImpVM>) -> Result<()> {
    let over = await_condition(vms.clone(), "hello", |vm: Option<&ImpVM>| {
        vm.is_some_and(|vm| matches!(phase(vm).as_str(), "Running" | "Failed" | "Succeeded"))
    });
    if let Ok(result) = tokio::time::timeout(Duration::from_secs(120), over).await {
        result.context("watch the VM")?;
    }
    let vm = vms.get("hello").await.context("get the VM")?;
    if phase(&vm) == "Running" {
        return Ok(());
    }
    let message = vm.status.as_ref().and_then(|s| s.message.clone()).unwrap_or_default();
    bail!(
        "the VM hello is {:?}, not Running: {message} (`kubectl describe impvm hello` says more)",
        phase(&vm)
    )
}

/// The phase as people see it; empty while there is none.
fn phase(vm: &ImpVM) -> String {
    let phase = vm.status.as_ref().and_then(|s| s.phase.as_ref());
    phase
        .and_then(|p| serde_json::to_value(p).ok())
        .and_then(|v| v.as_str().map(str::to_owned))
        .unwrap_or_default()
}
