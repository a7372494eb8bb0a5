//! How host and guest begin a connection over the VM's byte channel.
//!
//! A virtio-serial port delivers bytes that the other side wrote before we listened. Both sides therefore begin with a
//! hello: the host sends a nonce, the guest answers with the same nonce, and whatever the host reads before that answer
//! is thrown away. The host repeats its hello until it is answered: a guest that opens its port anew, because it saw the
//! last connection's end late, loses what was queued. After the hello both speak HTTP/2 (gRPC), the host as the client.

use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// First bytes of either side's hello; the digit is the version of the protocol.
pub const MAGIC: &[u8; 8] = b"IMPHELO1";
/// Length of the nonce in bytes.
pub const NONCE_LEN: usize = 16;
/// Length of a hello in bytes.
pub const HELLO_LEN: usize = MAGIC.len() + NONCE_LEN;
/// First and longest time after which an unanswered hello is repeated.
const REPEAT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(16));
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

/// A side's hello.
#[must_use]
pub fn hello(nonce: [u8; NONCE_LEN]) -> [u8; HELLO_LEN] {
    let mut hello = [0u8; HELLO_LEN];
    hello[..MAGIC.len()].copy_from_slice(MAGIC);
    hello[MAGIC.len()..].copy_from_slice(&nonce);
    hello
}

/// Host side: sends `nonce`, again and again, and skips everything up to the guest's answer to it.
///
/// # Errors
/// When the channel fails or no answer comes within 4 MiB. The caller sets the deadline.
pub async fn client_hello<T>(io: &mut T, nonce: [u8; NONCE_LEN]) -> Result<(), HelloError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let hello = hello(nonce);
    let mut skip = Skip::to(&hello);
    let mut pause = REPEAT.0;
    loop {
        io.write_all(&hello).await?;
        io.flush().await?;
        if let Ok(result) = tokio::time::timeout(pause, skip.run(io)).await {
            return result;
        }
        pause = (pause * 2).min(REPEAT.1);
    }
}

/// Guest side: skips everything up to a hello, answers it and returns its nonce. More hellos of the same nonce may follow.
///
/// # Errors
/// When the channel fails or no hello comes within 4 MiB.
pub async fn server_hello<T>(io: &mut T) -> Result<[u8; NONCE_LEN], HelloError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    Skip::to(MAGIC).run(io).await?;
    let mut nonce = [0u8; NONCE_LEN];
    io.read_exact(&mut nonce).await?;
    io.write_all(&hello(nonce)).await?;
    io.flush().await?;
    Ok(nonce)
}

/// A search for a pattern in a stream, which may be interrupted and go on.
struct Skip<'a> {
    pattern: &'a [u8],
    window: Vec<u8>,
    skipped: usize,
}

impl<'a> Skip<'a> {
    fn to(pattern: &'a [u8]) -> Self {
        Self { pattern, window: Vec::with_capacity(pattern.len()), skipped: 0 }
    }

    /// Reads one byte at a time, since what follows the pattern belongs to the next protocol. Dropped at its only await, it has
    /// lost nothing.
    async fn run<T: AsyncRead + Unpin>(&mut self, io: &mut T) -> Result<(), HelloError> {
        while self.skipped < MAX_STALE {
            if self.window.len() == self.pattern.len() {
                self.window.remove(0);
            }
            let byte = io.read_u8().await?;
            self.window.push(byte);
            self.skipped += 1;
            if self.window == self.pattern {
                return Ok(());
            }
        }
        Err(HelloError::NoHello)
    }
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

    #[tokio::test(start_paused = true)]
    async fn a_hello_that_was_lost_is_said_again() {
        let (mut host, mut guest) = tokio::io::duplex(4096);
        let server = tokio::spawn(async move {
            // Queued before the port was opened anew, and so discarded; the next one comes.
            let mut lost = [0u8; HELLO_LEN];
            guest.read_exact(&mut lost).await.unwrap();
            server_hello(&mut guest).await.unwrap()
        });
        client_hello(&mut host, [9; NONCE_LEN]).await.unwrap();
        assert_eq!(server.await.unwrap(), [9; NONCE_LEN]);
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
