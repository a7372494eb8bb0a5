//! What the agent knows: whether it was configured, the workload, and what it tells watchers.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use imp_proto::v1::{ConfigureResponse, EnvVar, GuestEvent, OutputStream, WorkloadExit, configure_response};
use tokio::sync::{oneshot, watch};
use tonic::Status;

use crate::boot::{self, Devices};
use crate::output::Output;
use crate::process::environment;
use crate::process::launch::{Launcher, Program, Streams};
use crate::process::reaper::{Child, Ended, Reaper};
use crate::process::stream::{ProcessStreams, Stream};
use crate::process::user;

/// The answer to `Configure`, for everyone who asks.
type Answer = Shared<BoxFuture<'static, ConfigureResponse>>;

/// State of the agent, one a machine.
pub(crate) struct Agent {
    pub(crate) reaper: Arc<Reaper>,
    devices: Mutex<Option<Devices>>,
    configured: Mutex<Option<(String, Answer)>>,
    events: watch::Sender<GuestEvent>,
    machine: OnceLock<Arc<Machine>>,
    workload: OnceLock<Arc<Workload>>,
}

/// What `Configure` made, apart from the workload.
pub(crate) struct Machine {
    pub(crate) launcher: Launcher,
    pub(crate) hostname: String,
    /// The workload's environment as configured, without defaults. Secret.
    pub(crate) environment: Vec<EnvVar>,
    pub(crate) user: String,
    pub(crate) working_dir: String,
    pub(crate) address: Option<std::net::IpAddr>,
}

/// A program to run in the machine, as a call describes it; empty fields mean the workload's.
pub(crate) struct Wanted {
    pub(crate) argv: Vec<String>,
    pub(crate) environment: Vec<EnvVar>,
    pub(crate) user: String,
    pub(crate) working_dir: String,
    pub(crate) streams: Streams,
}

impl Machine {
    /// Resolves user and environment of `wanted`. Blocks.
    pub(crate) fn program(&self, wanted: Wanted) -> Result<Program> {
        let or = |given: String, default: &str| if given.is_empty() { default.to_owned() } else { given };
        let specification = or(wanted.user, &self.user);
        let databases = || {
            Ok::<_, anyhow::Error>((user::read_database("/etc/passwd")?, user::read_database("/etc/group")?))
        };
        let (passwd, group) = self.launcher.root.inside(databases)??;
        let user = user::resolve(&specification, &passwd, &group)?;
        let mut environment = environment::merge(&self.environment, &wanted.environment)?;
        let terminal = matches!(wanted.streams, Streams::Terminal(_));
        environment::add_defaults(&mut environment, &user, &self.hostname, terminal);
        Ok(Program {
            argv: wanted.argv,
            environment,
            user,
            working_dir: or(wanted.working_dir, &self.working_dir),
            streams: wanted.streams,
        })
    }
}

/// The running or ended workload.
pub(crate) struct Workload {
    pub(crate) child: Child,
    pub(crate) output: Arc<Output>,
    pub(crate) terminal: Option<Stream>,
    /// Taken when the standard input is closed.
    pub(crate) stdin: Mutex<Option<Stream>>,
    /// Number of the stop signal.
    pub(crate) stop_signal: i32,
    exit: watch::Receiver<Option<WorkloadExit>>,
}

impl Workload {
    /// Waits for its end.
    pub(crate) async fn ended(&self) -> WorkloadExit {
        let mut exits = self.exit.clone();
        let exit = exits.wait_for(Option::is_some).await.map(|exit| exit.clone());
        match exit {
            Ok(Some(exit)) => exit,
            // The task that follows the workload lives as long as the machine, and sends nothing else.
            _ => std::future::pending().await,
        }
    }

    /// How it ended, if it has.
    pub(crate) fn exit(&self) -> Option<WorkloadExit> {
        self.exit.borrow().clone()
    }

    /// The standard input, unless it was not wanted or has been closed.
    pub(crate) fn stdin(&self) -> Option<Stream> {
        lock(&self.stdin).clone()
    }

    /// Closes the standard input: the workload reads its end.
    pub(crate) fn close_stdin(&self) {
        lock(&self.stdin).take();
    }
}

