//! `imp` on one machine: docker's verbs over a local runtime, without a cluster.

mod args;
mod client;
mod daemon;
mod images;
mod logs;
mod network;
mod ps;
mod run;
mod spec;
mod stop;
mod streams;

use anyhow::Context as _;
use args::{Cli, Command};
use clap::Parser as _;

/// Runs the command line of `imp`; the result is the process's exit code.
///
/// # Errors
/// When the command cannot be carried out; a workload's own failure is an exit code, not an error.
pub(crate) fn main(arguments: Vec<String>) -> anyhow::Result<u8> {
    let cli = Cli::parse_from(arguments);
    // The daemon enters namespaces and forks VMMs; it makes its own async runtime when it is ready to.
    if let Command::Daemon(daemon) = &cli.command {
        return daemon::main(&cli.paths, daemon);
    }
    anyhow::ensure!(
        rustix::process::geteuid().is_root(),
        "this needs root: VMs on this machine need taps, cgroups and users of their own; run it with sudo"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let code = runtime.block_on(dispatch(cli));
    // A read of the terminal may still block; it must not hold up the exit.
    runtime.shutdown_background();
    code
}

async fn dispatch(cli: Cli) -> anyhow::Result<u8> {
    let paths = &cli.paths;
    match cli.command {
        Command::Run(args) => run::run(paths, args).await,
        Command::Ps(args) => ps::ps(paths, &args).await,
        Command::Logs(args) => logs::logs(paths, &args).await,
        Command::Exec(args) => streams::exec(paths, args).await,
        Command::Stop(args) => stop::stop(paths, &args).await,
        Command::Rm(args) => stop::rm(paths, &args).await,
        Command::Images => images::images(paths).await,
        Command::Daemon(_) => anyhow::bail!("the daemon is started before any async runtime"),
    }
}
