//! Commands beside the workload, and its own standard streams.

use std::sync::Arc;

use bytes::Bytes;
use imp_proto::v1::{
    ExecRequest, ExecResponse, ExecStart, ExitStatus, OutputStream, exec_request, exec_response,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::agent::{Agent, Machine, Wanted, Workload};
use crate::process::launch::{LaunchError, Streams};
use crate::process::reaper::Child;
use crate::process::stream::{ProcessStreams, Stream};

/// Messages on their way to the host; more wait in the pipes.
const QUEUE: usize = 4;
/// SIGHUP: whoever ran the command has hung up.
const HANG_UP: i32 = 1;

type Responses = ReceiverStream<Result<ExecResponse, Status>>;
type Sender = mpsc::Sender<Result<ExecResponse, Status>>;

/// The receiver may be gone: its end is noticed by [`Sender::closed`].
async fn send(sender: &Sender, message: exec_response::Message) -> bool {
    sender.send(Ok(ExecResponse { message: Some(message) })).await.is_ok()
}

async fn first(requests: &mut Streaming<ExecRequest>) -> Result<ExecStart, Status> {
    match requests.message().await? {
        Some(ExecRequest { message: Some(exec_request::Message::Start(start)) }) => Ok(start),
        _ => Err(Status::invalid_argument("the first message has to be `start`")),
    }
}

/// Runs a command as `Exec` describes.
pub(crate) async fn exec(agent: &Agent, mut requests: Streaming<ExecRequest>) -> Result<Responses, Status> {
    let start = first(&mut requests).await?;
    if start.argv.is_empty() {
        return Err(Status::invalid_argument("argv is empty"));
    }
    let machine = Arc::clone(agent.running()?);
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let status = match launch(&machine, &start).await {
            Ok((child, streams)) => run(&machine, child, streams, &start, requests, &sender).await,
            Err(e) => Some(e.into_status()),
        };
        if let Some(status) = status {
            send(&sender, exec_response::Message::Exit(status)).await;
        }
    });
    Ok(ReceiverStream::new(receiver))
}

async fn launch(machine: &Arc<Machine>, start: &ExecStart) -> Result<(Child, ProcessStreams), LaunchError> {
    let wanted = Wanted {
        argv: start.argv.clone(),
        environment: start.env.clone(),
        user: start.user.clone(),
        working_dir: start.working_dir.clone(),
        streams: if start.tty {
            Streams::Terminal(start.size)
        } else {
            Streams::Pipes { stdin: start.stdin }
        },
    };
    start_program(machine, wanted).await
}

/// Starts a program beside the workload.
pub(crate) async fn start_program(
    machine: &Arc<Machine>,
    wanted: Wanted,
) -> Result<(Child, ProcessStreams), LaunchError> {
    let machine = Arc::clone(machine);
    let started = tokio::task::spawn_blocking(move || {
        let program = machine.program(wanted)?;
        machine.launcher.start(program)
    });
    let (child, ends) = started
        .await
        .map_err(|e| LaunchError::from(anyhow::anyhow!("starting the command panicked: {e}")))??;
    let streams = ProcessStreams::new(ends).map_err(|e| LaunchError::from(anyhow::Error::from(e)))?;
    Ok((child, streams))
}

/// Carries the streams of a running command; `None` when the caller has gone.
async fn run(
    machine: &Machine,
    child: Child,
    streams: ProcessStreams,
    start: &ExecStart,
    requests: Streaming<ExecRequest>,
    sender: &Sender,
) -> Option<ExitStatus> {
    let kills_before = machine.launcher.cgroup.oom_kills();
    if !send(sender, exec_response::Message::Started(())).await {
        let _ = child.kill(HANG_UP, true);
        return None;
    }
    let stdin = streams.stdin.filter(|_| start.stdin || !start.tty);
    let terminal = streams.terminal.then(|| streams.stdout.clone());
    let mut process = child.clone();
    let output = async {
        let out = forward(
            streams.stdout,
            child.clone(),
            sender,
            start.stdout.then_some(exec_response::Message::Stdout),
        );
        let err = async {
            if let Some(stderr) = streams.stderr {
                forward(
                    stderr,
                    child.clone(),
                    sender,
                    start.stderr.then_some(exec_response::Message::Stderr),
                )
                .await;
            }
        };
        futures::join!(out, err);
        process.wait().await
    };
    let input = input(requests, stdin, terminal, &child, || {});
    let ended = tokio::select! {
        ended = output => ended,
        () = sender.closed() => {
            // A number that is a signal; the process may have ended, which is no error.
            let _ = child.kill(HANG_UP, true);
            return None;
        }
        () = async { input.await; std::future::pending().await } => return None,
    };
    let mut status = ended.status(false);
    if status.signal == 9 && machine.launcher.cgroup.oom_kills() > kills_before {
        status = ended.status(true);
    }
    Some(status)
}

