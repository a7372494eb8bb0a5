//! The end of a process: SIGTERM or SIGINT, as a token that everything can wait for.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that the first SIGTERM or SIGINT cancels. A second signal ends the process at once, so that a person can
/// always get out.
///
/// # Errors
/// When signals cannot be handled.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if cancelled.is_cancelled() {
                tracing::warn!("{name} again: ending at once");
                std::process::exit(1);
            }
            tracing::info!("{name}: ending");
            cancelled.cancel();
        }
    });
    Ok(token)
}
