//! The state of every VM, and those who watch it. A watcher may be slow: it sees the latest state, never a wrong order.

use imp_proto::v1 as pb;
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};
use tokio::sync::watch;

/// All statuses.
#[derive(Debug)]
pub(crate) struct Hub {
    statuses: Mutex<BTreeMap<String, Entry>>,
    version: watch::Sender<u64>,
}

#[derive(Clone, Debug)]
struct Entry {
    version: u64,
    status: pb::VmStatus,
}

impl Hub {
    pub(crate) fn new() -> Self {
        Self { statuses: Mutex::default(), version: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // Each change is one insertion: a panic elsewhere leaves nothing half-done here.
        self.statuses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells a status; one that says nothing new wakes nobody.
    pub(crate) fn publish(&self, uid: &str, status: &pb::VmStatus) {
        let mut statuses = self.lock();
        if let Some(entry) = statuses.get_mut(uid) {
            let news = pb::VmStatus { usage: None, ..entry.status.clone() }
                != pb::VmStatus { usage: None, ..status.clone() };
            entry.status = status.clone();
            if !news {
                return;
            }
        }
        let version = *self.version.borrow() + 1;
        statuses.insert(uid.to_owned(), Entry { version, status: status.clone() });
        self.version.send_replace(version);
    }

    /// Nothing is left of a VM.
    pub(crate) fn remove(&self, uid: &str) {
        let mut statuses = self.lock();
        if statuses.remove(uid).is_some() {
            self.version.send_modify(|version| *version += 1);
        }
    }

    pub(crate) fn watch(&self) -> Watcher {
        Watcher { seen: BTreeMap::new(), changes: self.version.subscribe(), begun: false }
    }
}

/// One who watches.
#[derive(Debug)]
pub(crate) struct Watcher {
    seen: BTreeMap<String, u64>,
    changes: watch::Receiver<u64>,
    begun: bool,
}

impl Watcher {
    /// Waits for news and returns all there are; the first answer is everything, then `synced`. `None`: the hub is gone.
    pub(crate) async fn next(&mut self, hub: &Hub) -> Option<Vec<pb::watch_vms_response::Event>> {
        use pb::watch_vms_response::Event;
        if self.begun {
            self.changes.changed().await.ok()?;
        }
        self.changes.mark_unchanged();
        let statuses = hub.lock().clone();
        let mut events = Vec::new();
        self.seen.retain(|uid, _| {
            let stays = statuses.contains_key(uid);
            if !stays {
                events.push(Event::Removed(uid.clone()));
            }
            stays
        });
        for (uid, entry) in statuses {
            if self.seen.insert(uid, entry.version) != Some(entry.version) {
                events.push(Event::Vm(entry.status));
            }
        }
        if !self.begun {
            events.push(Event::Synced(true));
            self.begun = true;
        }
        Some(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pb::watch_vms_response::Event;

    fn status(state: pb::VmState) -> pb::VmStatus {
        pb::VmStatus { state: state.into(), ..Default::default() }
    }

    #[tokio::test]
    async fn a_slow_watcher_sees_the_latest_state_and_every_removal() {
        let hub = Hub::new();
        hub.publish("a", &status(pb::VmState::Pending));
        let mut watcher = hub.watch();
        let first = watcher.next(&hub).await.unwrap();
        assert_eq!(first, [Event::Vm(status(pb::VmState::Pending)), Event::Synced(true)]);
        hub.publish("a", &status(pb::VmState::Booting));
        hub.publish("a", &status(pb::VmState::Running));
        hub.publish("b", &status(pb::VmState::Pending));
        hub.remove("b");
        assert_eq!(watcher.next(&hub).await.unwrap(), [Event::Vm(status(pb::VmState::Running))]);
        hub.publish("a", &status(pb::VmState::Running));
        hub.remove("a");
        assert_eq!(watcher.next(&hub).await.unwrap(), [Event::Removed("a".into())]);
    }

    #[tokio::test]
    async fn fr90_usage_alone_wakes_nobody() {
        let hub = Hub::new();
        hub.publish("a", &status(pb::VmState::Running));
        let mut watcher = hub.watch();
        watcher.next(&hub).await.unwrap();
        let used = pb::VmStatus { usage: Some(pb::Usage::default()), ..status(pb::VmState::Running) };
        hub.publish("a", &used);
        assert!(!watcher.changes.has_changed().unwrap());
        assert_eq!(hub.lock()["a"].status, used, "but it is there for who asks");
    }
}
