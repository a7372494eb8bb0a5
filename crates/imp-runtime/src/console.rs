//! A VM's serial console: one connection to the VMM, a bounded log, any number of people who look on and type.

use bytes::Bytes;
use camino::{Utf8Path, Utf8PathBuf};
use imp_vmm::{Instance, console_log::ConsoleLog};
use std::sync::Arc;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::{Mutex, broadcast, mpsc},
};

/// Pieces that a slow viewer may be behind before it misses some; the guest is not held back by one who looks on.
const BEHIND: usize = 256;

/// The console of one VM.
#[derive(Debug)]
pub(crate) struct Console {
    path: Utf8PathBuf,
    output: broadcast::Sender<Bytes>,
    input: mpsc::Sender<Bytes>,
    typed: Mutex<mpsc::Receiver<Bytes>>,
}

impl Console {
    pub(crate) fn new(path: Utf8PathBuf) -> Self {
        let (input, typed) = mpsc::channel(16);
        Self { path, output: broadcast::Sender::new(BEHIND), input, typed: Mutex::new(typed) }
    }

    pub(crate) fn path(&self) -> &Utf8Path {
        &self.path
    }

    /// What the console says from now on, and where to type.
    pub(crate) fn join(&self) -> (broadcast::Receiver<Bytes>, mpsc::Sender<Bytes>) {
        (self.output.subscribe(), self.input.clone())
    }

    /// Carries bytes until the VMM is gone. One at a time.
    pub(crate) async fn pump(&self, instance: &Arc<dyn Instance>) {
        let mut typed = self.typed.lock().await;
        let stream = match instance.connect_console().await {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(%error, "the console cannot be read"),
        };
        let mut log = match ConsoleLog::open(&self.path) {
            Ok(log) => log,
            Err(error) => {
                return tracing::warn!(path = %self.path, %error, "the console's log cannot be opened");
            }
        };
        let (mut read, mut write) = tokio::io::split(stream);
        let mut buffer = vec![0; 16 << 10];
        loop {
            tokio::select! {
                n = read.read(&mut buffer) => match n {
                    Ok(n) if n > 0 => {
                        if let Err(error) = log.append(&buffer[..n]) {
                            tracing::warn!(path = %self.path, %error, "the console's log cannot be written");
                        }
                        // Nobody looking on is no error.
                        let _ = self.output.send(Bytes::copy_from_slice(&buffer[..n]));
                    }
                    _ => return,
                },
                Some(bytes) = typed.recv() => {
                    if write.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}
