//! Leader election by a Lease, by the rules of client-go (`k8s.io/client-go/tools/leaderelection`).
//!
//! Who leads stands in the Lease. Clocks of different machines are never compared: a holder counts as gone when its
//! record has not changed for the lease's duration on our own monotonic clock. Every write carries the resourceVersion
//! that was read, so that of two racers one is refused. A leader that could not renew for [`Timings::renew_deadline`]
//! stops leading before anybody else may begin: its process must end ([`Lost`]).

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// client-go's waits. `duration` > `renew_deadline` > `retry` must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timings {
    /// How long a record that does not change keeps others from leading; whole seconds.
    pub duration: Duration,
    /// How long a leader tries to renew before it gives up.
    pub renew_deadline: Duration,
    /// Between two tries.
    pub retry: Duration,
}

impl Default for Timings {
    /// 15 s, 10 s, 2 s: the defaults of Kubernetes' own components.
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// Where the Lease is kept: the API server, or a test's memory.
pub trait Store {
    /// Reads the Lease; `None` when there is none.
    fn get(&self) -> impl Future<Output = kube::Result<Option<Lease>>> + Send;
    /// Makes it; refused when it exists.
    fn create(&self, lease: &Lease) -> impl Future<Output = kube::Result<Lease>> + Send;
    /// Replaces it; refused when it is not at `lease`'s resourceVersion any more.
    fn replace(&self, lease: &Lease) -> impl Future<Output = kube::Result<Lease>> + Send;
}

/// A Lease of the API server.
#[derive(Clone)]
pub struct ApiStore {
    api: Api<Lease>,
    name: String,
}

impl std::fmt::Debug for ApiStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiStore").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ApiStore {
    /// Lease `namespace`/`name`. The client should not try again by itself: a late answer is worse than none.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), name: name.to_owned() }
    }
}

impl Store for ApiStore {
    async fn get(&self) -> kube::Result<Option<Lease>> {
        self.api.get_opt(&self.name).await
    }

    async fn create(&self, lease: &Lease) -> kube::Result<Lease> {
        let mut lease = lease.clone();
        lease.metadata.name = Some(self.name.clone());
        self.api.create(&PostParams::default(), &lease).await
    }

    async fn replace(&self, lease: &Lease) -> kube::Result<Lease> {
        self.api.replace(&self.name, &PostParams::default(), lease).await
    }
}

/// The lease is not ours any more: the process must end, since what it has begun may still be under way.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// It could not be renewed.
    #[error("the lease could not be renewed for {} s; another replica may lead", .0.as_secs())]
    Deadline(Duration),
    /// Somebody else has it.
    #[error("{0:?} took the lease")]
    Taken(String),
}

/// How a try to take or renew went.
#[derive(Debug)]
enum Try {
    Ours,
    /// Somebody else's.
    Held(String),
}

/// One candidate.
#[derive(Debug)]
pub struct Election<S> {
    store: S,
    identity: String,
    timings: Timings,
    /// The Lease as last read or written.
    seen: Option<Lease>,
    /// When we saw its record change.
    changed: Instant,
}

impl<S: Store> Election<S> {
    /// A candidate called `identity`, which must be unique among processes that may run at the same time. One that is
    /// started again under its old name (a container of the same pod) leads at once, since its predecessor is gone.
    #[must_use]
    pub fn new(store: S, identity: String, timings: Timings) -> Self {
        Self { store, identity, timings, seen: None, changed: Instant::now() }
    }

