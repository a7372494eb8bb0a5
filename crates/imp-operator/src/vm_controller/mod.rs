//! The life of ImpVMs.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Acts on ImpVMs until `shutdown`.
///
/// # Errors
/// When it cannot go on.
pub async fn run(
    _client: kube::Client,
    _metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    tracing::warn!("this build has no controller of ImpVMs: nothing is bound to nodes");
    shutdown.cancelled().await;
    Ok(())
}
