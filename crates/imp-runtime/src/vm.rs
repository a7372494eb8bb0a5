//! One VM as its driver, the server and the journal see it.

use crate::{
    console::Console,
    journal::{Attempt, Progress, Record},
    logs::LogStore,
    shared::Shared,
};
use camino::Utf8PathBuf;
use imp_core::request_queue::{self, Action, Stage, Wish};
use imp_proto::v1::{self as pb, guest_client::GuestClient};
use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::SystemTime,
};
use tokio::sync::watch;
use tonic::transport::Channel;

/// A connection to a VM's guest.
pub(crate) type Guest = GuestClient<Channel>;

/// Environment and pull secrets, in memory only.
pub(crate) struct Secrets(pub(crate) pb::VmSecrets);

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets(…)")
    }
}

/// One VM.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) uid: String,
    pub(crate) shared: Arc<Shared>,
    pub(crate) log: LogStore,
    pub(crate) console: Console,
    record: Mutex<Record>,
    /// Nothing is left, not even the record; changed under the record's lock.
    removed: AtomicBool,
    status: Mutex<pb::VmStatus>,
    wish: watch::Sender<Wish>,
    secrets: watch::Sender<Option<Arc<Secrets>>>,
    guest: watch::Sender<Option<Guest>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is replaced as a whole, so that a panic leaves nothing half-done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vm {
    pub(crate) fn new(shared: Arc<Shared>, record: Record) -> Self {
        let uid = record.uid().to_owned();
        let dir = shared.journal.dir(&uid);
        let status = record.attempt.as_ref().map(|a| a.status.clone());
        let status = status.unwrap_or_else(|| pb::VmStatus {
            vm: record.spec.vm.clone(),
            state: pb::VmState::Pending.into(),
            observed_generation: record.spec.generation,
            timings: Some(pb::Timings { accepted: Some(now()), ..Default::default() }),
            ..Default::default()
        });
        Self {
            log: LogStore::new(dir.join("log")),
            console: Console::new(dir.join("console.log")),
            wish: watch::Sender::new(record.wish()),
            secrets: watch::Sender::new(None),
            guest: watch::Sender::new(None),
            status: Mutex::new(status),
            record: Mutex::new(record),
            removed: AtomicBool::new(false),
            uid,
            shared,
        }
    }

    pub(crate) fn record(&self) -> Record {
        locked(&self.record).clone()
    }

    pub(crate) fn spec(&self) -> pb::VmSpec {
        locked(&self.record).spec.clone()
    }

    /// Changes the record: on disk first, then for everybody.
    ///
    /// # Errors
    /// When the disk refuses; nothing has changed then.
    pub(crate) fn journal(&self, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let mut record = locked(&self.record);
        if self.removed() {
            // A wish that came a moment too late must not bring the record back.
            return Err(io::Error::new(io::ErrorKind::NotFound, "the VM has been removed"));
        }
        let mut changed = record.clone();
        change(&mut changed);
        if let Some(attempt) = &mut changed.attempt {
            attempt.status = locked(&self.status).clone();
        }
        self.shared.journal.write(&changed)?;
        *record = changed;
        let wish = record.wish();
        drop(record);
        self.wish.send_if_modified(|known| std::mem::replace(known, wish) != wish);
        Ok(())
    }

    /// Removes the record with everything beside it, for good.
    ///
    /// # Errors
    /// When the disk refuses; call it again then.
    pub(crate) fn remove_record(&self) -> io::Result<()> {
        let _record = locked(&self.record);
        self.shared.journal.remove(&self.uid)?;
        self.removed.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Nothing of it is left.
    pub(crate) fn removed(&self) -> bool {
        self.removed.load(Ordering::SeqCst)
    }

    /// Moves the attempt on.
    ///
    /// # Errors
    /// When the disk refuses.
    pub(crate) fn progress(&self, progress: Progress) -> io::Result<()> {
        self.journal(|record| {
            if let Some(attempt) = &mut record.attempt {
                attempt.progress = progress;
            }
        })
    }

    /// Begins an attempt, afresh in everything but the disk.
    ///
    /// # Errors
    /// When the disk refuses.
    pub(crate) fn begin(&self, number: u32) -> io::Result<()> {
        let accepted = now();
        self.update(|status| {
            *status = pb::VmStatus {
                vm: status.vm.clone(),
                attempt: number,
                state: pb::VmState::Pending.into(),
                timings: Some(pb::Timings { accepted: Some(accepted), ..Default::default() }),
                ..Default::default()
            };
        });
        let boot_id = self.shared.boot_id.clone();
        let status = self.status();
        self.journal(|record| {
            record.attempt = Some(Attempt { number, boot_id, progress: Progress::Preparing, status });
        })
    }

    pub(crate) fn status(&self) -> pb::VmStatus {
        locked(&self.status).clone()
    }

    /// Changes the status and tells those who watch.
    pub(crate) fn update(&self, change: impl FnOnce(&mut pb::VmStatus)) {
        let generation = locked(&self.record).spec.generation;
        let mut status = locked(&self.status);
        change(&mut status);
        status.observed_generation = generation;
        self.shared.hub.publish(&self.uid, &status);
    }

    pub(crate) fn action(&self) -> Action {
        let record = locked(&self.record);
        request_queue::next(record.wish(), record.begun())
    }

    pub(crate) fn wishes(&self) -> watch::Receiver<Wish> {
        self.wish.subscribe()
    }

    /// Waits until the attempt that is under way must end.
    pub(crate) async fn must_stop(&self) {
        let mut wishes = self.wish.subscribe();
        let attempt = locked(&self.record).attempt.as_ref().map_or(0, |a| a.number);
        let stop = |wish: &Wish| request_queue::next(*wish, Some((attempt, Stage::Alive))) == Action::Stop;
        if wishes.wait_for(stop).await.is_err() {
            // The sender is part of `self` and cannot be gone.
            std::future::pending::<()>().await;
        }
    }

    /// Seconds from stop signal to SIGKILL that hold now.
    pub(crate) fn grace_seconds(&self) -> u32 {
        let record = locked(&self.record);
        let spec = record.spec.workload.as_ref().map_or(0, |w| w.termination_grace_seconds);
        record.delete.and_then(|d| d.grace_seconds).unwrap_or(spec)
    }

    pub(crate) fn put_secrets(&self, secrets: pb::VmSecrets) {
        self.secrets.send_replace(Some(Arc::new(Secrets(secrets))));
    }

    /// The secrets; waits for them where the VM cannot do without.
    pub(crate) async fn secrets(&self) -> Option<Arc<Secrets>> {
        let mut secrets = self.secrets.subscribe();
        if self.spec().needs_secrets {
            let put = secrets.wait_for(Option::is_some).await;
            return put.ok().and_then(|s| s.clone());
        }
        secrets.borrow_and_update().clone()
    }

    pub(crate) fn secret_changes(&self) -> watch::Receiver<Option<Arc<Secrets>>> {
        self.secrets.subscribe()
    }

    pub(crate) fn set_guest(&self, guest: Option<Guest>) {
        let connected = guest.is_some();
        self.guest.send_replace(guest);
        self.update(|status| status.guest.get_or_insert_default().connected = connected);
    }

    /// The guest, when it is connected.
    pub(crate) fn guest(&self) -> Option<Guest> {
        self.guest.borrow().clone()
    }

    /// The guest, once it is connected.
    pub(crate) async fn wait_guest(&self) -> Guest {
        let mut guest = self.guest.subscribe();
        let connected = guest.wait_for(Option::is_some).await.ok().and_then(|g| g.clone());
        match connected {
            Some(guest) => guest,
            // The sender is part of `self` and cannot be gone.
            None => std::future::pending().await,
        }
    }

    /// Directory of the VM's sockets: short, since a socket's path has at most 107 bytes (unix(7)).
    pub(crate) fn run_dir(&self) -> Utf8PathBuf {
        self.shared.config.run_dir.join("vms").join(&self.uid)
    }

    /// The VM's writable disk.
    pub(crate) fn disk(&self) -> Utf8PathBuf {
        self.shared.journal.dir(&self.uid).join("disk.ext4")
    }

    /// Numeric user and group of the VM's VMM.
    pub(crate) fn user(&self) -> u32 {
        self.shared.config.first_user + locked(&self.record).slot
    }
}

/// The wall clock.
pub(crate) fn now() -> prost_types::Timestamp {
    SystemTime::now().into()
}
