//! Exec and attach: the person's terminal on one side, a stream of the runtime on the other.

use super::{
    args::{ExecArgs, Paths},
    client, spec,
};
use crate::{exit, terminal};
use imp_proto::v1::{self as pb, exec_request, exec_response};
use std::future::Future;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;

/// Messages that wait for the network; more than a few would only hide that it is slow.
const IN_FLIGHT: usize = 4;
/// Bytes of one read of standard input.
const CHUNK: usize = 32 << 10;

/// `imp exec`.
pub(super) async fn exec(paths: &Paths, args: ExecArgs) -> anyhow::Result<u8> {
    let mut client = client::connect(paths).await?;
    let vm = client::find(&mut client, &args.name).await?;
    anyhow::ensure!(
        vm.status.state() == pb::VmState::Running,
        "{} is not running: `imp ps -a` shows its state",
        args.name
    );
    let start = pb::ExecStart {
        vm: Some(vm.vm_ref()),
        argv: args.command,
        stdin: args.interactive,
        stdout: true,
        stderr: !args.tty,
        tty: args.tty,
        size: terminal_size(args.tty),
        env: spec::environment_of(&args.env, &|name| std::env::var(name).ok())?,
        working_dir: args.workdir.unwrap_or_default(),
        user: args.user.unwrap_or_default(),
    };
    let _raw = if args.tty && args.interactive { Some(terminal::RawMode::enter()?) } else { None };
    let status = pump(start, |requests| async move { client.exec(requests).await }).await?;
    if !status.message.is_empty() {
        eprintln!("imp: {}", status.message);
    }
    Ok(exit::code(&status))
}

pub(super) fn terminal_size(tty: bool) -> Option<pb::TerminalSize> {
    let (width, height) = terminal::size().filter(|_| tty)?;
    Some(pb::TerminalSize { width, height })
}

/// Opens a stream with `start`, joins it to our standard streams, and returns how the process at the other end ended.
///
/// # Errors
/// When the stream breaks before it has said how the process ended.
pub(super) async fn pump<Open, Opened>(start: pb::ExecStart, open: Open) -> anyhow::Result<pb::ExitStatus>
where
    Open: FnOnce(ReceiverStream<pb::ExecRequest>) -> Opened,
    Opened: Future<Output = Result<tonic::Response<tonic::Streaming<pb::ExecResponse>>, tonic::Status>>,
{
    let (requests, receiver) = mpsc::channel(IN_FLIGHT);
    let (stdin, tty) = (start.stdin, start.tty);
    // The channel is empty and not closed, so this cannot wait.
    let _ = requests.send(request(exec_request::Message::Start(start))).await;
    let mut responses = open(ReceiverStream::new(receiver)).await.map_err(client::failure)?.into_inner();
    let events = tokio::spawn(forward_events(requests.clone(), tty));
    let input = stdin.then(|| tokio::spawn(forward_stdin(requests.clone())));
    let mut out = tokio::io::stdout();
    let mut err = tokio::io::stderr();
    let result = loop {
        let message = match responses.message().await {
            Ok(message) => message,
            Err(status) => break Err(client::failure(status)),
        };
        match message.and_then(|m| m.message) {
            Some(exec_response::Message::Started(())) => {}
            Some(exec_response::Message::Stdout(data)) => {
                out.write_all(&data).await?;
                out.flush().await?;
            }
            Some(exec_response::Message::Stderr(data)) => {
                err.write_all(&data).await?;
                err.flush().await?;
            }
            Some(exec_response::Message::Exit(status)) => break Ok(status),
            None => break Err(anyhow::anyhow!("the stream ended before the process did: try again")),
        }
    };
    events.abort();
    if let Some(input) = input {
        input.abort();
    }
    result
}

fn request(message: exec_request::Message) -> pb::ExecRequest {
    pb::ExecRequest { message: Some(message) }
}

async fn forward_stdin(requests: mpsc::Sender<pb::ExecRequest>) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; CHUNK];
    loop {
        let message = match stdin.read(&mut buffer).await {
            Ok(0) | Err(_) => exec_request::Message::CloseStdin(()),
            Ok(n) => exec_request::Message::Stdin(buffer[..n].to_vec().into()),
        };
        let last = matches!(message, exec_request::Message::CloseStdin(()));
        if requests.send(request(message)).await.is_err() || last {
            return;
        }
    }
}

/// A change of the window's size, and the signals that docker forwards too.
async fn forward_events(requests: mpsc::Sender<pb::ExecRequest>, tty: bool) {
    let streams =
        [SignalKind::window_change(), SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
            .map(signal);
    let [Ok(mut window), Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = streams else { return };
    loop {
        let message = tokio::select! {
            Some(()) = window.recv() => match terminal_size(tty) {
                Some(size) => exec_request::Message::Resize(size),
                None => continue,
            },
            Some(()) = interrupt.recv() => signal_message(SignalKind::interrupt()),
            Some(()) = terminate.recv() => signal_message(SignalKind::terminate()),
            Some(()) = hangup.recv() => signal_message(SignalKind::hangup()),
            else => return,
        };
        if requests.send(request(message)).await.is_err() {
            return;
        }
    }
}

fn signal_message(kind: SignalKind) -> exec_request::Message {
    exec_request::Message::Signal(kind.as_raw_value())
}
