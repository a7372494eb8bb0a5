//! `kubectl imp console`.

use std::io::IsTerminal as _;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::args::ConsoleArgs;
use super::cluster::Cluster;
use super::socket::{self, Receiver, Said, Sender};
use crate::terminal;

/// Ctrl-], which ends the connection, as with telnet and virsh.
const ESCAPE: u8 = 0x1d;

/// Connects the terminal to a VM's serial console until Ctrl-] or the VM's end.
///
/// # Errors
/// When it cannot be connected, or the connection breaks.
pub(super) async fn run(cluster: &Cluster, args: ConsoleArgs) -> anyhow::Result<u8> {
    let (mut sender, mut receiver) = socket::open(cluster, &args.name, "console", &[]).await?;
    let raw = if std::io::stdin().is_terminal() {
        eprintln!("Connected to the serial console of {}. Ctrl-] ends the connection.", args.name);
        Some(terminal::RawMode::enter()?)
    } else {
        None
    };
    let outcome = tokio::select! {
        outcome = output(&mut receiver) => outcome,
        outcome = input(&mut sender) => outcome,
    };
    sender.close().await;
    if raw.is_some() {
        drop(raw);
        eprintln!();
    }
    outcome.map(|()| 0)
}

async fn output(receiver: &mut Receiver) -> anyhow::Result<()> {
    let mut out = tokio::io::stdout();
    loop {
        match receiver.next().await? {
            Said::Stdout(data) | Said::Stderr(data) => {
                out.write_all(&data).await?;
                out.flush().await?;
            }
            Said::Outcome(status) => return socket::exit_code(&status).map(drop),
        }
    }
}

/// Returns when the person wants to leave. The end of a file that is piped in is no such wish: output goes on.
async fn input(sender: &mut Sender) -> anyhow::Result<()> {
    let mut stdin = tokio::io::stdin();
    let mut buffer = [0; 4096];
    loop {
        let count = stdin.read(&mut buffer).await?;
        if count == 0 {
            return std::future::pending().await;
        }
        let typed = &buffer[..count];
        let end = typed.iter().position(|byte| *byte == ESCAPE);
        let before = &typed[..end.unwrap_or(count)];
        if !before.is_empty() {
            sender.stdin(before).await?;
        }
        if end.is_some() {
            return Ok(());
        }
    }
}
