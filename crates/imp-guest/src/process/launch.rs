//! From a description to a running process of the workload's root.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::Context as _;
use imp_proto::v1::{ExitStatus, TerminalSize};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::process::{Resource, Rlimit};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcsetwinsize};

use super::cgroup::Cgroup;
use super::environment::Environment;
use super::reaper::{Child, Reaper};
use super::user::User;
use crate::boot::root::Root;
use crate::sys;

/// Open files: plenty for servers, few enough for programs that close every possible descriptor.
const OPEN_FILES: Rlimit = Rlimit { current: Some(65_536), maximum: Some(1_048_576) };

/// What to run.
pub(crate) struct Program {
    pub(crate) argv: Vec<String>,
    pub(crate) environment: Environment,
    pub(crate) user: User,
    pub(crate) working_dir: String,
    pub(crate) streams: Streams,
}

/// Which standard streams a process gets.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Streams {
    /// A terminal of that size.
    Terminal(Option<TerminalSize>),
    /// Pipes; the standard input only where wanted, else it is empty.
    Pipes { stdin: bool },
}

/// Our ends of a process's standard streams.
#[derive(Debug)]
pub(crate) enum Ends {
    Terminal(OwnedFd),
    Pipes { stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: OwnedFd },
}

/// Why a program could not be started.
#[derive(Debug)]
pub(crate) struct LaunchError {
    /// 127: not found, 126: found and not executable, as shells say; 125: the preparation failed, as docker says.
    pub(crate) code: i32,
    pub(crate) message: String,
}

impl LaunchError {
    /// As the exit of a command that could not be run.
    pub(crate) fn into_status(self) -> ExitStatus {
        ExitStatus { code: self.code, signal: 0, oom_killed: false, message: self.message }
    }
}

impl From<anyhow::Error> for LaunchError {
    fn from(error: anyhow::Error) -> Self {
        Self { code: 125, message: format!("{error:#}") }
    }
}

/// Starts programs in the workload's root.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) root: Root,
    pub(crate) cgroup: Cgroup,
    pub(crate) reaper: Arc<Reaper>,
}

impl Launcher {
    /// Starts `program`; returns when its exec succeeded. Blocks.
    ///
    /// # Errors
    /// Why it could not be started, in words for people.
    pub(crate) fn start(&self, program: Program) -> Result<(Child, Ends), LaunchError> {
        let Some(name) = program.argv.first().filter(|n| !n.is_empty()) else {
            return Err(LaunchError {
                code: 127,
                message: "there is no program to run: the image has neither ENTRYPOINT nor CMD and the VM no command"
                    .to_owned(),
            });
        };
        let working_dir = root_path(&program.working_dir);
        let mut command = Command::new(name);
        command.args(&program.argv[1..]).env_clear().envs(&program.environment);
        let ends = self.streams(&mut command, &program)?;
        let stage = self.prepare(&mut command, &program, &working_dir)?;
        let child = self.reaper.spawn(&mut command);
        // The command holds the child's ends of the pipes.
        drop(command);
        match child {
            Ok(child) => Ok((child, ends)),
            Err(e) => Err(explain(&e, Stage::last(&stage), name, &program, &working_dir)),
        }
    }

