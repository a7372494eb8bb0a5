//! Keeps the CA and this replica's own certificates current, in memory.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::{Stream, StreamExt as _};
use imp_api::names;
use k8s_openapi::api::core::v1::Secret;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use rustls::RootCertStore;
use tokio::sync::watch;

use crate::ca::{Authority, CaError, LEAF_LIFE, Purpose, Store};
use crate::subresources::authn::RequestHeader;
use crate::subresources::node::NodeTls;
use crate::subresources::server::{self, ServerTls};

/// Shortest and longest pause after a failure.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Why this replica has no certificates.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// The CA is missing or signs nothing.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// TLS cannot be set up with them.
    #[error("TLS cannot be set up with certificates of Imp's CA")]
    Tls(#[from] rustls::Error),
}

/// The CA and what this replica shows of it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Certificates {
    authority: watch::Sender<Option<Arc<Authority>>>,
    /// For the TLS server of aggregated API and node API.
    pub server: ServerTls,
    /// For connections to agents.
    pub nodes: NodeTls,
}

impl Default for Certificates {
    fn default() -> Self {
        Self { authority: watch::Sender::new(None), server: ServerTls::default(), nodes: NodeTls::default() }
    }
}

/// The names of the operator's Service in `namespace`: what its serving certificate is valid for.
#[must_use]
pub fn service_names(namespace: &str) -> Vec<String> {
    let name = names::OPERATOR_NAME;
    vec![
        name.to_owned(),
        format!("{name}.{namespace}"),
        format!("{name}.{namespace}.svc"),
        format!("{name}.{namespace}.svc.cluster.local"),
    ]
}

impl Certificates {
    /// The CA, as it changes; `None` until it was read.
    #[must_use]
    pub fn authority(&self) -> watch::Receiver<Option<Arc<Authority>>> {
        self.authority.subscribe()
    }

    /// Whether there are certificates.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.server.load().is_some() && self.nodes.load().is_some()
    }

    /// Follows Secret `namespace`/imp-ca, which is made when there is none, and renews certificates at two thirds of
    /// their life; for good.
    pub async fn keep(self, client: Client, namespace: String, front: RequestHeader) {
        let store = Store::new(client.clone(), &namespace);
        let config = watcher::Config::default().fields(&format!("metadata.name={}", names::CA_NAME));
        let secrets = watcher(Api::<Secret>::namespaced(client, &namespace), config).default_backoff();
        let mut secrets = std::pin::pin!(secrets);
        let (mut pause, mut renewal) = (RETRY.0, None);
        loop {
            let due = match self.refresh(&store, &namespace, &front, &mut renewal).await {
                Ok(at) => {
                    pause = RETRY.0;
                    at
                }
                Err(error) => {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "there are no new certificates; trying again"
                    );
                    let at = SystemTime::now() + pause;
                    pause = (pause * 2).min(RETRY.1);
                    at
                }
            };
            tokio::select! {
                () = sleep_until(due) => {}
                () = changed(&mut secrets) => {}
            }
        }
    }

    /// Takes the CA of the Secret and renews what is due or of another CA. Gives the time of the next renewal.
    async fn refresh(
        &self,
        store: &Store,
        namespace: &str,
        front: &RequestHeader,
        renewal: &mut Option<SystemTime>,
    ) -> Result<SystemTime, CertificatesError> {
        let known = self.authority.borrow().clone();
        let found = store.load_or_create(known.as_deref()).await?;
        let same = known.filter(|known| known.certificate() == found.certificate());
        let now = SystemTime::now();
        if let (Some(_), Some(at)) = (&same, *renewal)
            && at > now
        {
            return Ok(at);
        }
        let serving = found.issue(names::OPERATOR_NAME, &service_names(namespace), Purpose::Server)?;
        let server = server::config(front.clone(), serving.chain, serving.key)?;
        let nodes = client_config(&found)?;
        self.server.store(Some(Arc::new(server)));
        self.nodes.store(Some(Arc::new(nodes)));
        if same.is_none() {
            self.authority.send_replace(Some(Arc::new(found)));
        }
        tracing::info!(hours = LEAF_LIFE.as_secs() / 3600, "issued this replica's certificates");
        Ok(*renewal.insert(now + LEAF_LIFE * 2 / 3))
    }
}

/// How the operator proves itself to agents.
fn client_config(authority: &Authority) -> Result<rustls::ClientConfig, CertificatesError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.certificate().clone())?;
    let identity = authority.issue(names::OPERATOR_NAME, &[], Purpose::Client)?;
    let mut config = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_client_auth_cert(identity.chain, identity.key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// Waits until the Secret is or may be another.
async fn changed(secrets: &mut (impl Stream<Item = watcher::Result<watcher::Event<Secret>>> + Unpin)) {
    loop {
        match secrets.next().await {
            Some(Ok(watcher::Event::Init | watcher::Event::InitApply(_))) => {}
            Some(Ok(_)) => return,
            Some(Err(error)) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the watch on Secret imp-ca broke; it is begun again"
            ),
            // A watcher never ends; if it did, the renewals go on.
            None => std::future::pending().await,
        }
    }
}

/// Sleeps by the wall clock in short steps: certificates expire while a machine is suspended, its timers don't.
async fn sleep_until(time: SystemTime) {
    while let Ok(left) = time.duration_since(SystemTime::now()) {
        tokio::time::sleep(left.min(Duration::from_secs(300))).await;
    }
}
