//! QEMU's `microvm` machine, with hardware virtualisation or by software emulation.

mod command;
mod instance;
mod qmp;
mod tsc;

use crate::{Accelerator, Capabilities, Instance, LaunchConfig, ProcessRecord, Vmm, VmmError, process, sys};
use async_trait::async_trait;
use camino::{Utf8Path, Utf8PathBuf};
use instance::QemuInstance;
use rustix::process::Resource;
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

/// Name of the driver in records and statuses.
pub const DRIVER: &str = "qemu";
/// Program, looked for on PATH.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// QEMU greets as soon as its machine is made; a loaded host may take seconds.
const GREETING_DEADLINE: Duration = Duration::from_secs(30);
/// Open files of one QEMU: its disks, sockets and threads' own need far fewer.
const OPEN_FILES: u64 = 1024;

/// The driver.
#[derive(Debug)]
pub struct Qemu {
    program: Utf8PathBuf,
    capabilities: Capabilities,
}

impl Qemu {
    /// Asks the program for its version.
    ///
    /// # Errors
    /// When it is not there or does not run.
    pub fn new(program: &Utf8Path) -> Result<Self, VmmError> {
        let output = Command::new(program)
            .arg("--version")
            .output()
            .map_err(io_error(format!("cannot run {program} (Debian's package is qemu-system-x86)")))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.split_ascii_whitespace().nth(3).unwrap_or("unknown").to_owned();
        Ok(Self {
            program: program.to_owned(),
            capabilities: Capabilities {
                driver: DRIVER,
                version,
                max_vcpus: 64,
                pause: true,
                snapshot: false,
                balloon: false,
            },
        })
    }

    fn record(
        &self,
        pid: i32,
        uid: &str,
        accelerator: Accelerator,
    ) -> Result<Option<ProcessRecord>, VmmError> {
        let (Some(start_time), Some(exe)) = (process::start_time(pid), process::executable(pid)) else {
            return Ok(None);
        };
        Ok(Some(ProcessRecord {
            driver: DRIVER.to_owned(),
            version: self.capabilities.version.clone(),
            accelerator,
            boot_id: process::boot_id()?,
            pid,
            start_time,
            exe,
            uid: uid.to_owned(),
        }))
    }

    /// Everything that is opened before the fork, and the process itself.
    fn start(&self, config: &LaunchConfig) -> Result<(i32, Arc<process::Process>), VmmError> {
        let mut files = Vec::new();
        let mut hand = |file: OwnedFd| -> i32 {
            let number = sys::number(file.as_fd());
            files.push(file);
            number
        };
        let handed = command::Handed {
            qmp: hand(listen(&config.run_dir.join(command::QMP_SOCKET))?),
            guest: hand(listen(&config.run_dir.join(command::GUEST_SOCKET))?),
            console: hand(listen(&config.run_dir.join(command::CONSOLE_SOCKET))?),
            kernel: hand(open(&config.kernel, true)?),
            initrd: hand(open(&config.initrd, true)?),
            drives: config
                .drives
                .iter()
                .map(|drive| Ok((hand(open(&drive.path, drive.read_only)?), drive.read_only)))
                .collect::<Result<_, VmmError>>()?,
            nic: match &config.nic {
                None => None,
                Some(nic) => {
                    let tap = sys::open_tap(&nic.tap).map_err(io_error(format!(
                        "cannot open tap {} (is another process using it?)",
                        nic.tap
                    )))?;
                    Some((hand(tap), nic.mac.clone()))
                }
            },
        };
        let cgroups = config
            .cgroup
            .iter()
            .map(|dir| {
                let path = dir.join("cgroup.procs");
                let file = File::options().write(true).open(&path);
                Ok(file.map_err(io_error(format!("cannot open {path}")))?.into())
            })
            .collect::<Result<_, VmmError>>()?;
        let marker_path = config.run_dir.join(crate::LAUNCH_MARKER);
        let marker =
            File::create(&marker_path).map_err(io_error(format!("cannot make {marker_path}")))?.into();
        let log_path = config.run_dir.join(command::LOG_FILE);
        let log = File::create(&log_path).map_err(io_error(format!("cannot make {log_path}")))?;
        let again = log.try_clone().map_err(io_error(format!("cannot open {log_path} twice")))?;
        let mut command = Command::new(&self.program);
        command.args(command::arguments(config, &handed)).env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(again).stderr(log);
        let setup = sys::ChildSetup {
            cgroups,
            ids: config.ids,
            // The group that may open /dev/kvm on most distributions has another number on each; root opens what is
            // needed, except for this one device.
            groups: kvm_group(config.accelerator),
            files,
            marker,
            limits: vec![(Resource::Core, 0), (Resource::Nofile, OPEN_FILES)],
        };
        let mut child =
            sys::spawn(&mut command, setup).map_err(io_error(format!("cannot start {}", self.program)))?;
        watch(&child).inspect_err(|_| {
            // What cannot be watched must not run; the wait reaps it.
            let _ = child.kill().and_then(|()| child.wait());
        })
    }
}

