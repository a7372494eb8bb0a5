//! `imp-operator`: see the library.

use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser as _;
use imp_operator::metrics::Metrics;
use imp_operator::{client, runtime};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Fails only when a provider is installed already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = runtime::Config::parse();
    imp_kube::telemetry::init();
    let shutdown = imp_kube::shutdown::on_signal().context("signals cannot be handled")?;
    let metrics = Arc::new(Metrics::default());
    let client = client::infer(metrics.clone()).await?;
    runtime::run(config, client, metrics, shutdown).await
}
