//! All VMs of a node: takes wishes, keeps one driver task for each VM, and at start takes up what an earlier process left.

use crate::{
    config::Config,
    driver,
    hub::Watcher,
    journal::{self, Deletion, Journal, Loaded, Record},
    shared::Shared,
    vm::Vm,
};
use imp_core::request_queue::{self, Denied};
use imp_image::ImageStore;
use imp_killpoint::runtime as killpoint;
use imp_proto::v1 as pb;
use imp_vmm::{cgroup::Cgroup, process, qemu::Qemu};
use std::{
    collections::BTreeMap,
    fs::File,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Images that nobody used for so long are removed when a VM goes.
const IMAGE_UNUSED: Duration = Duration::from_secs(7 * 24 * 3600);

/// Why the engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A file or directory of ours.
    #[error("{doing}")]
    Io {
        /// What we were doing, with the path.
        doing: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Another engine has the state directory.
    #[error("another runtime is using {0}: one at a time")]
    Locked(camino::Utf8PathBuf),
    /// Kernel or initramfs.
    #[error("{0} is not there: make it with `cargo xtask kernel`, or name its directory with --boot-dir")]
    NoBootFile(camino::Utf8PathBuf),
    /// The VMM.
    #[error(transparent)]
    Vmm(#[from] imp_vmm::VmmError),
    /// The image store.
    #[error(transparent)]
    Images(#[from] imp_image::ImageError),
}

/// Why a wish is refused.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// The specification makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// Older than what is known, or the VM is being deleted.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// The record cannot be written.
    #[error("cannot write the VM's record: {0}")]
    Disk(#[source] io::Error),
    /// There is a record that cannot be read; the VM may run.
    #[error("{0}")]
    Unreadable(#[from] journal::Unreadable),
}

/// The VMs of a node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    vms: Mutex<BTreeMap<String, Arc<Vm>>>,
    /// Held while a wish is taken, so that a VM that two callers put is made once.
    taking: Mutex<()>,
    /// Locked as long as the engine lives.
    _lock: File,
}

impl Engine {
    /// Opens the state directory, takes up every VM in it, and removes what belongs to none.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let io = |doing: String| move |source| StartError::Io { doing, source };
        for file in [&config.kernel, &config.initrd] {
            if !file.exists() {
                return Err(StartError::NoBootFile(file.clone()));
            }
        }
        for dir in [&config.state_dir, &config.run_dir] {
            std::fs::create_dir_all(dir).map_err(io(format!("cannot make {dir}")))?;
        }
        let lock = config.state_dir.join("lock");
        let file = File::create(&lock).map_err(io(format!("cannot make {lock}")))?;
        file.try_lock().map_err(|_| StartError::Locked(config.state_dir.clone()))?;
        let journal = Journal::open(&config.state_dir).map_err(io("cannot open the journal".to_owned()))?;
        let images = ImageStore::open_with(&config.state_dir.join("images"), config.images.clone())?;
        let vmm = Box::new(Qemu::new(&config.qemu)?);
        let loaded = journal.load().map_err(io("cannot read the journal".to_owned()))?;
        let shared = Arc::new(Shared::new(config, journal, images, vmm, process::boot_id()?));
        let inner = Inner { shared, vms: Mutex::default(), taking: Mutex::default(), _lock: file };
        let engine = Self { inner: Arc::new(inner) };
        engine.clean(&loaded).await;
        for record in loaded.records {
            tracing::info!(uid = record.uid(), "taken up from the journal");
            engine.adopt(record);
        }
        // Found out while nobody waits for it yet.
        let shared = Arc::clone(&engine.inner.shared);
        tokio::spawn(async move {
            let kvm = shared.kvm().await;
            tracing::info!(usable = kvm.usable, reason = kvm.reason, "hardware virtualisation");
        });
        Ok(engine)
    }

    /// Removes control groups, devices and rules that belong to no record. Everything is journaled before it is made, so
    /// that what has no record is nobody's. What has a record that cannot be read is somebody's.
    async fn clean(&self, loaded: &Loaded) {
        let shared = &self.inner.shared;
        let mut attachments = Vec::new();
        for record in &loaded.records {
            if let Some(attachment) = &record.attachment {
                attachments = shared.with_attachment(attachment);
            }
        }
        if !loaded.unreadable.is_empty() {
            tracing::warn!(
                "networks are not cleaned: which devices and rules the unreadable records need is unknown"
            );
        } else if let Err(error) = shared.network.reconcile(&attachments).await {
            tracing::error!(%error, "the networks could not be put in order");
        }
        let nobodys = |uid: &str| {
            loaded.records.iter().all(|r| r.uid() != uid)
                && loaded.unreadable.iter().all(|known| known != uid)
        };
        let groups = Cgroup::list(&shared.config.cgroup_parent).unwrap_or_default();
        for uid in groups.into_iter().filter(|uid| nobodys(uid)) {
            tracing::warn!(uid, "a control group of no VM: it is removed with all that is in it");
            let removed = async { Cgroup::of(&shared.config.cgroup_parent, &uid)?.remove().await };
            if let Err(error) = removed.await {
                tracing::error!(uid, %error, "it could not be removed");
            }
        }
        let Ok(dirs) = shared.config.run_dir.join("vms").read_dir_utf8() else { return };
        for dir in dirs.filter_map(Result::ok).map(camino::Utf8DirEntry::into_path) {
            if dir.file_name().is_some_and(nobodys)
                && let Err(error) = std::fs::remove_dir_all(&dir)
            {
                tracing::error!(%dir, %error, "a directory of no VM could not be removed");
            }
        }
    }

    fn vms(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Vm>>> {
        self.inner.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn adopt(&self, record: Record) -> Arc<Vm> {
        let vm = Arc::new(Vm::new(Arc::clone(&self.inner.shared), record));
        self.vms().insert(vm.uid.clone(), Arc::clone(&vm));
        self.run(Arc::clone(&vm));
        vm
    }

    fn run(&self, vm: Arc<Vm>) {
        let engine = self.clone();
        vm.update(|_| {});
        tokio::spawn(async move {
            // A panic in one VM's driver is that VM's: the driver goes on from the journal, as after a crash.
            while let Err(error) = tokio::spawn(driver::drive(Arc::clone(&vm))).await {
                tracing::error!(uid = vm.uid, %error, "the driver failed; it begins again from the journal");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            engine.forget(&vm.uid).await;
        });
    }

    async fn forget(&self, uid: &str) {
        self.vms().remove(uid);
        self.inner.shared.hub.remove(uid);
        if let Err(error) = self.inner.shared.images.collect(IMAGE_UNUSED).await {
            tracing::warn!(%error, "unused images could not be collected");
        }
    }

    /// Takes a wish for a VM and returns its status once the wish is on disk.
    ///
    /// # Errors
    /// See [`PutError`].
    pub fn put(&self, spec: pb::VmSpec, secrets: Option<pb::VmSecrets>) -> Result<pb::VmStatus, PutError> {
        journal::check(&spec).map_err(PutError::Invalid)?;
        let uid = spec.vm.as_ref().map(|vm| vm.uid.clone()).unwrap_or_default();
        let _taking = self.inner.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let vm = self.vms().get(&uid).cloned();
        let vm = match vm {
            Some(vm) => {
                let record = vm.record();
                let wanted = Record::new(spec.clone(), 0).wish();
                request_queue::admit(record.wish(), wanted)?;
                if record.spec != spec {
                    vm.journal(|record| record.spec = spec).map_err(PutError::Disk)?;
                    vm.update(|_| {});
                }
                if let Some(secrets) = secrets {
                    vm.put_secrets(secrets);
                }
                vm
            }
            None => {
                self.inner.shared.journal.refuse_unreadable(&uid)?;
                let record = Record::new(spec, self.free_slot());
                self.inner.shared.journal.write(&record).map_err(PutError::Disk)?;
                let vm = Arc::new(Vm::new(Arc::clone(&self.inner.shared), record));
                if let Some(secrets) = secrets {
                    vm.put_secrets(secrets);
                }
                self.vms().insert(uid, Arc::clone(&vm));
                self.run(Arc::clone(&vm));
                vm
            }
        };
        killpoint("wish-journaled");
        Ok(vm.status())
    }

    /// The lowest slot that no record has: reconstructed from the records at each start (fr76).
    fn free_slot(&self) -> u32 {
        let used: std::collections::BTreeSet<u32> = self.vms().values().map(|vm| vm.record().slot).collect();
        (0..).find(|slot| !used.contains(slot)).unwrap_or_default()
    }

    /// Wants a VM gone. Returns whether it is.
    ///
    /// # Errors
    /// When the wish cannot be written, or the VM's record cannot be read.
    pub fn delete(&self, uid: &str, grace_seconds: Option<u32>) -> io::Result<bool> {
        let Some(vm) = self.vms().get(uid).cloned() else {
            self.inner.shared.journal.refuse_unreadable(uid).map_err(io::Error::other)?;
            return Ok(true);
        };
        let journaled = vm.journal(|record| {
            // A shorter grace counts, also while the longer one runs out.
            let known = record.delete.and_then(|d| d.grace_seconds);
            let grace_seconds = match (known, grace_seconds) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => b.or(a),
            };
            record.delete = Some(Deletion { grace_seconds });
        });
        if vm.removed() {
            return Ok(true);
        }
        journaled?;
        killpoint("delete-journaled");
        Ok(false)
    }

    pub(crate) fn vm(&self, uid: &str) -> Option<Arc<Vm>> {
        self.vms().get(uid).cloned()
    }

    /// Specification and status of every VM.
    #[must_use]
    pub fn list(&self) -> Vec<(pb::VmSpec, pb::VmStatus)> {
        self.vms().values().map(|vm| (vm.spec(), vm.status())).collect()
    }

    pub(crate) fn watch(&self) -> Watcher {
        self.inner.shared.hub.watch()
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    /// Waits until there has been no VM for `quiet`.
    pub async fn idle(&self, quiet: Duration) {
        let mut watcher = self.watch();
        loop {
            let empty = self.vms().is_empty();
            let change = watcher.next(&self.inner.shared.hub);
            if empty {
                // The first answer is what is there already.
                if tokio::time::timeout(quiet, change).await.is_err() && self.vms().is_empty() {
                    return;
                }
            } else if change.await.is_none() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use imp_core::request_queue::Wish;

    #[test]
    fn a_put_is_the_wish_of_its_specification() {
        let spec = pb::VmSpec { generation: 4, attempt: 2, run_state: 2, ..Default::default() };
        let wish = Record::new(spec, 0).wish();
        assert_eq!(wish, Wish { generation: 4, attempt: 2, run: false, delete: false });
    }
}
