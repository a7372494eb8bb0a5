//! `imp-agent`: see the library.

use anyhow::Context as _;
use clap::Parser as _;
use imp_agent::config::Config;
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    // Fails only when a provider is installed already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = Config::parse();
    imp_agent::log();
    let client = imp_agent::client(config.kubeconfig.as_deref()).await?;
    let mut terminate = signal(SignalKind::terminate()).context("signals cannot be handled")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("signals cannot be handled")?;
    tokio::select! {
        result = imp_agent::run(config, client) => result,
        // VMs are the runtime's: there is nothing to end in order.
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}
