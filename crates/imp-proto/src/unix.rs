//! gRPC over the runtime's unix socket.

use hyper_util::rt::TokioIo;
use std::{path::Path, time::Duration};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// A socket of this machine that takes no connection in this time belongs to nobody who is alive.
const CONNECT: Duration = Duration::from_secs(5);

/// Opens a channel to the socket. The channel connects by itself again when it is used after a break.
///
/// # Errors
/// When nobody listens there.
pub async fn connect(socket: impl AsRef<Path>) -> Result<Channel, tonic::transport::Error> {
    let path = socket.as_ref().to_owned();
    // The URI only fills HTTP/2's :authority.
    Endpoint::from_static("http://runtime.imp")
        .connect_timeout(CONNECT)
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
}
