//! How host and guest begin a connection over the VM's byte channel.
//!
//! A virtio-serial port delivers bytes that the other side wrote before we listened. Both sides therefore begin with a
//! hello: the host sends a nonce, the guest answers with the same nonce, and whatever the host reads before that answer
//! is thrown away. After the hello both speak HTTP/2 (gRPC), the host as the client.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// First bytes of either side's hello; the digit is the version of the protocol.
pub const MAGIC: &[u8; 8] = b"IMPHELO1";
/// Length of the nonce in bytes.
pub const NONCE_LEN: usize = 16;
/// How much stale data a side skips before it gives up on a connection.
const MAX_STALE: usize = 4 << 20;

/// Why a connection could not begin.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// Reading or writing the channel failed.
    #[error("the guest channel failed during the hello")]
    Io(#[from] std::io::Error),
    /// The other side sent megabytes, none of them a hello.
    #[error("no hello within {MAX_STALE} bytes on the guest channel")]
    NoHello,
}

/// Host side: sends `nonce`, then skips everything up to the guest's answer to it.
///
/// # Errors
/// When the channel fails or no answer comes within 4 MiB. The caller sets the deadline.
pub async fn client_hello<T>(io: &mut T, nonce: [u8; NONCE_LEN]) -> Result<(), HelloError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut hello = [0u8; MAGIC.len() + NONCE_LEN];
    hello[..MAGIC.len()].copy_from_slice(MAGIC);
    hello[MAGIC.len()..].copy_from_slice(&nonce);
    io.write_all(&hello).await?;
    io.flush().await?;
    skip_to(io, &hello).await
}

/// Guest side: skips everything up to a hello and answers it.
///
/// # Errors
/// When the channel fails or no hello comes within 4 MiB.
pub async fn server_hello<T>(io: &mut T) -> Result<(), HelloError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    skip_to(io, MAGIC).await?;
    let mut hello = [0u8; MAGIC.len() + NONCE_LEN];
    hello[..MAGIC.len()].copy_from_slice(MAGIC);
    io.read_exact(&mut hello[MAGIC.len()..]).await?;
    io.write_all(&hello).await?;
    io.flush().await?;
    Ok(())
}

/// Reads one byte at a time, since what follows the pattern belongs to the next protocol.
async fn skip_to<T: AsyncRead + Unpin>(io: &mut T, pattern: &[u8]) -> Result<(), HelloError> {
    let mut window = Vec::with_capacity(pattern.len());
    for _ in 0..MAX_STALE {
        if window.len() == pattern.len() {
            window.remove(0);
        }
        window.push(io.read_u8().await?);
        if window == pattern {
            return Ok(());
        }
    }
    Err(HelloError::NoHello)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stale_bytes_of_an_earlier_connection_are_skipped() {
        let (mut host, mut guest) = tokio::io::duplex(4096);
        guest.write_all(b"old bytes IMPHELO1 and an old answer").await.unwrap();
        let server = tokio::spawn(async move {
            server_hello(&mut guest).await.unwrap();
            guest.write_all(b"after").await.unwrap();
            guest
        });
        client_hello(&mut host, [7; NONCE_LEN]).await.unwrap();
        let mut after = [0u8; 5];
        host.read_exact(&mut after).await.unwrap();
        assert_eq!(&after, b"after");
        server.await.unwrap();
    }

    #[tokio::test]
    async fn an_answer_to_another_nonce_is_not_believed() {
        let (mut host, mut guest) = tokio::io::duplex(4096);
        let mut old = MAGIC.to_vec();
        old.extend([1; NONCE_LEN]);
        guest.write_all(&old).await.unwrap();
        drop(guest);
        assert!(matches!(client_hello(&mut host, [2; NONCE_LEN]).await, Err(HelloError::Io(_))));
    }
}