/// The process as a handle. The child has not been waited for, so that its PID is still its own.
fn watch(child: &std::process::Child) -> Result<(i32, Arc<process::Process>), VmmError> {
    let pid = rustix::process::Pid::from_child(child);
    let number = pid.as_raw_nonzero().get();
    let fd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())
        .map_err(|e| io_error(format!("cannot open process {number}"))(e.into()))?;
    let process = process::Process::new(fd).map_err(io_error(format!("cannot watch process {number}")))?;
    Ok((number, Arc::new(process)))
}

#[async_trait]
impl Vmm for Qemu {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn launch(&self, config: &LaunchConfig) -> Result<Arc<dyn Instance>, VmmError> {
        check(config)?;
        if let Some(pid) = process::find(&config.uid, "qemu-system")? {
            return Err(VmmError::Refused {
                command: "launch".to_owned(),
                message: format!("process {pid} already runs VM {}", config.uid),
            });
        }
        if config.accelerator == Accelerator::Tcg {
            // Measured once, before a guest needs it. A failure shows in the guest's clock, not here.
            let _ = tokio::task::spawn_blocking(tsc::khz).await;
        }
        let (pid, process) = self.start(config)?;
        // Nothing of a launch that fails, or is given up, stays behind.
        let guard = KillGuard(Some(Arc::clone(&process)));
        let greeted = tokio::time::timeout(GREETING_DEADLINE, qmp::connect(&config.run_dir)).await;
        let greeted =
            greeted.map_err(|_| timeout("its greeting", GREETING_DEADLINE)).and_then(|g| g.map(drop));
        let record = self.record(pid, &config.uid, config.accelerator)?;
        if let (Ok(()), Some(record)) = (&greeted, record) {
            guard.keep();
            return Ok(Arc::new(QemuInstance::new(record, config.run_dir.clone(), process)));
        }
        drop(guard);
        let exit = process.wait().await;
        if let Err(error @ VmmError::Timeout { .. }) = greeted {
            return Err(error);
        }
        let log = config.run_dir.join(command::LOG_FILE);
        let mut output = crate::console_log::tail(&log, 5).join(" | ");
        if output.is_empty() {
            output = format!("{exit:?}, without a word");
        }
        Err(VmmError::Died { program: self.program.to_string(), output })
    }

    async fn adopt(
        &self,
        record: &ProcessRecord,
        run_dir: &Utf8Path,
    ) -> Result<Option<Arc<dyn Instance>>, VmmError> {
        let Some(fd) = process::open(record)? else { return Ok(None) };
        let process =
            process::Process::new(fd).map_err(io_error(format!("cannot watch process {}", record.pid)))?;
        Ok(Some(Arc::new(QemuInstance::new(record.clone(), run_dir.to_owned(), Arc::new(process)))))
    }

    async fn find(&self, uid: &str) -> Result<Option<ProcessRecord>, VmmError> {
        let Some(pid) = process::find(uid, "qemu-system")? else { return Ok(None) };
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let kvm = line.split(|b| *b == 0).any(|argument| argument == b"kvm");
        self.record(pid, uid, if kvm { Accelerator::Kvm } else { Accelerator::Tcg })
    }
}

/// Kills the process unless it is to be kept.
struct KillGuard(Option<Arc<process::Process>>);

impl KillGuard {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for KillGuard {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            // It may be gone already, which is as well.
            let _ = process.kill();
        }
    }
}

/// What goes into option strings must not end an option or begin another.
fn check(config: &LaunchConfig) -> Result<(), VmmError> {
    let word = |text: &str, more: &str| {
        !text.is_empty()
            && text.len() <= 64
            && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
    };
    let refuse = |what: &str, text: &str| {
        Err(VmmError::Refused {
            command: "launch".to_owned(),
            message: format!("{what} {text:?} makes no sense"),
        })
    };
    if !word(&config.uid, "-") {
        return refuse("the UID", &config.uid);
    }
    match &config.nic {
        Some(nic) if !word(&nic.mac, ":") => refuse("the MAC", &nic.mac),
        Some(nic) if !word(&nic.tap, "-_.") => refuse("the tap", &nic.tap),
        _ => Ok(()),
    }
}

/// The group that may open /dev/kvm (it has another number on each distribution), where there is one.
fn kvm_group(accelerator: Accelerator) -> Vec<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(device) = std::fs::metadata("/dev/kvm") else { return Vec::new() };
    let opens_it = accelerator == Accelerator::Kvm && device.gid() != 0 && device.mode() & 0o060 == 0o060;
    if opens_it { vec![device.gid()] } else { Vec::new() }
}

fn io_error(doing: String) -> impl FnOnce(io::Error) -> VmmError {
    move |source| VmmError::Io { doing, source }
}

fn timeout(command: &str, after: Duration) -> VmmError {
    VmmError::Timeout { command: command.to_owned(), seconds: after.as_secs() }
}

fn open(path: &Utf8Path, read_only: bool) -> Result<OwnedFd, VmmError> {
    let file = File::options().read(true).write(!read_only).open(path);
    Ok(file.map_err(io_error(format!("cannot open {path}")))?.into())
}

/// A listening socket that QEMU gets, so that connecting to it can never be too early.
fn listen(path: &Utf8Path) -> Result<OwnedFd, VmmError> {
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(io_error(format!("cannot remove the old {path}"))(e)),
    }
    Ok(UnixListener::bind(path).map_err(io_error(format!("cannot listen on {path}")))?.into())
}
