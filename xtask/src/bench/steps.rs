//! The life of one VM to Running, step by step.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};
use futures::StreamExt as _;
use imp_api::ImpVM;
use imp_proto::v1::{self as pb, runtime_client::RuntimeClient};
use kube::api::{DeleteParams, PostParams, WatchEvent, WatchParams};
use kube::runtime::wait::{await_condition, conditions::is_deleted};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use tonic::transport::Channel;

/// A VM that takes longer has failed.
const DEADLINE: Duration = Duration::from_secs(120);

/// Since the VM's creation was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    /// Its object names a node.
    pub(super) bound: Duration,
    /// The node's agent has put it to the runtime.
    pub(super) agent: Duration,
    /// The root disk of the image is there.
    pub(super) image: Duration,
    /// The VMM runs.
    pub(super) vmm: Duration,
    /// The guest has said hello.
    pub(super) guest: Duration,
    /// The workload's exec succeeded.
    pub(super) workload: Duration,
    /// The object says Running.
    pub(super) running: Duration,
}

pub(super) fn vm(name: &str) -> Result<ImpVM> {
    let vm: Value = json!({
        "apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "classRef": {"name": "small"}, "networkRef": {"name": "lab"}, "image": "registry.imp-dev.local:5000/busybox:1.35",
            "command": ["sleep", "100000"], "terminationGracePeriodSeconds": 0,
        },
    });
    serde_json::from_value(vm).context("the VM's manifest")
}

/// Creates a VM and follows it to Running.
pub(super) async fn create(api: &Api<ImpVM>, runtime: &RuntimeClient<Channel>, name: &str) -> Result<Steps> {
    let start = SystemTime::now();
    let made = api.create(&PostParams::default(), &vm(name)?).await.context("create the VM")?;
    let uid = made.uid().context("the VM has no UID")?;
    let params = WatchParams::default().fields(&format!("metadata.name={name}"));
    let mut changes = api.watch(&params, &made.resource_version().unwrap_or_default()).await?.boxed();
    let since = |time: SystemTime| time.duration_since(start).unwrap_or_default();
    let mut bound = None;
    let follow = async {
        while let Some(change) = changes.next().await {
            let WatchEvent::Modified(vm) = change? else { continue };
            let status = serde_json::to_value(&vm.status)?;
            if bound.is_none() && status["nodeName"].is_string() {
                bound = Some(since(SystemTime::now()));
            }
            match status["phase"].as_str() {
                Some("Running") => return Ok(since(SystemTime::now())),
                Some("Failed" | "Succeeded") => bail!("{name} ended: {status}"),
                _ => {}
            }
        }
        bail!("the watch ended")
    };
    let running = tokio::time::timeout(DEADLINE, follow).await.context("the VM took too long")??;
    let vms = runtime.clone().list_vms(pb::ListVmsRequest {}).await?.into_inner().vms;
    let status = vms
        .into_iter()
        .find(|v| v.vm.as_ref().is_some_and(|v| v.uid == uid))
        .context("the runtime has no such VM")?;
    let timings = status.timings.context("the runtime tells no times")?;
    let at = |time: Option<prost_types::Timestamp>| -> Result<Duration> {
        Ok(since(SystemTime::try_from(time.context("a step was not timed")?)?))
    };
    Ok(Steps {
        bound: bound.context("the VM was never bound")?,
        agent: at(timings.accepted)?,
        image: at(timings.image_ready)?,
        vmm: at(timings.vmm_started)?,
        guest: at(timings.guest_connected)?,
        workload: at(timings.workload_started)?,
        running,
    })
}

/// Deletes a VM and waits until it is gone; how long that took.
pub(super) async fn delete(api: &Api<ImpVM>, name: &str) -> Result<Duration> {
    let start = SystemTime::now();
    let uid = api.get(name).await?.uid().unwrap_or_default();
    api.delete(name, &DeleteParams::default()).await?;
    let gone = await_condition(api.clone(), name, is_deleted(&uid));
    tokio::time::timeout(DEADLINE, gone).await.context("the deletion took too long")??;
    Ok(start.elapsed().unwrap_or_default())
}
