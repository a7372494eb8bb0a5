//! A connection to the local runtime, which is started when nobody answers.

use super::args::Paths;
use anyhow::Context as _;
use imp_proto::v1::{self as pb, runtime_client::RuntimeClient};
use std::{io::ErrorKind, os::unix::process::CommandExt as _, process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::UnixStream,
};
use tonic::transport::Channel;

/// What the daemon prints once its socket answers.
pub(super) const READY: &str = "ready";
/// A daemon that takes longer has a problem that its log tells.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// Connects, starting the runtime if need be.
///
/// # Errors
/// When the runtime cannot be started; the message has the end of its log.
pub(super) async fn connect(paths: &Paths) -> anyhow::Result<RuntimeClient<Channel>> {
    let socket = paths.run_dir.join("runtime.sock");
    match UnixStream::connect(&socket).await {
        Ok(_) => {}
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            start(paths).await?;
        }
        Err(e) => return Err(e).with_context(|| format!("cannot connect to the local runtime at {socket}")),
    }
    let channel = imp_proto::unix::connect(socket).await.context("cannot connect to the local runtime")?;
    Ok(RuntimeClient::new(channel))
}

async fn start(paths: &Paths) -> anyhow::Result<()> {
    std::fs::create_dir_all(&paths.state_dir).with_context(|| format!("cannot make {}", paths.state_dir))?;
    let log_path = paths.state_dir.join("daemon.log");
    let log = std::fs::File::create(&log_path).with_context(|| format!("cannot make {log_path}"))?;
    let program = std::env::current_exe().context("cannot find our own program")?;
    let mut command = std::process::Command::new(program);
    command.arg("--state-dir").arg(&paths.state_dir).arg("--run-dir").arg(&paths.run_dir);
    if let Some(dir) = &paths.boot_dir {
        command.arg("--boot-dir").arg(dir);
    }
    command.arg("daemon").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).current_dir("/");
    // Its own process group: an interrupt typed at this terminal is not the daemon's.
    command.process_group(0);
    let mut child =
        tokio::process::Command::from(command).spawn().context("cannot start the local runtime")?;
    let stdout = child.stdout.take().context("the local runtime has no standard output")?;
    let mut line = String::new();
    let read = tokio::time::timeout(START_DEADLINE, BufReader::new(stdout).read_line(&mut line)).await;
    if matches!(read, Ok(Ok(_))) && line.trim() == READY {
        return Ok(());
    }
    let text = std::fs::read_to_string(&log_path).unwrap_or_default();
    let tail: Vec<&str> = text.lines().rev().take(5).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    anyhow::bail!("the local runtime did not start ({log_path}): {}", tail.join(" | "))
}

/// A VM and what is wanted of it.
#[derive(Clone, Debug)]
pub(super) struct Vm {
    pub(super) spec: pb::VmSpec,
    pub(super) status: pb::VmStatus,
}

impl Vm {
    pub(super) fn name(&self) -> &str {
        self.spec.vm.as_ref().map_or("", |vm| vm.name.as_str())
    }

    pub(super) fn vm_ref(&self) -> pb::VmRef {
        self.spec.vm.clone().unwrap_or_default()
    }

    /// Nothing runs any more.
    pub(super) fn ended(&self) -> bool {
        ended(&self.status)
    }
}

/// The state is final: nothing runs and nothing is about to.
pub(super) fn ended(status: &pb::VmStatus) -> bool {
    matches!(status.state(), pb::VmState::Stopped | pb::VmState::Failed)
}

/// All VMs, by name.
///
/// # Errors
/// When the runtime does not answer.
pub(super) async fn list(client: &mut RuntimeClient<Channel>) -> anyhow::Result<Vec<Vm>> {
    let answer = client.list_vms(pb::ListVmsRequest {}).await.map_err(failure)?.into_inner();
    let mut vms: Vec<Vm> =
        answer.specs.into_iter().zip(answer.vms).map(|(spec, status)| Vm { spec, status }).collect();
    vms.sort_by(|a, b| a.name().cmp(b.name()));
    Ok(vms)
}

/// The VM called `name` (or whose UID begins with it).
///
/// # Errors
/// When there is none.
pub(super) async fn find(client: &mut RuntimeClient<Channel>, name: &str) -> anyhow::Result<Vm> {
    let vms = list(client).await?;
    let by_uid = |vm: &&Vm| name.len() >= 4 && vm.vm_ref().uid.starts_with(name);
    vms.iter()
        .find(|vm| vm.name() == name)
        .or_else(|| vms.iter().find(by_uid))
        .cloned()
        .with_context(|| format!("no VM is called {name:?}: `imp ps -a` lists them"))
}

/// A gRPC status as an error for people.
pub(super) fn failure(status: tonic::Status) -> anyhow::Error {
    match status.code() {
        tonic::Code::Unavailable | tonic::Code::Unknown => {
            anyhow::anyhow!("the local runtime went away ({}): try again", status.message())
        }
        _ => anyhow::anyhow!("{}", status.message()),
    }
}
