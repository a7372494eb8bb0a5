//! Command line.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use camino::Utf8PathBuf;
use clap::{Args, Parser, Subcommand};
use imp_testkit::services::{self, Service};
use imp_testkit::{boot, node_init, relay};

use crate::bench::Bench;
use crate::test::Suite;
use crate::{bench, crds, fuzz, images, programs, test, up};

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
    /// Run every check and every suite of tests, or one suite.
    Test {
        /// The suite to run alone.
        suite: Option<Suite>,
    },
    /// Measure, and write the figures to target/bench.
    Bench {
        #[command(subcommand)]
        bench: Bench,
    },
    /// Feed parsers of strangers' bytes with inputs that a coverage-guided fuzzer invents.
    Fuzz(fuzz::Options),
    /// Write the CustomResourceDefinitions of charts/imp-crds anew from crates/imp-api.
    Crds {
        /// Only say whether they differ.
        #[arg(long)]
        check: bool,
    },
    /// Make the guest's kernel and initramfs, and print where they are.
    Kernel,
    /// Build the container images as OCI archives, and print where they are.
    Images,
    /// A stage on the way to PID 1 of a node; run by `up`.
    #[command(hide = true)]
    NodeInit {
        #[arg(long)]
        stage: node_init::Stage,
        config: Utf8PathBuf,
    },
    /// Keeps the services in a file running; run by `up`.
    #[command(hide = true)]
    Keep { services: Utf8PathBuf },
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
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Up(args) => up::up(&args),
        Command::Down => up::down(),
        Command::Test { suite } => test::run(suite),
        Command::Bench { bench } => bench::run(&bench),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Crds { check: true } => crds::check(),
        Command::Crds { check: false } => crds::write(),
        Command::Kernel => kernel(),
        Command::Images => build_images(),
        Command::NodeInit { stage, config } => run_node_init(stage, &config),
        Command::Keep { services } => keep(&services),
        Command::Relay { listen, netns, target } => relay::run(listen, &netns, target),
    }
}

fn kernel() -> Result<()> {
    let boot = boot::ensure(&programs::build()?.path("imp-guest"))?;
    println!("{}\n{}", boot.kernel, boot.initrd);
    Ok(())
}

fn build_images() -> Result<()> {
    let programs = programs::build()?;
    let boot = boot::ensure(&programs.path("imp-guest"))?;
    let images = images::build(&programs, &boot)?;
    for archive in images.node.iter().chain([&images.busybox]) {
        println!("{archive}");
    }
    Ok(())
}

fn keep(file: &Utf8PathBuf) -> Result<()> {
    let bytes = std::fs::read(file).with_context(|| format!("read {file}"))?;
    let services: Vec<Service> =
        serde_json::from_slice(&bytes).with_context(|| format!("{file} is no list of services"))?;
    services::run(&services)
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
