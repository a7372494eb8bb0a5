//! `imp daemon`: the node's engine for local VMs. Prints [`super::client::READY`] on standard output once its socket answers,
//! holds a lock so that there is one, and ends itself when there has been no VM for a while.

use super::args::{DaemonArgs, Paths};

/// Serves until there is nothing to serve.
///
/// # Errors
/// When another daemon holds the lock or the engine cannot start.
pub(super) fn main(_paths: &Paths, _args: &DaemonArgs) -> anyhow::Result<u8> {
    anyhow::bail!("waits for imp_runtime::Engine")
}