/// Carries output until its end, or until the process has ended and what it wrote is carried: a process that it left
/// behind may keep the pipe open for ever.
async fn forward(
    stream: Stream,
    mut child: Child,
    sender: &Sender,
    message: Option<fn(Bytes) -> exec_response::Message>,
) {
    let pass = async |data: Bytes| match message {
        Some(message) => send(sender, message(data)).await,
        None => true,
    };
    loop {
        tokio::select! {
            biased;
            data = stream.read() => match data {
                Ok(Some(data)) => if !pass(data).await { return },
                _ => return,
            },
            _ = child.wait() => break,
        }
    }
    while let Ok(Some(data)) = stream.read_now() {
        if data.is_empty() || !pass(data).await {
            return;
        }
    }
}

/// Carries what the caller sends, until its messages end. The standard input closes when asked, and with the return.
async fn input(
    mut requests: Streaming<ExecRequest>,
    mut stdin: Option<Stream>,
    terminal: Option<Stream>,
    child: &Child,
    closing: impl Fn(),
) {
    use exec_request::Message;
    while let Ok(Some(request)) = requests.message().await {
        match request.message {
            Some(Message::Stdin(data)) => {
                // One that reads no more loses the rest, as in a pipeline, and decides itself.
                if let Some(stream) = &stdin
                    && stream.write(&data).await.is_err()
                {
                    stdin = None;
                }
            }
            Some(Message::CloseStdin(())) => {
                stdin = None;
                closing();
            }
            Some(Message::Resize(size)) => {
                if let Some(Err(e)) = terminal.as_ref().map(|t| t.resize(size)) {
                    eprintln!("imp-guest: resize a terminal: {e}");
                }
            }
            Some(Message::Signal(number)) => {
                if let Err(e) = child.kill(number, false) {
                    eprintln!("imp-guest: signal {number}: {e}");
                }
            }
            Some(Message::Start(_)) | None => {}
        }
    }
}

/// The workload's standard streams as `Attach` describes.
pub(crate) async fn attach(agent: &Agent, mut requests: Streaming<ExecRequest>) -> Result<Responses, Status> {
    let start = first(&mut requests).await?;
    let workload = Arc::clone(agent.workload()?);
    if start.stdin && workload.stdin().is_none() && workload.exit().is_none() {
        return Err(Status::failed_precondition(
            "the workload's standard input is not open: the VM was started without stdin, or it was closed",
        ));
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        if !send(&sender, exec_response::Message::Started(())).await {
            return;
        }
        let output = attached_output(&workload, &start, &sender);
        let input = attached_input(&workload, &start, requests);
        tokio::select! {
            () = output => {}
            () = sender.closed() => return,
            () = async { input.await; std::future::pending().await } => {}
        }
        let status = workload.ended().await.status.unwrap_or_default();
        send(&sender, exec_response::Message::Exit(status)).await;
    });
    Ok(ReceiverStream::new(receiver))
}

/// New output of the streams that are wanted, until its end; with none wanted, until the workload's end.
async fn attached_output(workload: &Workload, start: &ExecStart, sender: &Sender) {
    if !start.stdout && !start.stderr {
        workload.ended().await;
        return;
    }
    let mut reader = workload.output.read_new();
    while let Some(chunk) = reader.next().await {
        let message = match chunk.stream() {
            OutputStream::Stdout if start.stdout => exec_response::Message::Stdout(chunk.data),
            OutputStream::Stderr if start.stderr => exec_response::Message::Stderr(chunk.data),
            _ => continue,
        };
        if !send(sender, message).await {
            return;
        }
    }
}

/// Input of one attachment. Its end leaves the workload's standard input open for the next one; only `close_stdin`
/// closes it.
async fn attached_input(workload: &Workload, start: &ExecStart, requests: Streaming<ExecRequest>) {
    let stdin = workload.stdin().filter(|_| start.stdin);
    let close = || {
        if start.stdin && workload.terminal.is_none() {
            workload.close_stdin();
        }
    };
    input(requests, stdin, workload.terminal.clone(), &workload.child, close).await;
}
