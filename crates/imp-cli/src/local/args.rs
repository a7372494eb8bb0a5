//! The command line of `imp`, in docker's words where docker has them.

use camino::Utf8PathBuf;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// A virtual machine from an OCI image, in one command.
#[derive(Debug, Parser)]
#[command(name = "imp", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) paths: Paths,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Where the local runtime keeps its things.
#[derive(Clone, Debug, Args)]
pub(crate) struct Paths {
    /// Disks, images and logs of local VMs
    #[arg(long, env = "IMP_LOCAL_STATE", default_value = "/var/lib/imp-local", global = true, hide = true)]
    pub(crate) state_dir: Utf8PathBuf,
    /// Sockets of local VMs
    #[arg(long, env = "IMP_LOCAL_RUN", default_value = "/run/imp-local", global = true, hide = true)]
    pub(crate) run_dir: Utf8PathBuf,
    /// Directory with vmlinux and initramfs.cpio [default: /usr/lib/imp/boot, else the newest that `cargo xtask kernel` made]
    #[arg(long, env = "IMP_BOOT_DIR", global = true)]
    pub(crate) boot_dir: Option<Utf8PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a VM from an image and run its workload
    Run(Box<RunArgs>),
    /// List VMs
    Ps(PsArgs),
    /// Show the workload's output
    Logs(LogsArgs),
    /// Run a command in a VM
    Exec(ExecArgs),
    /// Stop VMs: the image's stop signal, then after a grace period the end
    Stop(StopArgs),
    /// Remove VMs and their disks
    Rm(RmArgs),
    /// List images
    Images,
    /// The local runtime; started on demand
    #[command(hide = true)]
    Daemon(DaemonArgs),
}

/// When to ask the registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pull {
    Always,
    #[default]
    Missing,
    Never,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Keep standard input open
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the workload a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Print the VM's name and return
    #[arg(short, long, conflicts_with_all = ["interactive", "rm"])]
    pub(crate) detach: bool,
    /// Remove the VM when the workload has ended
    #[arg(long)]
    pub(crate) rm: bool,
    /// Name of the VM [default: made up]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Environment: NAME=VALUE, or NAME to take the value from here
    #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// File of environment lines
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Vec<Utf8PathBuf>,
    /// User (and group) of the workload: name or id
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Working directory of the workload
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Program to run instead of the image's entry point
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,
    /// Memory of the VM: bytes, or with k, m, g
    #[arg(short, long, value_name = "SIZE", default_value = "512m", value_parser = super::spec::parse_memory_mib)]
    pub(crate) memory: u64,
    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) cpus: u32,
    /// Writable disk of the VM, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub(crate) disk: u64,
    /// Lead a port of this machine to one of the VM
    #[arg(short, long, value_name = "[IP:]HOST:GUEST[/udp]", value_parser = super::spec::parse_port)]
    pub(crate) publish: Vec<imp_proto::v1::PortForward>,
    /// When to ask the registry
    #[arg(long, value_enum, default_value_t)]
    pub(crate) pull: Pull,
    /// Seconds from the stop signal to the end
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub(crate) stop_timeout: u32,
    /// Registry reference, `oci:DIR[:TAG]`, `oci-archive:FILE` or `docker-archive:FILE`
    pub(crate) image: String,
    /// Arguments of the workload, in place of the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Also those that have ended
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Only names
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Go on until the workload ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only so many lines from the end
    #[arg(long, value_name = "LINES")]
    pub(crate) tail: Option<u64>,
    /// Begin each line with its time
    #[arg(short, long)]
    pub(crate) timestamps: bool,
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Keep standard input open
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Environment: NAME=VALUE, or NAME to take the value from here
    #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// User (and group) of the command
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Working directory of the command
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    pub(crate) name: String,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Seconds from the stop signal to the end [default: the VM's own]
    #[arg(short, long)]
    pub(crate) time: Option<u32>,
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Also while it runs
    #[arg(short, long)]
    pub(crate) force: bool,
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    /// End after so many seconds without a VM
    #[arg(long, default_value_t = 60)]
    pub(crate) idle_seconds: u64,
}