    /// Waits until this candidate leads. `false`: `shutdown` came first.
    pub async fn acquire(&mut self, shutdown: &CancellationToken) -> bool {
        let mut told = None;
        loop {
            let attempt = tokio::time::timeout(self.timings.renew_deadline, self.attempt());
            let attempt = tokio::select! {
                attempt = attempt => attempt,
                // A write may be under way: if it arrives, the lease expires by itself.
                () = shutdown.cancelled() => return false,
            };
            match attempt {
                Ok(Ok(Try::Ours)) => {
                    tracing::info!(identity = self.identity, "leading");
                    return true;
                }
                Ok(Ok(Try::Held(holder))) => {
                    if told.as_ref() != Some(&holder) {
                        tracing::info!(%holder, "another replica leads");
                        told = Some(holder);
                    }
                }
                Ok(Err(error)) if is_conflict(&error) => tracing::debug!("another replica wrote the lease"),
                Ok(Err(error)) => tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the lease of the leader cannot be read or written; trying again"
                ),
                Err(_) => tracing::warn!("the API server did not answer about the lease; trying again"),
            }
            tokio::select! {
                () = tokio::time::sleep(self.timings.retry) => {}
                () = shutdown.cancelled() => return false,
            }
        }
    }

    /// Renews until `shutdown`, then gives `Ok`; the lease is still ours, see [`Election::release`].
    ///
    /// # Errors
    /// [`Lost`] when the lease is not ours any more.
    pub async fn renew(&mut self, shutdown: &CancellationToken) -> Result<(), Lost> {
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.timings.retry) => {}
                () = shutdown.cancelled() => return Ok(()),
            }
            let deadline = self.timings.renew_deadline;
            tokio::select! {
                renewed = tokio::time::timeout(deadline, self.renew_once()) => match renewed {
                    Ok(result) => result?,
                    Err(_) => return Err(Lost::Deadline(deadline)),
                },
                // A write may be under way: then giving the lease up is refused, and it ends by itself.
                () = shutdown.cancelled() => return Ok(()),
            }
        }
    }

    /// Tries until a renewal succeeds or somebody else has the lease.
    async fn renew_once(&mut self) -> Result<(), Lost> {
        loop {
            match self.attempt().await {
                Ok(Try::Ours) => return Ok(()),
                Ok(Try::Held(holder)) => return Err(Lost::Taken(holder)),
                Err(error) => tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the lease was not renewed; trying again"
                ),
            }
            tokio::time::sleep(self.timings.retry).await;
        }
    }

    /// Gives the lease up, so that the next leader need not wait for its end. Call it once nothing acts any more. A
    /// failure is logged only: the lease ends by itself.
    pub async fn release(mut self) {
        let Some(mut lease) = self.seen.take() else { return };
        if holder(&lease) != self.identity {
            return;
        }
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        spec.acquire_time = spec.renew_time.clone();
        match tokio::time::timeout(self.timings.retry, self.store.replace(&lease)).await {
            Ok(Ok(_)) => tracing::info!("gave the lease up"),
            Ok(Err(error)) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the lease was not given up; it ends by itself"
            ),
            Err(_) => {
                tracing::warn!(
                    "the API server did not answer; the lease was not given up and ends by itself"
                );
            }
        }
    }

    /// Takes or renews the lease, if nobody else has it.
    async fn attempt(&mut self) -> kube::Result<Try> {
        let Some(found) = self.store.get().await? else {
            let lease =
                Lease { metadata: ObjectMeta::default(), spec: Some(self.record(None, Timestamp::now())) };
            let made = self.store.create(&lease).await?;
            self.observe(made);
            return Ok(Try::Ours);
        };
        self.observe(found.clone());
        let holder = holder(&found).to_owned();
        let duration = found.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or_default();
        let duration = Duration::from_secs(u64::try_from(duration).unwrap_or_default());
        if !holder.is_empty() && holder != self.identity && self.changed.elapsed() < duration {
            return Ok(Try::Held(holder));
        }
        let spec = self.record(found.spec.as_ref(), Timestamp::now());
        let written = self.store.replace(&Lease { spec: Some(spec), ..found }).await?;
        self.observe(written);
        Ok(Try::Ours)
    }

    /// Keeps the Lease; the clock of its expiry starts anew when its record is another.
    fn observe(&mut self, lease: Lease) {
        if self.seen.as_ref().is_none_or(|seen| seen.spec != lease.spec) {
            self.changed = Instant::now();
        }
        self.seen = Some(lease);
    }

    /// The record by which we hold the lease from now on.
    fn record(&self, old: Option<&LeaseSpec>, now: Timestamp) -> LeaseSpec {
        let mine = old.filter(|old| old.holder_identity.as_ref() == Some(&self.identity));
        let transitions = old.and_then(|old| old.lease_transitions).unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(
                i32::try_from(self.timings.duration.as_secs()).unwrap_or(i32::MAX).max(1),
            ),
            acquire_time: mine.and_then(|mine| mine.acquire_time.clone()).or(Some(MicroTime(now))),
            renew_time: Some(MicroTime(now)),
            lease_transitions: Some(match (old, mine) {
                (Some(_), None) => transitions.saturating_add(1),
                _ => transitions,
            }),
            ..LeaseSpec::default()
        }
    }
}

fn holder(lease: &Lease) -> &str {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
