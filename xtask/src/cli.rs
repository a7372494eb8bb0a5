//! Command line.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use camino::Utf8PathBuf;
use clap::{Args, Parser, Subcommand};
use imp_testkit::{node_init, relay};

use crate::up;

/// The project's own commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a Kubernetes cluster on this machine with Imp and a first VM in it.
    Up(UpArgs),
    /// Stop what `up` started, and leave nothing behind.
    Down,
    /// A stage on the way to PID 1 of a node; run by `up`.
    #[command(hide = true)]
    NodeInit {
        #[arg(long)]
        stage: node_init::Stage,
        config: Utf8PathBuf,
    },
    /// A TCP relay into a network namespace; run by `up`.
    #[command(hide = true)]
    Relay { listen: SocketAddr, netns: Utf8PathBuf, target: SocketAddr },
}

/// Options of `up`.
#[derive(Args, Clone, Debug)]
pub(crate) struct UpArgs {
    /// The same programs as plain processes under etcd and kube-apiserver alone: quicker, no kubelet, no pods.
    #[arg(long)]
    pub(crate) light: bool,
    /// How many nodes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
    pub(crate) nodes: u8,
    /// Leave it running and return.
    #[arg(long)]
    pub(crate) detach: bool,
}

/// Runs the command line; an error goes to standard error with its causes.
pub(crate) fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Up(args) => up::up(&args).map(|()| ExitCode::SUCCESS),
        Command::Down => up::down().map(|()| ExitCode::SUCCESS),
        Command::NodeInit { stage, config } => run_node_init(stage, &config).map(|()| ExitCode::SUCCESS),
        Command::Relay { listen, netns, target } => {
            relay::run(listen, &netns, target).map(|()| ExitCode::SUCCESS)
        }
    }
}

fn run_node_init(stage: node_init::Stage, file: &Utf8PathBuf) -> Result<()> {
    let bytes = std::fs::read(file).with_context(|| format!("read {file}"))?;
    let config =
        serde_json::from_slice(&bytes).with_context(|| format!("{file} is no node configuration"))?;
    let program = std::env::current_exe().context("find this program")?;
    let program = program.to_string_lossy().into_owned();
    node_init::run(&config, stage, &|next| {
        vec![program.clone(), "node-init".into(), format!("--stage={next}"), file.to_string()]
    })
}