/// Nothing under these locks is left half done by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    /// The agent of this machine; `devices` are being loaded.
    pub(crate) fn new(devices: Devices) -> Result<Arc<Self>> {
        let kernel = rustix::system::uname();
        let event = GuestEvent {
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: kernel.release().to_string_lossy().into_owned(),
            ..GuestEvent::default()
        };
        Ok(Arc::new(Self {
            reaper: Reaper::start().context("listen to SIGCHLD")?,
            devices: Mutex::new(Some(devices)),
            configured: Mutex::new(None),
            events: watch::Sender::new(event),
            machine: OnceLock::new(),
            workload: OnceLock::new(),
        }))
    }

    /// The answer of the one configuration of attempt `attempt`, which `configure` makes when there was none. It goes on
    /// when the caller goes away.
    pub(crate) fn configure_once<F>(
        &self,
        attempt: &str,
        configure: impl FnOnce() -> F,
    ) -> Result<Answer, Status>
    where
        F: Future<Output = ConfigureResponse> + Send + 'static,
    {
        if attempt.is_empty() {
            return Err(Status::invalid_argument("attempt_id is empty"));
        }
        let mut configured = lock(&self.configured);
        if let Some((first, answer)) = &*configured {
            if first == attempt {
                return Ok(answer.clone());
            }
            return Err(Status::failed_precondition(format!(
                "this VM was configured for {first}, not for {attempt}"
            )));
        }
        let (sender, receiver) = oneshot::channel();
        let work = tokio::spawn(configure());
        let events = self.events.clone();
        let id = attempt.to_owned();
        tokio::spawn(async move {
            let response = work.await.unwrap_or_else(|e| {
                crate::configure::failed(&anyhow::anyhow!("the guest agent panicked: {e}"))
            });
            events.send_modify(|event| {
                event.attempt_id = id;
                if let Some(configure_response::Result::Failed(failure)) = &response.result {
                    event.failed = Some(failure.clone());
                }
            });
            // The receiver is kept in `configured`.
            let _ = sender.send(response);
        });
        let answer = async move { receiver.await.unwrap_or_default() }.boxed().shared();
        *configured = Some((attempt.to_owned(), answer.clone()));
        Ok(answer)
    }

    /// Waits until the modules are loaded. Blocks.
    pub(crate) fn wait_for_devices(&self) -> Result<()> {
        lock(&self.devices).take().map_or(Ok(()), boot::wait_for)
    }

    /// The state now and each change.
    pub(crate) fn events(&self) -> watch::Receiver<GuestEvent> {
        self.events.subscribe()
    }

    /// What `Configure` made.
    pub(crate) fn machine(&self) -> Result<&Arc<Machine>, Status> {
        self.machine.get().ok_or_else(|| Status::failed_precondition("this VM has not been configured"))
    }

    /// The workload, running or ended.
    pub(crate) fn workload(&self) -> Result<&Arc<Workload>, Status> {
        self.workload
            .get()
            .ok_or_else(|| Status::failed_precondition("no workload has been started in this VM"))
    }

    /// The machine while its workload runs.
    pub(crate) fn running(&self) -> Result<&Arc<Machine>, Status> {
        match self.workload()?.exit() {
            None => self.machine(),
            Some(_) => Err(Status::failed_precondition("the workload of this VM has ended")),
        }
    }

    /// Remembers the machine; `Configure` runs once.
    pub(crate) fn set_machine(&self, machine: Arc<Machine>) {
        let _ = self.machine.set(machine);
    }

    /// Follows a workload that was just started.
    pub(crate) fn follow(
        &self,
        machine: &Arc<Machine>,
        child: Child,
        streams: ProcessStreams,
        stop_signal: i32,
    ) {
        let output = Output::new(crate::output::CAPACITY);
        let (sender, exit) = watch::channel(None);
        let started_at = SystemTime::now();
        let workload = Arc::new(Workload {
            child: child.clone(),
            output: Arc::clone(&output),
            terminal: streams.terminal.then(|| streams.stdout.clone()),
            stdin: Mutex::new(streams.stdin),
            stop_signal,
            exit,
        });
        let _ = self.workload.set(workload);
        self.events.send_modify(|event| {
            event.running = true;
            event.started_at = Some(started_at.into());
        });
        tokio::spawn(pump(streams.stdout, streams.stderr, output));
        tokio::spawn(watch_exit(child, Arc::clone(machine), started_at, sender, self.events.clone()));
    }
}

/// Carries output into the ring until both streams have ended.
async fn pump(stdout: Stream, stderr: Option<Stream>, output: Arc<Output>) {
    let carry = |stream: Stream, kind: OutputStream| {
        let output = Arc::clone(&output);
        async move {
            loop {
                match stream.read().await {
                    Ok(Some(data)) => output.push(kind, data).await,
                    Ok(None) => return,
                    Err(e) => return eprintln!("imp-guest: read the workload's output: {e}"),
                }
            }
        }
    };
    let errors = async {
        if let Some(stderr) = stderr {
            carry(stderr, OutputStream::Stderr).await;
        }
    };
    futures::join!(carry(stdout, OutputStream::Stdout), errors);
    output.end();
}

/// Waits for the end of the workload and takes the processes that it leaves with it, as the end of a container does.
async fn watch_exit(
    mut child: Child,
    machine: Arc<Machine>,
    started_at: SystemTime,
    exit: watch::Sender<Option<WorkloadExit>>,
    events: watch::Sender<GuestEvent>,
) {
    let ended = child.wait().await;
    let killed = matches!(ended, Ended::Signal(9) | Ended::Code(137));
    let mut status = ended.status(false);
    if killed && machine.launcher.cgroup.oom_kills() > 0 {
        status = Ended::Signal(9).status(true);
    }
    if let Err(e) = machine.launcher.cgroup.kill() {
        eprintln!("imp-guest: end what the workload left: {e}");
    }
    let ended = WorkloadExit {
        status: Some(status),
        started_at: Some(started_at.into()),
        finished_at: Some(SystemTime::now().into()),
    };
    exit.send_replace(Some(ended.clone()));
    events.send_modify(|event| {
        event.running = false;
        event.exit = Some(ended);
    });
}
