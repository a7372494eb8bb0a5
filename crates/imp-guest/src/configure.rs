//! `Configure`: a booted, nameless guest becomes one VM and starts its workload.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use imp_proto::v1::{
    ConfigureFailure, ConfigureRequest, ConfigureResponse, FailureReason, GuestWorkload, configure_response,
};

use crate::agent::{Agent, Machine, Wanted};
use crate::boot::{files, network, random, root};
use crate::process::cgroup::Cgroup;
use crate::process::launch::{LaunchError, Launcher, Streams};
use crate::process::signal;
use crate::process::stream::ProcessStreams;

/// The answer when the guest could not be set up.
pub(crate) fn failed(error: &anyhow::Error) -> ConfigureResponse {
    failure(FailureReason::GuestConfigureFailed, format!("{error:#}"), 0)
}

fn failure(reason: FailureReason, message: String, exit_code: i32) -> ConfigureResponse {
    eprintln!("imp-guest: {message}");
    let failure = ConfigureFailure { reason: reason.into(), message, exit_code };
    ConfigureResponse { result: Some(configure_response::Result::Failed(failure)) }
}

/// Sets everything up and starts the workload.
pub(crate) async fn configure(agent: Arc<Agent>, request: ConfigureRequest) -> ConfigureResponse {
    let workload = request.workload.clone().unwrap_or_default();
    let (machine, stop_signal) = match set_up(&agent, request).await {
        Ok(done) => done,
        Err(e) => return failed(&e),
    };
    agent.set_machine(Arc::clone(&machine));
    match start(&agent, &machine, workload, stop_signal).await {
        Ok(pid) => ConfigureResponse { result: Some(configure_response::Result::Started(pid)) },
        Err(e) => failure(FailureReason::WorkloadStartFailed, e.message, e.code),
    }
}

/// Identity, network and root; network and root at the same time.
async fn set_up(agent: &Arc<Agent>, request: ConfigureRequest) -> Result<(Arc<Machine>, i32)> {
    if let Some(mount) = request.mounts.first() {
        bail!("this guest knows no mounts of type {:?} (for {})", mount.r#type, mount.target);
    }
    if let Some(time) = request.time {
        random::set_clock(time)?;
    }
    random::seed(&request.entropy)?;
    let hostname = request.hostname;
    if !hostname.is_empty() {
        files::check_hostname(&hostname)?;
        rustix::system::sethostname(hostname.as_bytes()).context("set the host name")?;
    }
    let net = request.network;
    let address = net.as_ref().and_then(network::address);
    let resolver = net.as_ref().map(|n| files::resolv_conf(&n.dns, &n.search)).transpose()?.flatten();
    let workload = request.workload.context("the request has no workload")?;
    let stop_signal = signal::parse(&workload.stop_signal).context("the workload's stop signal")?;

    let loading = Arc::clone(agent);
    // Modules first: they bring both the disks and the network device.
    blocking(move || loading.wait_for_devices()).await.context("load the kernel's modules")?;
    let wanted = request.root.context("the request has no root")?;
    let hosts = files::hosts(&hostname, address);
    let name = hostname.clone();
    let root = blocking(move || mount_root(&wanted, &name, &hosts, resolver.as_deref()));
    let (root, ()) =
        tokio::try_join!(root, async { network::set_up(net.as_ref()).await.context("set up the network") })?;
    let launcher = Launcher { root, cgroup: Cgroup::create()?, reaper: Arc::clone(&agent.reaper) };
    let machine = Machine {
        launcher,
        hostname,
        environment: workload.env,
        user: workload.user,
        working_dir: workload.working_dir,
        address,
    };
    Ok((Arc::new(machine), stop_signal))
}

fn mount_root(
    wanted: &imp_proto::v1::GuestRoot,
    hostname: &str,
    hosts: &str,
    resolver: Option<&str>,
) -> Result<root::Root> {
    let root = root::Root::mount(wanted)?;
    let mut identity = vec![("/etc/hosts", hosts.to_owned())];
    if !hostname.is_empty() {
        identity.push(("/etc/hostname", format!("{hostname}\n")));
    }
    if let Some(text) = resolver {
        identity.push(("/etc/resolv.conf", text.to_owned()));
    }
    root.inside(move || identity.iter().try_for_each(|(path, text)| files::replace(Path::new(path), text)))??;
    Ok(root)
}

async fn start(
    agent: &Arc<Agent>,
    machine: &Arc<Machine>,
    workload: GuestWorkload,
    stop_signal: i32,
) -> Result<i32, LaunchError> {
    let streams = if workload.tty {
        Streams::Terminal(workload.size)
    } else {
        Streams::Pipes { stdin: workload.stdin }
    };
    let owner = Arc::clone(machine);
    let started = tokio::task::spawn_blocking(move || {
        let wanted = Wanted {
            argv: workload.argv,
            environment: Vec::new(),
            user: String::new(),
            working_dir: String::new(),
            streams,
        };
        let program = owner.program(wanted)?;
        // The working directory may have to be made before a read-only root closes.
        owner.launcher.make_working_dir(&program)?;
        owner.launcher.root.seal()?;
        owner.launcher.start(program)
    });
    let (child, ends) =
        started.await.map_err(|e| LaunchError::from(anyhow::anyhow!("starting it panicked: {e}")))??;
    let streams =
        ProcessStreams::new(ends).context("watch the workload's streams").map_err(LaunchError::from)?;
    let pid = child.pid.as_raw_nonzero().get();
    agent.follow(machine, child, streams, stop_signal);
    Ok(pid)
}

/// Runs `work` where it may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.context("the work panicked")?
}
