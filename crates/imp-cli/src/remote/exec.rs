//! `kubectl imp exec`.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::signal::unix::{SignalKind, signal};

use super::args::ExecArgs;
use super::cluster::Cluster;
use super::socket::{self, Receiver, Said, Sender};
use crate::terminal;

/// Bytes of one read of standard input.
const CHUNK: usize = 32 << 10;

/// Runs a command in a VM; the result is its exit code.
///
/// # Errors
/// When it cannot be run, or the connection breaks before its end.
pub(super) async fn run(cluster: &Cluster, args: ExecArgs) -> anyhow::Result<u8> {
    let mut options: Vec<(&str, String)> =
        args.command.iter().map(|word| ("command", word.clone())).collect();
    options.push(("stdout", "true".to_owned()));
    for (name, on) in [("stdin", args.stdin), ("tty", args.tty), ("stderr", !args.tty)] {
        if on {
            options.push((name, "true".to_owned()));
        }
    }
    options.extend(args.user.map(|user| ("user", user)));
    options.extend(args.workdir.map(|directory| ("workingDir", directory)));
    let (sender, mut receiver) = socket::open(cluster, &args.name, "exec", &options).await?;
    let raw = if args.tty && args.stdin { Some(terminal::RawMode::enter()?) } else { None };
    let outcome = tokio::select! {
        outcome = output(&mut receiver) => outcome,
        error = input(sender, args.stdin, args.tty) => Err(error),
    };
    // The message belongs on a line of its own, in the terminal's own mode.
    drop(raw);
    let (code, more) = outcome?;
    if let Some(more) = more {
        eprintln!("imp: {more}");
    }
    Ok(code)
}

/// Shows what comes until the outcome.
async fn output(receiver: &mut Receiver) -> anyhow::Result<(u8, Option<String>)> {
    let (mut out, mut err) = (tokio::io::stdout(), tokio::io::stderr());
    loop {
        match receiver.next().await? {
            Said::Stdout(data) => {
                out.write_all(&data).await?;
                out.flush().await?;
            }
            Said::Stderr(data) => {
                err.write_all(&data).await?;
                err.flush().await?;
            }
            Said::Outcome(status) => return socket::exit_code(&status),
        }
    }
}

/// Sends standard input and sizes of the terminal; returns only when the connection broke.
async fn input(mut sender: Sender, stdin: bool, tty: bool) -> anyhow::Error {
    match send(&mut sender, stdin, tty).await {
        // The other side closes when the command ended, and its outcome is being read.
        Ok(()) => std::future::pending().await,
        Err(error) => error,
    }
}

async fn send(sender: &mut Sender, mut stdin: bool, tty: bool) -> anyhow::Result<()> {
    let mut resized = signal(SignalKind::window_change())?;
    if let Some(size) = terminal::size().filter(|_| tty) {
        sender.resize(size).await?;
    }
    let mut from = tokio::io::stdin();
    let mut buffer = vec![0; CHUNK];
    loop {
        tokio::select! {
            read = from.read(&mut buffer), if stdin => match read? {
                0 => {
                    stdin = false;
                    sender.close_stdin().await?;
                }
                count => sender.stdin(&buffer[..count]).await?,
            },
            _ = resized.recv(), if tty => if let Some(size) = terminal::size() {
                sender.resize(size).await?;
            },
            else => return Ok(()),
        }
    }
}
