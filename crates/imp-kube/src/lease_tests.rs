use std::sync::{Arc, Mutex};

use kube::core::Status;

use super::*;

/// An API server's memory of one Lease, with its check of resourceVersion.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    lease: Option<Lease>,
    version: u64,
    down: bool,
    hangs: bool,
    writes: usize,
}

fn refused(code: u16) -> kube::Error {
    kube::Error::Api(Box::new(Status { code, ..Status::default() }))
}

impl Memory {
    fn with<T>(&self, look: impl FnOnce(&mut Inner) -> T) -> T {
        look(&mut self.0.lock().unwrap())
    }

    async fn reach(&self) -> kube::Result<()> {
        let (down, hangs) = self.with(|inner| (inner.down, inner.hangs));
        if hangs {
            std::future::pending::<()>().await;
        }
        tokio::task::yield_now().await;
        if down { Err(refused(500)) } else { Ok(()) }
    }

    fn holder(&self) -> String {
        self.with(|inner| inner.lease.as_ref().map(|lease| holder(lease).to_owned()).unwrap_or_default())
    }

    fn spec(&self) -> LeaseSpec {
        self.with(|inner| inner.lease.clone().unwrap().spec.unwrap())
    }
}

impl Inner {
    fn store(&mut self, lease: &Lease) -> Lease {
        self.version += 1;
        self.writes += 1;
        let mut lease = lease.clone();
        lease.metadata.resource_version = Some(self.version.to_string());
        self.lease = Some(lease.clone());
        lease
    }
}

impl Store for Memory {
    async fn get(&self) -> kube::Result<Option<Lease>> {
        self.reach().await?;
        Ok(self.with(|inner| inner.lease.clone()))
    }

    async fn create(&self, lease: &Lease) -> kube::Result<Lease> {
        self.reach().await?;
        self.with(|inner| if inner.lease.is_some() { Err(refused(409)) } else { Ok(inner.store(lease)) })
    }

    async fn replace(&self, lease: &Lease) -> kube::Result<Lease> {
        self.reach().await?;
        self.with(|inner| {
            let current = inner.lease.as_ref().and_then(|lease| lease.metadata.resource_version.clone());
            if current.is_none() || current != lease.metadata.resource_version {
                return Err(refused(409));
            }
            Ok(inner.store(lease))
        })
    }
}

fn candidate(memory: &Memory, name: &str) -> Election<Memory> {
    Election::new(memory.clone(), name.to_owned(), Timings::default())
}

/// Seconds of the paused clock that `work` took.
async fn seconds<T>(work: impl Future<Output = T>) -> (T, u64) {
    let begin = Instant::now();
    (work.await, begin.elapsed().as_secs())
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_died_is_followed_once_its_record_stood_still_for_the_duration() {
    let (memory, run) = (Memory::default(), CancellationToken::new());
    assert!(candidate(&memory, "a").acquire(&run).await);
    // The record's own times are far in the past: another machine's clock counts for nothing.
    let old = MicroTime("2001-01-01T00:00:00Z".parse().unwrap());
    memory.with(|inner| inner.lease.as_mut().unwrap().spec.as_mut().unwrap().renew_time = Some(old));
    let (led, after) = seconds(candidate(&memory, "b").acquire(&run)).await;
    assert!(led && (15..=17).contains(&after), "took over after {after} s");
    assert_eq!((memory.holder().as_str(), memory.spec().lease_transitions), ("b", Some(1)));
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_renews_keeps_the_lease() {
    let (memory, run) = (Memory::default(), CancellationToken::new());
    let mut a = candidate(&memory, "a");
    assert!(a.acquire(&run).await);
    let began = memory.spec().acquire_time;
    let stop = run.clone();
    let renewing = tokio::spawn(async move { (a.renew(&stop).await, a) });
    let other = run.clone();
    let b = memory.clone();
    let waiting = tokio::spawn(async move { candidate(&b, "b").acquire(&other).await });
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(!waiting.is_finished() && !renewing.is_finished());
    assert_eq!((memory.holder().as_str(), memory.spec().acquire_time), ("a", began));
    assert!(memory.with(|inner| inner.writes) >= 50, "a renewal every 2 s");
    run.cancel();
    let (renewed, a) = renewing.await.unwrap();
    renewed.unwrap();
    assert!(!waiting.await.unwrap());
    a.release().await;
    assert_eq!(memory.holder(), "");
    let (led, after) = seconds(candidate(&memory, "b").acquire(&CancellationToken::new())).await;
    assert!(led && after == 0, "a lease that was given up is free at once, not after {after} s");
}

#[tokio::test(start_paused = true)]
async fn a_leader_without_an_api_server_gives_up_before_another_may_lead() {
    for hangs in [false, true] {
        let (memory, run) = (Memory::default(), CancellationToken::new());
        let mut a = candidate(&memory, "a");
        assert!(a.acquire(&run).await);
        memory.with(|inner| (inner.down, inner.hangs) = (!hangs, hangs));
        let (lost, after) = seconds(a.renew(&run)).await;
        assert!(matches!(lost, Err(Lost::Deadline(_))), "{lost:?}");
        assert!((10..15).contains(&after), "gave up after {after} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_is_survived() {
    let (memory, run) = (Memory::default(), CancellationToken::new());
    let mut a = candidate(&memory, "a");
    assert!(a.acquire(&run).await);
    let stop = run.clone();
    let renewing = tokio::spawn(async move { a.renew(&stop).await });
    memory.with(|inner| inner.down = true);
    tokio::time::sleep(Duration::from_secs(8)).await;
    memory.with(|inner| inner.down = false);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(!renewing.is_finished());
    run.cancel();
    renewing.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_lease_was_taken_is_told_so() {
    let (memory, run) = (Memory::default(), CancellationToken::new());
    let mut a = candidate(&memory, "a");
    assert!(a.acquire(&run).await);
    memory.with(|inner| {
        let mut lease = inner.lease.clone().unwrap();
        lease.spec.as_mut().unwrap().holder_identity = Some("b".to_owned());
        inner.store(&lease);
    });
    let lost = a.renew(&run).await;
    assert!(matches!(&lost, Err(Lost::Taken(by)) if by == "b"), "{lost:?}");
    a.release().await;
    assert_eq!(memory.holder(), "b", "what is another's is not given up");
}

#[tokio::test(start_paused = true)]
async fn of_two_racers_one_leads() {
    for existing in [false, true] {
        let memory = Memory::default();
        if existing {
            memory.with(|inner| drop(inner.store(&Lease::default())));
        }
        let (mut a, mut b) = (candidate(&memory, "a"), candidate(&memory, "b"));
        // Both have read before either writes: every call lets the other go first.
        let (first, second) = tokio::join!(a.attempt(), b.attempt());
        assert!(matches!(first, Ok(Try::Ours)), "{first:?}");
        assert!(second.as_ref().is_err_and(is_conflict), "{second:?}");
        assert_eq!(memory.holder(), "a");
        let run = CancellationToken::new();
        let (led, after) = seconds(b.acquire(&run)).await;
        assert!(led && after >= 15, "the second led after {after} s");
    }
}

#[tokio::test(start_paused = true)]
async fn the_same_pod_started_again_leads_at_once() {
    let (memory, run) = (Memory::default(), CancellationToken::new());
    assert!(candidate(&memory, "a").acquire(&run).await);
    let (led, after) = seconds(candidate(&memory, "a").acquire(&run)).await;
    assert!(led && after == 0);
    assert_eq!(memory.spec().lease_transitions, Some(0));
}
