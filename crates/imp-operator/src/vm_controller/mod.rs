//! The life of ImpVMs: from an object to a binding, from an end to a restart or not, from a deletion to the finalizer's removal.
//!
//! | step | file | holds a client |
//! |---|---|---|
//! | fetch what the object names | `dereference.rs` | no: it reads what is watched |
//! | what it asks for, or why that makes no sense | `validate.rs` | no |
//! | what its status should say | `build.rs`, by the deciders of `imp-core` | no |
//! | finalizer, status, deletion, events | `apply.rs` | yes |
//!
//! Whatever a decision depends on is watched (`world`), and a change of it has the VMs that wait looked at again.

mod apply;
mod build;
mod dereference;
mod validate;
mod world;

use crate::metrics::Metrics;
use apply::Apply;
use futures::StreamExt as _;
use imp_api::ImpVM;
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api,
    runtime::{
        controller::{Action, Controller},
        watcher,
    },
};
use std::{sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;
use world::World;

/// Pauses after a failure: short at first, since most are conflicts with the agent's writes.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// VMs that are looked at at the same time.
const CONCURRENCY: u16 = 8;

struct Context {
    world: Arc<World>,
    apply: Apply,
    metrics: Arc<Metrics>,
}

/// Why a look at a VM failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The API server.
    #[error(transparent)]
    Kube(#[from] kube::Error),
}

/// Passes that are under way at a shutdown may take so long.
const GRACE: std::time::Duration = std::time::Duration::from_secs(3);

/// Acts on ImpVMs until `shutdown`.
///
/// # Errors
/// When what it watches cannot be watched.
pub async fn run(
    client: kube::Client,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let vms = Api::<ImpVM>::all(client.clone());
    let controller = Controller::new(vms, watcher::Config::default());
    let watched = shutdown.run_until_cancelled(World::watch(&client, controller.store())).await;
    let Some(watched) = watched else { return Ok(()) };
    let (world, changes, watching) = watched?;
    let context = Arc::new(Context { world, apply: Apply::new(client), metrics: Arc::clone(&metrics) });
    let config = kube::runtime::Config::default().concurrency(CONCURRENCY);
    let stop = shutdown.clone();
    let acting = controller
        .with_config(config)
        .reconcile_all_on(changes)
        .graceful_shutdown_on(async move { stop.cancelled().await })
        .run(reconcile, retry, Arc::clone(&context))
        .for_each(|_| async {});
    // A controller that has not seen its objects yet (no definitions, no answer) does not end by itself. What is dropped half-way
    // is done again by the next leader, as after a crash.
    let grace = async {
        shutdown.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        () = acting => Ok(()),
        result = watching => result,
        () = grace => Ok(()),
    }
}

async fn reconcile(vm: Arc<ImpVM>, context: Arc<Context>) -> Result<Action, Error> {
    let start = std::time::Instant::now();
    let result = look(&vm, &context).await;
    let fine = result.as_ref().err().is_none_or(conflict);
    context.metrics.reconciled("impvm", start.elapsed(), fine);
    context.metrics.count_vms(context.world.phases());
    if result.is_ok() {
        context.world.succeeded(&vm);
    }
    result
}

/// Somebody wrote in between: what we saw is old, and the news is on its way.
fn conflict(error: &Error) -> bool {
    matches!(error, Error::Kube(kube::Error::Api(status)) if status.code == 409 || status.code == 404)
}

fn retry(vm: Arc<ImpVM>, error: &Error, context: Arc<Context>) -> Action {
    let failures = context.world.failed(&vm);
    if !conflict(error) {
        let vm = kube::runtime::reflector::ObjectRef::from_obj(&*vm);
        tracing::warn!(%vm, error = error as &dyn std::error::Error, "trying again");
    }
    Action::requeue(RETRY.0.saturating_mul(1 << failures.min(12)).min(RETRY.1))
}

async fn look(vm: &ImpVM, context: &Context) -> Result<Action, Error> {
    let now = Timestamp::now();
    let world = &context.world;
    if vm.metadata.deletion_timestamp.is_some() {
        return match build::deletion(vm, &dereference::node(world, vm)) {
            build::Deletion::Remove { warning } => {
                if let Some(note) = warning {
                    context.apply.event(vm, &note).await;
                }
                context.apply.remove_finalizer(vm).await?;
                world.forget(vm);
                Ok(Action::await_change())
            }
            build::Deletion::Wait(status) => {
                context.apply.status(vm, *status).await?;
                Ok(Action::await_change())
            }
        };
    }
    if context.apply.add_finalizer(vm).await? {
        // Its event brings us back, with the new version of the object.
        return Ok(Action::await_change());
    }
    let referenced = dereference::dereference(world, vm);
    let validated = validate::validate(vm, &referenced);
    let plan = build::plan(vm, &referenced, &validated, world, now);
    if plan.delete {
        context.apply.delete(vm).await?;
        let text = "spec.expireAfter has passed";
        context.apply.event(vm, &build::Note::new(false, imp_api::names::Reason::Expired, text)).await;
        return Ok(Action::await_change());
    }
    match context.apply.status(vm, plan.status).await {
        Ok(_) => {}
        Err(error) => {
            // What was promised and not written is given back.
            world.retract(vm);
            return Err(error.into());
        }
    }
    if plan.bound {
        let created = vm.metadata.creation_timestamp.as_ref().map(|t| t.0);
        if let Some(after) = created.and_then(|t| Duration::try_from(now.duration_since(t)).ok()) {
            context.metrics.scheduled(after);
        }
    }
    if let Some(note) = plan.event {
        context.apply.event(vm, &note).await;
    }
    if plan.reset_annotation {
        context.apply.remove_reset_annotation(vm).await?;
    }
    Ok(match plan.again_at {
        Some(at) => {
            Action::requeue(Duration::from_secs(u64::try_from(at - now.as_second()).unwrap_or(0).max(1)))
        }
        None => Action::await_change(),
    })
}
