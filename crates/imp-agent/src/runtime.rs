//! The connection to the node's runtime.

use std::path::{Path, PathBuf};
use std::time::Duration;

use imp_proto::unix::connect;
use imp_proto::v1::runtime_client::RuntimeClient;
use imp_proto::v1::watch_vms_response::Event;
use imp_proto::v1::{NodeInfoRequest, NodeInfoResponse, VmStatus, WatchVmsRequest};
use tokio::sync::{mpsc, watch};
use tonic::transport::Channel;

/// A client of the runtime.
pub type Client = RuntimeClient<Channel>;

/// Longest pause between two attempts to connect.
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Messages between the watch and the controller; more and the runtime waits.
const QUEUE: usize = 256;

/// What a connection to the runtime tells.
#[derive(Debug)]
pub enum RuntimeEvent {
    /// A connection stands; its number, from 1. What earlier connections told is void.
    Connected(u64, Client, Box<NodeInfoResponse>),
    /// State of a VM.
    Vm(Box<VmStatus>),
    /// Nothing is left of the VM with this UID.
    Removed(String),
    /// Every VM of the runtime has been told.
    Synced,
    /// The connection ended.
    Disconnected,
}

/// Keeps a watch on the runtime for as long as `events` is listened to. The end of a connection is told by the stream's
/// end, at once; only a runtime that is away is tried again and again.
pub async fn follow(
    socket: PathBuf,
    events: mpsc::Sender<RuntimeEvent>,
    current: watch::Sender<Option<Client>>,
) {
    let mut epoch = 0;
    let mut backoff = Duration::from_millis(50);
    loop {
        match session(&socket, epoch + 1, &events, &current).await {
            Ok(()) => return,
            Err(error) => {
                if current.send_replace(None).is_some() {
                    epoch += 1;
                    backoff = Duration::from_millis(50);
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "the connection to the runtime ended"
                    );
                    if events.send(RuntimeEvent::Disconnected).await.is_err() {
                        return;
                    }
                } else {
                    tracing::debug!(error = &error as &dyn std::error::Error, socket = %socket.display(), "the runtime cannot be reached");
                }
            }
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("cannot connect to the runtime's socket")]
    Connect(#[from] tonic::transport::Error),
    #[error("the runtime refused a call")]
    Call(#[from] tonic::Status),
    #[error("the runtime ended the watch")]
    Ended,
}

/// One connection, until it breaks. `Ok`: nobody listens any more.
async fn session(
    socket: &Path,
    epoch: u64,
    events: &mpsc::Sender<RuntimeEvent>,
    current: &watch::Sender<Option<Client>>,
) -> Result<(), SessionError> {
    let mut client = Client::new(connect(socket).await?);
    let info = client.node_info(NodeInfoRequest {}).await?.into_inner();
    let mut watch = client.watch_vms(WatchVmsRequest {}).await?.into_inner();
    current.send_replace(Some(client.clone()));
    tracing::info!(version = info.runtime_version, "connected to the runtime");
    if events.send(RuntimeEvent::Connected(epoch, client, Box::new(info))).await.is_err() {
        return Ok(());
    }
    while let Some(message) = watch.message().await? {
        let event = match message.event {
            Some(Event::Vm(status)) => RuntimeEvent::Vm(Box::new(status)),
            Some(Event::Removed(uid)) => RuntimeEvent::Removed(uid),
            Some(Event::Synced(true)) => RuntimeEvent::Synced,
            Some(Event::Synced(false)) | None => continue,
        };
        if events.send(event).await.is_err() {
            return Ok(());
        }
    }
    Err(SessionError::Ended)
}

/// A queue of the right length for [`follow`].
#[must_use]
pub fn queue() -> (mpsc::Sender<RuntimeEvent>, mpsc::Receiver<RuntimeEvent>) {
    mpsc::channel(QUEUE)
}