    /// Makes the working directory where it is missing. Blocks.
    ///
    /// # Errors
    /// When it can't be made.
    pub(crate) fn make_working_dir(&self, program: &Program) -> anyhow::Result<()> {
        let dir = root_path(&program.working_dir);
        let wanted = dir.clone();
        self.root
            .inside(move || match fs::metadata(&wanted) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    DirBuilder::new().recursive(true).mode(0o755).create(&wanted)
                }
                // Anything else shows when the process enters it.
                _ => Ok(()),
            })?
            .with_context(|| format!("make the working directory {}", dir.display()))
    }

    fn streams(&self, command: &mut Command, program: &Program) -> anyhow::Result<Ends> {
        let owner = (Some(Uid::from_raw(program.user.uid)), None);
        match program.streams {
            Streams::Terminal(size) => {
                let master = self.root.inside(|| {
                    rustix::fs::open(
                        "/dev/pts/ptmx",
                        OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
                        Mode::empty(),
                    )
                })?;
                let master = master.context("open a terminal")?;
                rustix::pty::unlockpt(&master).context("unlock the terminal")?;
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
                let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)
                    .context("open the terminal's other side")?;
                rustix::fs::fchown(&slave, owner.0, owner.1).context("give the terminal to its user")?;
                if let Some(size) = size {
                    set_size(&master, size).context("set the terminal's size")?;
                }
                command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
                Ok(Ends::Terminal(master))
            }
            Streams::Pipes { stdin } => {
                // Owned by the user, so that /dev/stdout can be opened by it.
                let pipe = || -> anyhow::Result<(OwnedFd, OwnedFd)> {
                    let (read, write) =
                        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).context("make a pipe")?;
                    rustix::fs::fchown(&write, owner.0, owner.1).context("give a pipe to its user")?;
                    Ok((read, write))
                };
                let stdin = if stdin {
                    let (read, write) = pipe()?;
                    command.stdin(read);
                    Some(write)
                } else {
                    command.stdin(Stdio::null());
                    None
                };
                let (stdout, out) = pipe()?;
                let (stderr, err) = pipe()?;
                command.stdout(out).stderr(err);
                Ok(Ends::Pipes { stdin, stdout, stderr })
            }
        }
    }

    /// What the child does between fork and exec. Returns a pipe that tells how far it came.
    fn prepare(
        &self,
        command: &mut Command,
        program: &Program,
        working_dir: &Path,
    ) -> anyhow::Result<OwnedFd> {
        let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
        let (stage, report) = rustix::pipe::pipe_with(flags).context("make a pipe")?;
        let procs = self.cgroup.procs().context("open the workload's cgroup")?;
        let root = self.root.directory().context("hold the workload's root")?;
        let terminal = matches!(program.streams, Streams::Terminal(_));
        let uid = Uid::from_raw(program.user.uid);
        let gid = Gid::from_raw(program.user.gid);
        let groups: Vec<Gid> = program.user.groups.iter().map(|g| Gid::from_raw(*g)).collect();
        let directory = std::ffi::CString::new(working_dir.as_os_str().as_encoded_bytes())
            .context("the working directory has a NUL byte")?;
        sys::before_exec(command, move || {
            let enter = |stage: Stage| rustix::io::write(&report, &[stage as u8]).map(drop);
            enter(Stage::Setup)?;
            rustix::io::write(&procs, b"0")?;
            rustix::process::setsid()?;
            if terminal {
                sys::set_controlling_terminal(rustix::stdio::stdin())?;
            }
            rustix::process::setrlimit(Resource::Nofile, OPEN_FILES)?;
            rustix::process::fchdir(&root)?;
            rustix::process::chroot(c".")?;
            enter(Stage::WorkingDir)?;
            rustix::process::chdir(directory.as_c_str())?;
            enter(Stage::User)?;
            rustix::thread::set_thread_groups(&groups)?;
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            enter(Stage::Exec)?;
            Ok(())
        });
        Ok(stage)
    }
}

/// How far a child came.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Setup = 1,
    WorkingDir,
    User,
    Exec,
}

impl Stage {
    fn last(pipe: &OwnedFd) -> Self {
        let mut bytes = [0u8; 16];
        let count = rustix::io::read(pipe, &mut bytes).unwrap_or(0);
        match bytes[..count].last() {
            Some(2) => Self::WorkingDir,
            Some(3) => Self::User,
            Some(4) => Self::Exec,
            _ => Self::Setup,
        }
    }
}

fn explain(
    error: &io::Error,
    stage: Stage,
    name: &str,
    program: &Program,
    working_dir: &Path,
) -> LaunchError {
    let (code, what) = match (stage, error.kind()) {
        (Stage::Exec, io::ErrorKind::NotFound) if name.contains('/') => (
            127,
            format!(
                "run {name}: no such file in the image (or its interpreter or dynamic linker is missing)"
            ),
        ),
        (Stage::Exec, io::ErrorKind::NotFound) => {
            let path = program.environment.get("PATH").map_or("", String::as_str);
            (127, format!("run {name}: no such program in the image's PATH ({path})"))
        }
        (Stage::Exec, _) => (126, format!("run {name}: {error}")),
        (Stage::WorkingDir, _) => {
            (125, format!("enter the working directory {}: {error}", working_dir.display()))
        }
        (Stage::User, _) => {
            (125, format!("become uid {} gid {}: {error}", program.user.uid, program.user.gid))
        }
        (Stage::Setup, _) => (125, format!("set up a process for {name}: {error}")),
    };
    LaunchError { code, message: what }
}

/// Sets the size of a terminal; values beyond 65535 are cut.
pub(crate) fn set_size(terminal: &OwnedFd, size: TerminalSize) -> io::Result<()> {
    let cells = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
    let size = Winsize { ws_row: cells(size.height), ws_col: cells(size.width), ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).map_err(Into::into)
}

/// A path of the workload's root; a relative one begins there.
pub(crate) fn root_path(path: &str) -> PathBuf {
    Path::new("/").join(path)
}
