//! Single flight: who asks for what is under way joins it. The last one who stops waiting stops the work.

use crate::error::ImageError;
use crate::store::Progress;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use std::collections::HashMap;
use std::future::Future;
use std::sync::{Mutex, PoisonError};
use tokio::sync::watch;

type Work<T> = Shared<BoxFuture<'static, Result<T, ImageError>>>;

struct Flight<T> {
    /// Weak, so that only those who wait keep the work alive.
    work: WeakShared<BoxFuture<'static, Result<T, ImageError>>>,
    progress: watch::Receiver<Progress>,
}

/// Works under way, by key.
pub(crate) struct Flights<T> {
    running: Mutex<HashMap<String, Flight<T>>>,
}

impl<T> Default for Flights<T> {
    fn default() -> Self {
        Self { running: Mutex::default() }
    }
}

impl<T> std::fmt::Debug for Flights<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flights").finish_non_exhaustive()
    }
}

impl<T: Clone + Send + Sync + 'static> Flights<T> {
    /// Waits for the work of that key, which is begun if nobody has. `progress` is told what the work tells. Also returns whether we
    /// joined somebody else's.
    ///
    /// The work runs within those who wait for it: when all of them are dropped, it is.
    pub(crate) async fn run<W, F>(
        &self,
        key: &str,
        progress: &watch::Sender<Progress>,
        begin: W,
    ) -> (Result<T, ImageError>, bool)
    where
        W: FnOnce(watch::Sender<Progress>) -> F,
        F: Future<Output = Result<T, ImageError>> + Send + 'static,
    {
        let (work, mut news, joined) = self.join(key, begin);
        let mut work = std::pin::pin!(work);
        let result = loop {
            tokio::select! {
                biased;
                result = &mut work => break result,
                Ok(()) = news.changed() => {
                    progress.send_replace(*news.borrow_and_update());
                }
            }
        };
        progress.send_replace(*news.borrow());
        (result, joined)
    }

    fn join<W, F>(&self, key: &str, begin: W) -> (Work<T>, watch::Receiver<Progress>, bool)
    where
        W: FnOnce(watch::Sender<Progress>) -> F,
        F: Future<Output = Result<T, ImageError>> + Send + 'static,
    {
        // Nothing in here can panic half-way, so a poisoned map is whole.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|_, flight| flight.work.upgrade().is_some_and(|work| work.peek().is_none()));
        if let Some(flight) = running.get(key)
            && let Some(work) = flight.work.upgrade()
        {
            return (work, flight.progress.clone(), true);
        }
        let (sender, progress) = watch::channel(Progress::default());
        let work = begin(sender).boxed().shared();
        if let Some(weak) = work.downgrade() {
            running.insert(key.to_owned(), Flight { work: weak, progress: progress.clone() });
        }
        (work, progress, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;

    struct OnDrop(Arc<Notify>);

    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.0.notify_one();
        }
    }

    #[tokio::test]
    async fn all_who_ask_share_one_work() {
        let flights = Flights::<u32>::default();
        let begun = AtomicUsize::new(0);
        let gate = Arc::new(Notify::new());
        let ask = || async {
            let (progress, _) = watch::channel(Progress::default());
            let gate = Arc::clone(&gate);
            let begin = |_| {
                begun.fetch_add(1, Ordering::Relaxed);
                async move {
                    gate.notified().await;
                    Ok(7)
                }
            };
            flights.run("a", &progress, begin).await
        };
        let release = async {
            tokio::task::yield_now().await;
            gate.notify_one();
        };
        let ((one, first), (two, second), ()) = tokio::join!(ask(), ask(), release);
        assert_eq!((one.expect("one"), two.expect("two")), (7, 7));
        assert_eq!((first, second), (false, true));
        assert_eq!(begun.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn fr53_the_last_who_leaves_stops_the_work() {
        let flights = Arc::new(Flights::<u32>::default());
        let dropped = Arc::new(Notify::new());
        let ask = || {
            let (flights, guard) = (Arc::clone(&flights), OnDrop(Arc::clone(&dropped)));
            async move {
                let (progress, _) = watch::channel(Progress::default());
                let begin = |_| async move {
                    let _guard = guard;
                    std::future::pending().await
                };
                flights.run("a", &progress, begin).await
            }
        };
        let mut first = Box::pin(ask());
        assert!(futures::poll!(&mut first).is_pending());
        drop(first);
        tokio::time::timeout(std::time::Duration::from_secs(5), dropped.notified())
            .await
            .expect("the work was stopped");
        // And the next one begins anew instead of waiting for what is gone.
        let (progress, _) = watch::channel(Progress::default());
        let (result, joined) = flights.run("a", &progress, |_| async { Ok(1) }).await;
        assert_eq!((result.expect("new work"), joined), (1, false));
    }
}
