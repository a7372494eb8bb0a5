//! Virtual machine monitors behind one small trait.
//!
//! A VMM is a process that outlives whoever started it: own session, own cgroup, own unprivileged user. [`Vmm::launch`]
//! starts one, [`Vmm::adopt`] takes an old one up again by what [`ProcessRecord`] remembers, [`Vmm::find`] looks for one
//! whose start was journaled but whose record was never written.

pub mod cgroup;
pub mod console_log;
pub mod kvm;
pub mod process;
pub mod qemu;
mod sys;

use async_trait::async_trait;
use camino::{Utf8Path, Utf8PathBuf};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};

/// File in the run directory that is not empty once a VMM's program was about to run: an attempt whose process is not to
/// be found either never ran (empty) or ran and is over.
pub const LAUNCH_MARKER: &str = "launched";

/// A byte stream to the guest or its console.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
/// A boxed [`Stream`].
pub type BoxStream = Box<dyn Stream>;

/// Executes guest instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// Hardware virtualisation.
    Kvm,
    /// QEMU's software emulation.
    Tcg,
}

/// What a driver can do; *validate* checks it so that nothing fails with "not supported" later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// "qemu".
    pub driver: &'static str,
    /// As the program reports it.
    pub version: String,
    /// Most vCPUs of one VM.
    pub max_vcpus: u32,
    /// pause and resume.
    pub pause: bool,
    /// snapshot and restore.
    pub snapshot: bool,
    /// The memory balloon.
    pub balloon: bool,
}

/// A block device, in the order in which the guest sees them (vda, vdb, …).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// A raw file.
    pub path: Utf8PathBuf,
    /// Opened read-only, and may then be shared by any number of VMs.
    pub read_only: bool,
}

/// A network device: one persistent tap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// Name of the tap in the current network namespace.
    pub tap: String,
    /// Colon-separated hexadecimal.
    pub mac: String,
}

/// Everything a driver needs to start a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// UID of the VM: the marker by which the process is recognised.
    pub uid: String,
    /// Directory for sockets and logs of this VM; exists, and is short enough for socket paths (108 bytes).
    pub run_dir: Utf8PathBuf,
    /// Linux kernel image.
    pub kernel: Utf8PathBuf,
    /// Initial RAM disk whose /init is `imp-guest`.
    pub initrd: Utf8PathBuf,
    /// Number of virtual CPUs, at least 1.
    pub vcpus: u32,
    /// Guest memory in MiB.
    pub memory_mib: u64,
    /// Block devices in guest order.
    pub drives: Vec<Drive>,
    /// The network device, if any.
    pub nic: Option<Nic>,
    /// How guest instructions run.
    pub accelerator: Accelerator,
    /// Numeric user and group that the process runs as.
    pub ids: (u32, u32),
    /// Directories of the VM's cgroup (one for each hierarchy) that the process joins before it runs.
    pub cgroup: Vec<Utf8PathBuf>,
}

/// What identifies a VMM process across restarts of ours and of the host. A PID alone never does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Driver name.
    pub driver: String,
    /// Version of the program.
    pub version: String,
    /// How guest instructions run.
    pub accelerator: Accelerator,
    /// /proc/sys/kernel/random/boot_id when it was started.
    pub boot_id: String,
    /// Process id.
    pub pid: i32,
    /// Field 22 of /proc/PID/stat, in clock ticks since boot (proc(5)).
    pub start_time: u64,
    /// Target of /proc/PID/exe.
    pub exe: String,
    /// UID of the VM, which stands in the command line.
    pub uid: String,
}

/// How a VMM process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmExit {
    /// Exit code, where it is known (we were the parent).
    pub code: Option<i32>,
    /// Signal that ended it, where it is known.
    pub signal: Option<i32>,
}

/// A driver.
#[async_trait]
pub trait Vmm: Send + Sync + std::fmt::Debug {
    /// What this driver can do.
    fn capabilities(&self) -> &Capabilities;
    /// Starts the VM; the guest boots at once.
    ///
    /// # Errors
    /// When the process cannot be started or ends before it answers; nothing is left behind then.
    async fn launch(&self, config: &LaunchConfig) -> Result<Arc<dyn Instance>, VmmError>;
    /// Takes up a running process again. `None` when that process is gone (or the PID is somebody else's).
    ///
    /// # Errors
    /// When the process lives but cannot be controlled.
    async fn adopt(
        &self,
        record: &ProcessRecord,
        run_dir: &Utf8Path,
    ) -> Result<Option<Arc<dyn Instance>>, VmmError>;
    /// Looks for a process of the VM whose record was never written.
    ///
    /// # Errors
    /// When /proc cannot be read.
    async fn find(&self, uid: &str) -> Result<Option<ProcessRecord>, VmmError>;
}

/// A running VMM.
#[async_trait]
pub trait Instance: Send + Sync + std::fmt::Debug {
    /// To be journaled.
    fn record(&self) -> &ProcessRecord;
    /// Waits (on a pidfd) until the process is gone. May be called any number of times.
    async fn wait(&self) -> VmmExit;
    /// Opens the guest's channel. At most one connection at a time: another one waits until the first is closed.
    ///
    /// # Errors
    /// When the socket does not answer.
    async fn connect_guest(&self) -> Result<BoxStream, VmmError>;
    /// Opens the serial console. At most one connection at a time.
    ///
    /// # Errors
    /// When the socket does not answer.
    async fn connect_console(&self) -> Result<BoxStream, VmmError>;
    /// Stops the vCPUs.
    ///
    /// # Errors
    /// When the VMM refuses.
    async fn pause(&self) -> Result<(), VmmError>;
    /// Lets the vCPUs run again.
    ///
    /// # Errors
    /// When the VMM refuses.
    async fn resume(&self) -> Result<(), VmmError>;
    /// SIGKILL, through the pidfd. Returns at once; [`Self::wait`] says when it is gone.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    fn kill(&self) -> Result<(), VmmError>;
}

/// What went wrong with a VMM.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// A file, socket or system call failed.
    #[error("{doing}")]
    Io {
        /// What we were doing, with the path.
        doing: String,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// The process ended before it was ready.
    #[error("{program} ended while starting: {output}")]
    Died {
        /// Program name.
        program: String,
        /// Last lines of its standard error.
        output: String,
    },
    /// The VMM answered with an error.
    #[error("the VMM refused {command}: {message}")]
    Refused {
        /// The command.
        command: String,
        /// Its answer.
        message: String,
    },
    /// The VMM did not answer in time.
    #[error("the VMM did not answer {command} within {seconds} s")]
    Timeout {
        /// The command.
        command: String,
        /// The deadline.
        seconds: u64,
    },
}
