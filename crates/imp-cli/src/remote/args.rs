//! The command line of `kubectl imp`, in kubectl's words.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

/// Into the virtual machines of a cluster.
#[derive(Debug, Parser)]
#[command(name = "kubectl imp", bin_name = "kubectl imp", version, propagate_version = true)]
pub(super) struct Cli {
    #[command(flatten)]
    pub(super) flags: Flags,
    #[command(subcommand)]
    pub(super) command: Command,
}

/// Which cluster, and as whom.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct Flags {
    /// Namespace of the VM [default: the context's]
    #[arg(short, long, global = true)]
    pub(super) namespace: Option<String>,
    /// Context of the kubeconfig [default: its current one]
    #[arg(long, global = true)]
    pub(super) context: Option<String>,
    /// Cluster of the kubeconfig [default: the context's]
    #[arg(long, global = true)]
    pub(super) cluster: Option<String>,
    /// Kubeconfig file [default: $KUBECONFIG, else ~/.kube/config]
    #[arg(long, global = true)]
    pub(super) kubeconfig: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run a command in a VM
    Exec(ExecArgs),
    /// Show the output of a VM's workload
    Logs(LogsArgs),
    /// Connect to a VM's serial console; Ctrl-] ends it
    Console(ConsoleArgs),
}

#[derive(Debug, Args)]
pub(super) struct ExecArgs {
    /// Pass standard input on
    #[arg(short = 'i', long)]
    pub(super) stdin: bool,
    /// Run the command on a terminal
    #[arg(short, long)]
    pub(super) tty: bool,
    /// User in the VM: name, uid, or uid:gid [default: the workload's]
    #[arg(short, long)]
    pub(super) user: Option<String>,
    /// Working directory in the VM [default: the workload's]
    #[arg(short, long)]
    pub(super) workdir: Option<String>,
    /// Name of the VM
    pub(super) name: String,
    /// Command and arguments, after --
    #[arg(last = true, required = true)]
    pub(super) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct LogsArgs {
    /// Go on with what comes
    #[arg(short, long)]
    pub(super) follow: bool,
    /// Only the last so many lines
    #[arg(long, value_name = "LINES")]
    pub(super) tail: Option<u64>,
    /// Only lines younger than this, e.g. 90s, 5m, 2h
    #[arg(long, value_parser = duration, conflicts_with = "since_time")]
    pub(super) since: Option<Duration>,
    /// Only lines since this time, e.g. 2026-01-31T12:00:00Z
    #[arg(long)]
    pub(super) since_time: Option<String>,
    /// Show the time of each line
    #[arg(long)]
    pub(super) timestamps: bool,
    /// Stop after so many bytes
    #[arg(long)]
    pub(super) limit_bytes: Option<u64>,
    /// Name of the VM
    pub(super) name: String,
}

#[derive(Debug, Args)]
pub(super) struct ConsoleArgs {
    /// Name of the VM
    pub(super) name: String,
}

fn duration(text: &str) -> Result<Duration, String> {
    imp_api::DurationString::from(text).parse().map_err(|error| error.to_string())
}
