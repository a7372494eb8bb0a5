//! `imp daemon`: the node's engine for local VMs. Prints [`super::client::READY`] on standard output once its socket answers,
//! holds the state directory's lock so that there is one, and ends itself when there has been no VM for a while.

use super::{
    args::{DaemonArgs, Paths},
    client,
};
use anyhow::Context as _;
use camino::Utf8PathBuf;
use imp_image::RegistryHost;
use imp_runtime::{Config, Engine, server};
use std::{io::Write as _, time::Duration};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Where packages put kernel and initramfs.
const INSTALLED: &str = "/usr/lib/imp/boot";
/// Control group of local VMs: another than a node's, so that neither takes the other's for its own.
const CGROUP: &str = "imp-local";

/// Serves until there is nothing to serve.
///
/// # Errors
/// When another daemon holds the lock or the engine cannot start.
pub(super) fn main(paths: &Paths, args: &DaemonArgs) -> anyhow::Result<u8> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let boot_dir = boot_dir(paths)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.block_on(serve(paths, &boot_dir, Duration::from_secs(args.idle_seconds)))?;
    runtime.shutdown_background();
    Ok(0)
}

async fn serve(paths: &Paths, boot_dir: &Utf8PathBuf, quiet: Duration) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut config = Config::new(paths.state_dir.clone(), paths.run_dir.clone(), boot_dir);
    config.cgroup_parent = CGROUP.to_owned();
    config.images.registry.hosts = RegistryHost::read_if_there(RegistryHost::DEFAULT_FILE.into())?;
    // Users of local VMs are others than a node's.
    config.first_user += 1 << 16;
    let socket = server::Socket { path: paths.run_dir.join("runtime.sock"), users: Vec::new() };
    let listener = server::listen(&socket)?;
    let engine = Engine::start(config).await?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{}", client::READY).and_then(|()| stdout.flush()).context("nobody waits for us")?;
    tokio::select! {
        result = server::serve(engine.clone(), listener, &socket, CancellationToken::new()) => result,
        () = engine.idle(quiet) => {
            // Gone first: who comes now starts another.
            std::fs::remove_file(&socket.path).with_context(|| format!("cannot remove {}", socket.path))
        }
        _ = terminate.recv() => Ok(()),
    }
}

/// The directory with the guest's kernel: named, installed, or the newest that the project built.
fn boot_dir(paths: &Paths) -> anyhow::Result<Utf8PathBuf> {
    let complete = |dir: &Utf8PathBuf| dir.join("vmlinux").exists() && dir.join("initramfs.cpio").exists();
    if let Some(dir) = &paths.boot_dir {
        anyhow::ensure!(
            complete(dir),
            "{dir} has no vmlinux and initramfs.cpio: make them with `cargo xtask kernel`"
        );
        return Ok(dir.clone());
    }
    let installed = Utf8PathBuf::from(INSTALLED);
    if complete(&installed) {
        return Ok(installed);
    }
    let cache = std::env::var("IMP_CACHE_DIR").map(Utf8PathBuf::from);
    let cache =
        cache.or_else(|_| std::env::var("HOME").map(|home| Utf8PathBuf::from(home).join(".cache/imp")));
    let built = cache.ok().and_then(|cache| {
        let dirs = cache.join("boot").read_dir_utf8().ok()?;
        let dirs = dirs.filter_map(|entry| Some(entry.ok()?.into_path())).filter(complete);
        dirs.max_by_key(|dir| dir.join("initramfs.cpio").metadata().and_then(|m| m.modified()).ok())
    });
    built.with_context(|| {
        format!("there is no guest kernel in {INSTALLED}: make one with `cargo xtask kernel`, or name its directory with --boot-dir")
    })
}
