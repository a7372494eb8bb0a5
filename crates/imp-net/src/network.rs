//! The networks of a node: the order of the steps, and their undoing.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use crate::{Attached, Attachment, NetError};

/// How a node's networks are run.
#[derive(Clone, Debug)]
pub struct NetworkOptions {
    /// Program that loads nftables rules: a name that is looked up in `PATH`, or a path.
    pub nft: String,
    /// The longest that one step (a change of a link, a load of the rules, the wait for a held tap) may take.
    pub step_timeout: Duration,
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self { nft: "nft".to_owned(), step_timeout: Duration::from_secs(10) }
    }
}

/// The networks of a node: the one in which the calling thread is (its network namespace).
///
/// Clones share one lock, under which every operation runs. One process of a node may use this at a time.
#[derive(Clone, Debug)]
pub struct Network {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: NetworkOptions,
    lock: Mutex<()>,
}

impl Network {
    /// Changes nothing yet; [`Network::reconcile`] is due at start.
    #[must_use]
    pub fn new(options: NetworkOptions) -> Self {
        Self { inner: Arc::new(Inner { options, lock: Mutex::new(()) }) }
    }

    /// Makes a VM's place in its network: rules, bridge, tap.
    ///
    /// `all` is every attachment that should exist, this one included, oldest first: the rules are rebuilt from it.
    ///
    /// # Errors
    /// [`NetError`].
    pub async fn attach(&self, attachment: &Attachment, all: &[Attachment]) -> Result<Attached, NetError> {
        let _serial = self.inner.lock.lock().await;
        let _ = (attachment, all, &self.inner.options);
        Err(NetError::io("attach", std::io::ErrorKind::Unsupported))
    }

    /// Removes a VM's place in its network.
    ///
    /// # Errors
    /// [`NetError`].
    pub async fn detach(
        &self,
        vm_uid: &str,
        network: &str,
        remaining: &[Attachment],
    ) -> Result<(), NetError> {
        let _serial = self.inner.lock.lock().await;
        let _ = (vm_uid, network, remaining);
        Err(NetError::io("detach", std::io::ErrorKind::Unsupported))
    }

    /// Makes rules and devices agree with `all`.
    ///
    /// # Errors
    /// [`NetError`].
    pub async fn reconcile(&self, all: &[Attachment]) -> Result<(), NetError> {
        let _serial = self.inner.lock.lock().await;
        let _ = all;
        Err(NetError::io("reconcile", std::io::ErrorKind::Unsupported))
    }
}
