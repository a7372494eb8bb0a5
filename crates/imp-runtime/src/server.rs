//! The runtime's unix socket: only root and the agent's user get in.

use crate::{engine::Engine, service::RuntimeService};
use anyhow::Context as _;
use camino::{Utf8Path, Utf8PathBuf};
use futures::StreamExt as _;
use imp_proto::v1::runtime_server::RuntimeServer;
use std::{io, os::unix::fs::PermissionsExt as _, sync::Arc};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

/// Where to listen and for whom.
#[derive(Clone, Debug)]
pub struct Socket {
    /// Path of the socket; one that nobody listens on is replaced.
    pub path: Utf8PathBuf,
    /// Users beside root whose processes may connect.
    pub users: Vec<u32>,
}

/// Listens, without serving yet.
///
/// # Errors
/// When the socket cannot be made, or another process listens on it.
pub fn listen(socket: &Socket) -> anyhow::Result<UnixListener> {
    let path = &socket.path;
    let dir = path.parent().unwrap_or_else(|| Utf8Path::new("."));
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {dir}"))?;
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        anyhow::bail!("another runtime listens on {path}");
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("cannot remove {path}"));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {path}"))?;
    // Whoever connects is asked who they are (SO_PEERCRED); the mode only has to let the agent's user try.
    let mode = if socket.users.is_empty() { 0o600 } else { 0o666 };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the mode of {path}"))?;
    Ok(listener)
}

/// Serves until `shutdown`. VMs are left alone by its end.
///
/// # Errors
/// When the server fails.
pub async fn serve(
    engine: Engine,
    listener: UnixListener,
    socket: &Socket,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let users: Arc<[u32]> = socket.users.clone().into();
    let connections = UnixListenerStream::new(listener).filter_map(move |stream| {
        let users = Arc::clone(&users);
        async move {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => return Some(Err(error)),
            };
            let peer = stream.peer_cred().ok()?;
            let allowed = peer.uid() == 0 || users.contains(&peer.uid());
            if !allowed {
                tracing::warn!(
                    uid = peer.uid(),
                    pid = peer.pid(),
                    "a process that may not use the runtime was turned away"
                );
            }
            allowed.then_some(Ok(stream))
        }
    });
    let service = RuntimeServer::new(RuntimeService::new(engine));
    let served = Server::builder().add_service(service).serve_with_incoming(connections);
    tokio::select! {
        result = served => result.context("the runtime's socket failed"),
        () = shutdown.cancelled() => Ok(()),
    }
}
