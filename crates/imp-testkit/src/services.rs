//! What PID 1 of a node does for life: keeps services running, and reaps what others leave behind.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;
use rustix::process::{WaitOptions, wait};
use serde::{Deserialize, Serialize};

/// A program that PID 1 runs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Service {
    /// Its name, for the log.
    pub name: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where its output is appended.
    pub log: Utf8PathBuf,
    /// What must be true before it is started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Condition>,
    /// Runs once and must succeed before the next one is started; else it is kept running.
    #[serde(default)]
    pub once: bool,
}

/// Something another program brings about.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub enum Condition {
    /// Something accepts connections on this unix socket.
    Socket(Utf8PathBuf),
    /// Something accepts connections on this TCP address.
    Tcp(SocketAddr),
    /// This file exists.
    File(Utf8PathBuf),
}

/// How long a condition may take.
const CONDITION_TIMEOUT: Duration = Duration::from_secs(120);
/// A service that ended is started again after this time.
const RESTART_DELAY: Duration = Duration::from_secs(1);

impl Condition {
    /// Waits until the condition holds. It is looked at anew every 20 ms: nobody tells when a server starts to listen.
    fn wait(&self) -> Result<()> {
        let end = Instant::now() + CONDITION_TIMEOUT;
        loop {
            let error = match self {
                Self::Socket(path) => UnixStream::connect(path).err(),
                Self::File(path) => std::fs::metadata(path).err(),
                Self::Tcp(address) => TcpStream::connect_timeout(address, Duration::from_secs(1)).err(),
            };
            let Some(error) = error else { return Ok(()) };
            let hopeless = !matches!(
                error.kind(),
                ErrorKind::NotFound
                    | ErrorKind::ConnectionRefused
                    | ErrorKind::TimedOut
                    | ErrorKind::WouldBlock
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
            );
            if hopeless || Instant::now() > end {
                bail!("{self:?}: {error}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Starts the services in order, then keeps them running and reaps every process whose parent is gone. Never returns without
/// an error.
///
/// # Errors
/// When a service can't be started, a condition does not come true, or a `once` service fails.
pub fn run(services: &[Service]) -> Result<()> {
    let mut running = HashMap::new();
    for service in services {
        if let Some(condition) = &service.after {
            condition.wait().with_context(|| format!("before {} can start", service.name))?;
        }
        let pid = start(service)?;
        if service.once {
            wait_for(pid, service, &mut running)?;
        } else {
            running.insert(pid, service);
        }
    }
    println!("node started");
    loop {
        let Some((pid, status)) = wait(WaitOptions::empty()).context("wait for processes")? else { continue };
        if let Some(service) = running.remove(&pid.as_raw_nonzero().get()) {
            restart(service, &format!("{status:?}"), &mut running)?;
        }
    }
}

fn restart<'a>(service: &'a Service, status: &str, running: &mut HashMap<i32, &'a Service>) -> Result<()> {
    println!("{} ended ({status}); starting it again", service.name);
    std::thread::sleep(RESTART_DELAY);
    running.insert(start(service)?, service);
    Ok(())
}

fn start(service: &Service) -> Result<i32> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&service.log)
        .with_context(|| format!("open {}", service.log))?;
    let (program, args) = service.command.split_first().context("a service without a program")?;
    let child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share the log")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {}: run {program}", service.name))?;
    i32::try_from(child.id()).context("a PID out of range")
}

/// Waits for one process while reaping others.
fn wait_for(wanted: i32, service: &Service, running: &mut HashMap<i32, &Service>) -> Result<()> {
    loop {
        let Some((pid, status)) = wait(WaitOptions::empty()).context("wait for processes")? else { continue };
        let pid = pid.as_raw_nonzero().get();
        if pid == wanted {
            if status.exit_status() == Some(0) {
                return Ok(());
            }
            bail!("{} failed ({status:?}); see {}", service.name, service.log);
        }
        if let Some(service) = running.remove(&pid) {
            restart(service, &format!("{status:?}"), running)?;
        }
    }
}
