//! What the cluster learns of the node: a Lease that is renewed, and a ClusterImpNodeProfile that is written on change.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use imp_api::{ClusterImpNodeProfile, ClusterImpNodeProfileStatus, NodeCapacity, NodeVmm, names};
use imp_proto::v1;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Resource as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::context::Context;

/// Renewals of the Lease that may be missed before the node counts as lost.
const MISSED: u32 = 4;

/// Renews the node's Lease for good.
pub async fn lease(context: Arc<Context>, namespace: String) {
    let api = Api::<Lease>::namespaced(context.client.0.clone(), &namespace);
    let name = format!("imp-node-{}", context.node);
    let mut ticks = tokio::time::interval(context.timings.heartbeat);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let body = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": { "name": name },
            "spec": {
                "holderIdentity": context.node,
                "leaseDurationSeconds": (context.timings.heartbeat * MISSED).as_secs().max(1),
                "renewTime": format!("{:.6}", Timestamp::now()),
            },
        });
        let params = PatchParams::apply(names::field_manager::AGENT).force();
        let result = api.patch(&name, &params, &Patch::Apply(&body)).await;
        context.metrics.wrote("Lease", result.is_ok());
        imp_killpoint::agent("heartbeat-written");
        if let Err(error) = result {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                lease = name,
                "the node's heartbeat was not written"
            );
        }
    }
}

/// Keeps the node's profile: made if it is absent, its status written on change.
pub async fn profile(
    context: Arc<Context>,
    endpoint: SocketAddr,
    mut runtime: watch::Receiver<Option<Arc<v1::NodeInfoResponse>>>,
) {
    let api = Api::<ClusterImpNodeProfile>::all(context.client.0.clone());
    let own = watcher::Config::default().fields(&format!("metadata.name={}", context.node));
    let mut objects = watcher(api.clone(), own).default_backoff().boxed();
    let mut object: Option<ClusterImpNodeProfile> = None;
    let mut synced = false;
    let mut lost = Some(Instant::now() + context.timings.runtime_lost);
    let mut last: Option<Arc<v1::NodeInfoResponse>> = None;
    let mut retry: Option<Instant> = None;
    loop {
        let due = lost.into_iter().chain(retry).min();
        tokio::select! {
            event = objects.try_next() => match event {
                Ok(Some(watcher::Event::Apply(found) | watcher::Event::InitApply(found))) => object = Some(found),
                Ok(Some(watcher::Event::Delete(_))) => object = None,
                Ok(Some(watcher::Event::Init)) => { object = None; synced = false; }
                Ok(Some(watcher::Event::InitDone)) => synced = true,
                Ok(None) => return,
                Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "the watch on the node's profile broke; it is begun again"),
            },
            changed = runtime.changed() => {
                if changed.is_err() {
                    return;
                }
                match runtime.borrow_and_update().clone() {
                    Some(info) => (last, lost) = (Some(info), None),
                    None => lost = Some(Instant::now() + context.timings.runtime_lost),
                }
            }
            () = sleep_until(due) => retry = None,
        }
        let connected = runtime.borrow().is_some();
        let late = lost.is_some_and(|at| at <= Instant::now());
        if !synced || !(connected || late) {
            continue;
        }
        if late {
            lost = None;
        }
        if let Err(error) =
            publish(&context, &api, object.as_ref(), last.as_deref(), connected, endpoint).await
        {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the node's profile was not written; trying again"
            );
            retry = Some(Instant::now() + Duration::from_secs(2));
        }
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn publish(
    context: &Context,
    api: &Api<ClusterImpNodeProfile>,
    object: Option<&ClusterImpNodeProfile>,
    info: Option<&v1::NodeInfoResponse>,
    connected: bool,
    endpoint: SocketAddr,
) -> kube::Result<()> {
    let before = object.and_then(|object| object.status.clone()).unwrap_or_default();
    let params = PatchParams::apply(names::field_manager::AGENT).force();
    let head = |rest: serde_json::Value| {
        let mut body = json!({
            "apiVersion": ClusterImpNodeProfile::api_version(&()),
            "kind": ClusterImpNodeProfile::kind(&()),
            "metadata": { "name": context.node },
        });
        if let (Some(body), serde_json::Value::Object(rest)) = (body.as_object_mut(), rest) {
            body.extend(rest);
        }
        body
    };
    if object.is_none() {
        let result = api.patch(&context.node, &params, &Patch::Apply(head(json!({"spec": {}})))).await;
        context.metrics.wrote("ClusterImpNodeProfile", result.is_ok());
        result?;
        imp_killpoint::agent("profile-made");
    }
    let status = status(&before, info, connected, endpoint);
    if !is_news(&before, &status) {
        return Ok(());
    }
    let result =
        api.patch_status(&context.node, &params, &Patch::Apply(head(json!({"status": status})))).await;
    context.metrics.wrote("ClusterImpNodeProfile", result.is_ok());
    result?;
    imp_killpoint::agent("profile-written");
    Ok(())
}

fn status(
    before: &ClusterImpNodeProfileStatus,
    info: Option<&v1::NodeInfoResponse>,
    connected: bool,
    endpoint: SocketAddr,
) -> ClusterImpNodeProfileStatus {
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let now = Time(Timestamp::now());
    let mut status = ClusterImpNodeProfileStatus {
        agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        agent_endpoint: Some(endpoint.to_string()),
        observed_at: Some(now.clone()),
        conditions: vec![ready(before, connected, now)],
        ..before.clone()
    };
    if let Some(info) = info {
        status.capacity = Some(NodeCapacity {
            cpus: i32::try_from(info.cpus).ok(),
            memory_bytes: i64::try_from(info.memory_bytes).ok(),
            disk_free_bytes: i64::try_from(info.disk_free_bytes).ok(),
        });
        status.vmms = info
            .vmms
            .iter()
            .map(|vmm| NodeVmm {
                driver: vmm.driver.clone(),
                version: text(&vmm.version),
                hardware_virtualization: vmm.hardware_virtualization,
                message: text(&vmm.message),
            })
            .collect();
        status.cpu_model = text(&info.cpu_model);
        status.architecture = text(&info.architecture);
        status.kernel = text(&info.kernel);
        status.boot_id = text(&info.boot_id);
        status.runtime_version = text(&info.runtime_version);
    }
    status
}

fn ready(before: &ClusterImpNodeProfileStatus, connected: bool, now: Time) -> Condition {
    let (text, reason, message) = if connected {
        ("True", "RuntimeConnected", "The agent talks to the runtime, which can start VMs")
    } else {
        (
            "False",
            "RuntimeUnavailable",
            "The runtime does not answer on its socket; VMs run on, but none can be started or stopped. See the pod of DaemonSet imp-runtime on this node",
        )
    };
    let same = before.conditions.iter().find(|c| c.type_ == "Ready" && c.status == text);
    Condition {
        type_: "Ready".to_owned(),
        status: text.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: same.map_or(now, |c| c.last_transition_time.clone()),
        observed_generation: None,
    }
}

/// Free disk space and the time of writing change all the time and are no news by themselves.
fn is_news(before: &ClusterImpNodeProfileStatus, after: &ClusterImpNodeProfileStatus) -> bool {
    let plain = |status: &ClusterImpNodeProfileStatus| ClusterImpNodeProfileStatus {
        observed_at: None,
        capacity: status.capacity.map(|capacity| NodeCapacity { disk_free_bytes: None, ..capacity }),
        ..status.clone()
    };
    plain(before) != plain(after)
}
