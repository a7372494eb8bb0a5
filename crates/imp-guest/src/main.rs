//! PID 1 of the guest: init, workload supervisor, agent.
//!
//! The kernel starts this program as `/init` of the initramfs. It mounts what a process expects, loads the modules of
//! the channel to the host, says hello there and waits for `Configure`, which brings everything that makes this VM
//! one of its own. It stays PID 1 until the machine is powered off.

mod agent;
mod boot;
mod channel;
mod checks;
mod configure;
mod copy;
mod exec;
mod output;
mod power;
mod process;
mod service;
mod sys;
mod usage;

use anyhow::{Context as _, Result, bail};

fn main() -> Result<()> {
    if std::process::id() != 1 {
        bail!("imp-guest {} is the init of Imp's VMs and runs as PID 1 only", env!("CARGO_PKG_VERSION"));
    }
    let devices = boot::early()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the asynchronous runtime")?;
    // The end of PID 1 is a kernel panic. A panic in a call ends that call's task only; if the server itself ever
    // ended, serving afresh is the better answer.
    runtime.block_on(async move {
        let agent = agent::Agent::new(devices)?;
        loop {
            let server = tokio::spawn(service::serve(std::sync::Arc::clone(&agent)));
            match server.await {
                Ok(Ok(())) => eprintln!("imp-guest: the server ended; starting it again"),
                Ok(Err(e)) => eprintln!("imp-guest: the server failed: {e:#}; starting it again"),
                Err(e) => eprintln!("imp-guest: the server panicked: {e}; starting it again"),
            }
            // Only a broken machine brings us here; it must not be kept busy by us.
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
    })
}
