//! What all VMs of an engine share.

use crate::{config::Config, hub::Hub, journal::Journal};
use imp_image::ImageStore;
use imp_net::{Attachment, Network};
use imp_vmm::{Accelerator, Vmm, kvm::KvmProbe};
use std::sync::{Mutex, PoisonError};
use tokio::sync::OnceCell;

/// Shared by the engine and its drivers.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) journal: Journal,
    pub(crate) hub: Hub,
    pub(crate) images: ImageStore,
    pub(crate) network: Network,
    pub(crate) vmm: Box<dyn Vmm>,
    pub(crate) boot_id: String,
    kvm: OnceCell<KvmProbe>,
    attachments: Mutex<Vec<Attachment>>,
}

impl Shared {
    pub(crate) fn new(
        config: Config,
        journal: Journal,
        images: ImageStore,
        vmm: Box<dyn Vmm>,
        boot_id: String,
    ) -> Self {
        let network = Network::new(config.network.clone());
        Self {
            config,
            journal,
            hub: Hub::new(),
            images,
            network,
            vmm,
            boot_id,
            kvm: OnceCell::new(),
            attachments: Mutex::default(),
        }
    }

    /// Whether hardware virtualisation truly works; found out once.
    pub(crate) async fn kvm(&self) -> &KvmProbe {
        self.kvm.get_or_init(|| self.probe_kvm()).await
    }

    async fn probe_kvm(&self) -> KvmProbe {
        let scratch = self.config.run_dir.join("kvm-trial");
        let no = |reason: String| KvmProbe { usable: false, reason };
        if let Err(e) = std::fs::create_dir_all(&scratch) {
            return no(format!("the trial could not be made: cannot make {scratch}: {e}"));
        }
        let config = &self.config;
        let state = config.state_dir.join("kvm.json");
        let ids = (config.first_user, config.first_user);
        let probe =
            imp_vmm::kvm::probe(self.vmm.as_ref(), &config.kernel, &config.initrd, &scratch, &state, ids)
                .await;
        // What is left there is a few dead sockets; the next trial replaces them.
        let _ = std::fs::remove_dir_all(&scratch);
        probe.unwrap_or_else(|e| no(e.to_string()))
    }

    pub(crate) async fn accelerator(&self) -> Accelerator {
        if self.kvm().await.usable { Accelerator::Kvm } else { Accelerator::Tcg }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Attachment>> {
        self.attachments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every attachment that should exist, oldest first, with this one among them.
    pub(crate) fn with_attachment(&self, attachment: &Attachment) -> Vec<Attachment> {
        let mut all = self.lock();
        match all.iter_mut().find(|a| a.vm == attachment.vm) {
            Some(known) => known.clone_from(attachment),
            None => all.push(attachment.clone()),
        }
        all.clone()
    }

    /// Every attachment that should exist, with none of this VM.
    pub(crate) fn without_attachment(&self, uid: &str) -> Vec<Attachment> {
        let mut all = self.lock();
        all.retain(|a| a.vm != uid);
        all.clone()
    }
}
