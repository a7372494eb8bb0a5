//! The runtime daemon of a node.

use anyhow::Context as _;
use camino::{Utf8Path, Utf8PathBuf};
use clap::Parser;
use imp_image::{RegistryHost, RegistryOptions};
use imp_runtime::{Config, Engine, http, server};
use std::{net::SocketAddr, process::ExitCode};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

mod host;

/// Owns the VMs of a node. Holds no credentials of the cluster.
#[derive(Debug, Parser)]
#[command(name = "imp-runtime", version)]
struct Args {
    /// Socket that the agent connects to
    #[arg(long, env = "IMP_RUNTIME_SOCKET", default_value = "/run/imp/runtime.sock")]
    socket: Utf8PathBuf,
    /// Users beside root that may connect: the agent's
    #[arg(long, env = "IMP_RUNTIME_USERS", value_delimiter = ',', default_value = "65531")]
    user: Vec<u32>,
    /// Journal, disks and images
    #[arg(long, env = "IMP_RUNTIME_STATE", default_value = "/var/lib/imp")]
    state_dir: Utf8PathBuf,
    /// Sockets of VMs
    #[arg(long, env = "IMP_RUNTIME_RUN", default_value = "/run/imp")]
    run_dir: Utf8PathBuf,
    /// Directory with vmlinux and initramfs.cpio
    #[arg(long, env = "IMP_BOOT_DIR", default_value = "/usr/lib/imp/boot")]
    boot_dir: Utf8PathBuf,
    /// File that says how registries are reached: mirrors, authorities (docs/registries.md); not there: nothing particular
    #[arg(long, default_value = RegistryHost::DEFAULT_FILE)]
    registries: Utf8PathBuf,
    /// Registries (HOST or HOST:PORT) that speak plain HTTP
    #[arg(long)]
    insecure_registry: Vec<String>,
    /// Name of the control group that holds the VMs'
    #[arg(long, default_value = "imp")]
    cgroup_parent: String,
    /// Seconds in which a guest must say hello after its VMM's start
    #[arg(long, default_value_t = 120)]
    hello_seconds: u64,
    /// Metrics
    #[arg(long, default_value = "0.0.0.0:8082")]
    metrics_address: SocketAddr,
    /// Health
    #[arg(long, default_value = "0.0.0.0:8083")]
    health_address: SocketAddr,
}

fn main() -> ExitCode {
    if let Some(code) = imp_image::converter::run_if_asked() {
        return code;
    }
    // Before there is a second thread: a mount namespace is entered by one thread.
    match start(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("imp-runtime: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(mut args: Args) -> anyhow::Result<()> {
    telemetry();
    // Of the container's file system, not the host's.
    let hosts = RegistryHost::read_if_there(&args.registries)?;
    let registry =
        RegistryOptions { plain_http_hosts: args.insecure_registry.clone(), hosts, ..Default::default() };
    args.boot_dir = host::enter(&args.boot_dir, &args.state_dir)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(run(args, registry));
    // Whatever is under way goes on after the next start.
    runtime.shutdown_background();
    result
}

fn telemetry() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::env::var("IMP_LOG_FORMAT").is_ok_and(|format| format == "json") {
        builder.json().init();
    } else {
        builder.init();
    }
}

async fn run(args: Args, registry: RegistryOptions) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut config = Config::new(args.state_dir, args.run_dir, Utf8Path::new(&args.boot_dir));
    config.cgroup_parent = args.cgroup_parent;
    config.hello_deadline = std::time::Duration::from_secs(args.hello_seconds);
    config.images.registry = registry;
    let socket = server::Socket { path: args.socket, users: args.user };
    let listener = server::listen(&socket)?;
    let engine = Engine::start(config).await?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), socket = %socket.path, "serving");
    tokio::select! {
        result = server::serve(engine.clone(), listener, &socket, shutdown.clone()) => result,
        result = http::serve(args.metrics_address, engine.clone()) => result,
        result = http::serve(args.health_address, engine) => result,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}
