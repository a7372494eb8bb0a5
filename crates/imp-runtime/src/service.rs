//! The runtime's gRPC service: each call is a call of the engine, or a stream that is handed on.

use crate::{
    engine::{Engine, PutError},
    node_info,
    vm::{Guest, Vm},
};
use futures::{Stream, StreamExt as _, stream};
use imp_proto::v1::{self as pb, console_request, exec_request, exec_response, runtime_server::Runtime};
use std::{pin::Pin, sync::Arc, time::Duration};
use tokio::sync::{broadcast::error::RecvError, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Messages between a stream's source and the network: more would only hide that the reader is slow.
const IN_FLIGHT: usize = 4;
/// A guest that runs and is not connected is waited for so long: taking it up after a restart takes milliseconds.
const CONNECT: Duration = Duration::from_secs(10);

/// The service.
#[derive(Clone, Debug)]
pub struct RuntimeService {
    engine: Engine,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl RuntimeService {
    /// Serves an engine.
    #[must_use]
    pub fn new(engine: Engine) -> Self {
        Self { engine }
    }

    fn vm(&self, vm: Option<&pb::VmRef>) -> Result<Arc<Vm>, Status> {
        let vm = vm.ok_or_else(|| Status::invalid_argument("the request names no VM"))?;
        self.engine.vm(&vm.uid).ok_or_else(|| {
            Status::not_found(format!("VM {}/{} ({}) is not on this node", vm.namespace, vm.name, vm.uid))
        })
    }

    /// Reads a stream's first message, which names the VM.
    async fn start(
        &self,
        requests: &mut Streaming<pb::ExecRequest>,
    ) -> Result<(Arc<Vm>, pb::ExecStart), Status> {
        match requests.message().await?.and_then(|m| m.message) {
            Some(exec_request::Message::Start(start)) => Ok((self.vm(start.vm.as_ref())?, start)),
            _ => Err(Status::invalid_argument("the first message must be `start`")),
        }
    }
}

fn with_start(
    start: pb::ExecStart,
    rest: Streaming<pb::ExecRequest>,
) -> impl Stream<Item = pb::ExecRequest> + Send + 'static {
    let first = pb::ExecRequest { message: Some(exec_request::Message::Start(start)) };
    // A client that goes away ends the stream; the guest sees that and acts on it.
    stream::iter([first]).chain(rest.filter_map(|message| async { message.ok() }))
}

#[tonic::async_trait]
impl Runtime for RuntimeService {
    type WatchVmsStream = Answers<pb::WatchVmsResponse>;
    type ExecStream = Answers<pb::ExecResponse>;
    type AttachStream = Answers<pb::ExecResponse>;
    type LogsStream = Answers<pb::LogsResponse>;
    type ConsoleStream = Answers<pb::ConsoleResponse>;

    async fn put_vm(
        &self,
        request: Request<pb::PutVmRequest>,
    ) -> Result<Response<pb::PutVmResponse>, Status> {
        let pb::PutVmRequest { spec, secrets } = request.into_inner();
        let spec = spec.ok_or_else(|| Status::invalid_argument("the request has no spec"))?;
        let status = self.engine.put(spec, secrets).map_err(|error| match error {
            PutError::Invalid(message) => Status::invalid_argument(message),
            PutError::Denied(denied) => Status::failed_precondition(denied.to_string()),
            PutError::Unreadable(_) => Status::failed_precondition(error.to_string()),
            PutError::Disk(_) => Status::resource_exhausted(error.to_string()),
        })?;
        Ok(Response::new(pb::PutVmResponse { status: Some(status) }))
    }

    async fn delete_vm(
        &self,
        request: Request<pb::DeleteVmRequest>,
    ) -> Result<Response<pb::DeleteVmResponse>, Status> {
        let request = request.into_inner();
        let uid = request.vm.ok_or_else(|| Status::invalid_argument("the request names no VM"))?.uid;
        let gone = self
            .engine
            .delete(&uid, request.grace_seconds)
            .map_err(|e| Status::resource_exhausted(format!("cannot write the VM's record: {e}")))?;
        Ok(Response::new(pb::DeleteVmResponse { gone }))
    }

    async fn watch_vms(
        &self,
        _: Request<pb::WatchVmsRequest>,
    ) -> Result<Response<Self::WatchVmsStream>, Status> {
        let watcher = self.engine.watch();
        let events = stream::unfold((self.engine.clone(), watcher), |(engine, mut watcher)| async move {
            let events = watcher.next(&engine.shared().hub).await?;
            Some((stream::iter(events), (engine, watcher)))
        });
        let answers = events.flatten().map(|event| Ok(pb::WatchVmsResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(answers)))
    }

    async fn list_vms(
        &self,
        _: Request<pb::ListVmsRequest>,
    ) -> Result<Response<pb::ListVmsResponse>, Status> {
        let (specs, vms) = self.engine.list().into_iter().unzip();
        Ok(Response::new(pb::ListVmsResponse { vms, specs }))
    }

    async fn exec(
        &self,
        request: Request<Streaming<pb::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let mut requests = request.into_inner();
        let (vm, start) = self.start(&mut requests).await?;
        if !vm.spec().guest_agent {
            return Err(Status::failed_precondition(
                "exec is off for this VM (spec.guestAgent.enabled is false)",
            ));
        }
        let mut guest = connected(&vm).await?;
        let answers = guest.exec(with_start(start, requests)).await?.into_inner();
        Ok(Response::new(Box::pin(answers)))
    }

    async fn attach(
        &self,
        request: Request<Streaming<pb::ExecRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut requests = request.into_inner();
        let (vm, start) = self.start(&mut requests).await?;
        let (answers, receiver) = mpsc::channel(IN_FLIGHT);
        // Output comes from the log, which has it from the beginning; input, signals and sizes go to the guest.
        let to_guest = vm.guest().map(|mut guest| {
            let quiet = pb::ExecStart { stdout: false, stderr: false, ..start.clone() };
            tokio::spawn(async move {
                let Ok(attached) = guest.attach(with_start(quiet, requests)).await else { return };
                let mut attached = attached.into_inner();
                while let Ok(Some(_)) = attached.message().await {}
            })
        });
        tokio::spawn(async move {
            let result = attached(&vm, &start, &answers).await;
            if let Some(task) = to_guest {
                task.abort();
            }
            if let Err(status) = result {
                // A client that is gone needs no answer.
                let _ = answers.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn logs(&self, request: Request<pb::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let vm = self.vm(request.vm.as_ref())?;
        let (answers, receiver) = mpsc::channel(IN_FLIGHT);
        tokio::spawn(async move {
            if let Err(status) = logs(&vm, request, &answers).await {
                let _ = answers.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn console(
        &self,
        request: Request<Streaming<pb::ConsoleRequest>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let mut requests = request.into_inner();
        let Some(console_request::Message::Start(vm)) = requests.message().await?.and_then(|m| m.message)
        else {
            return Err(Status::invalid_argument("the first message must be `start`"));
        };
        let vm = self.vm(Some(&vm))?;
        let (output, input) = vm.console.join();
        let tail = imp_vmm::console_log::tail(vm.console.path(), 50).join("\r\n");
        let first = (!tail.is_empty()).then(|| format!("{tail}\r\n").into());
        tokio::spawn(async move {
            while let Ok(Some(message)) = requests.message().await {
                if let Some(console_request::Message::Input(bytes)) = message.message
                    && input.send(bytes).await.is_err()
                {
                    return;
                }
            }
        });
        let rest = stream::unfold(output, |mut output| async move {
            loop {
                match output.recv().await {
                    Ok(bytes) => return Some((bytes, output)),
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return None,
                }
            }
        });
        let answers = stream::iter(first).chain(rest).map(|output| Ok(pb::ConsoleResponse { output }));
        Ok(Response::new(Box::pin(answers)))
    }

    async fn node_info(
        &self,
        _: Request<pb::NodeInfoRequest>,
    ) -> Result<Response<pb::NodeInfoResponse>, Status> {
        Ok(Response::new(node_info::collect(self.engine.shared()).await))
    }

    async fn list_images(
        &self,
        _: Request<pb::ListImagesRequest>,
    ) -> Result<Response<pb::ListImagesResponse>, Status> {
        let images = self.engine.shared().images.list().await.map_err(|e| Status::internal(e.to_string()))?;
        let images = images.into_iter().map(|image| pb::Image {
            references: image.references,
            digest: image.digest,
            disk_bytes: image.disk_bytes,
            last_used: Some(image.last_used.into()),
            in_use: image.in_use,
        });
        Ok(Response::new(pb::ListImagesResponse { images: images.collect() }))
    }
}

/// The guest of a VM that runs. Just after the start of this process, or of a channel that broke, it is about to be connected.
async fn connected(vm: &Vm) -> Result<Guest, Status> {
    if vm.status().state() == pb::VmState::Running
        && let Ok(guest) = tokio::time::timeout(CONNECT, vm.wait_guest()).await
    {
        return Ok(guest);
    }
    vm.guest().ok_or_else(|| {
        let state = vm.status().state().as_str_name().trim_start_matches("VM_STATE_").to_lowercase();
        Status::failed_precondition(format!("the VM's guest is not connected (the VM is {state})"))
    })
}

type Sender<T> = mpsc::Sender<Result<T, Status>>;

fn gone<T>(_: T) -> Status {
    Status::cancelled("the client is gone")
}

fn unreadable(error: std::io::Error) -> Status {
    Status::internal(format!("the VM's log cannot be read: {error}"))
}

/// The workload's output from its beginning, then how it ended.
async fn attached(vm: &Vm, start: &pb::ExecStart, answers: &Sender<pb::ExecResponse>) -> Result<(), Status> {
    use exec_response::Message;
    let send = |message: Message| answers.send(Ok(pb::ExecResponse { message: Some(message) }));
    send(Message::Started(())).await.map_err(gone)?;
    let mut log = vm.log.reader();
    while let Some(chunk) = log.follow(&vm.log).await.map_err(unreadable)? {
        let message = match chunk.stream() {
            pb::OutputStream::Stderr if start.stderr => Message::Stderr(chunk.data),
            pb::OutputStream::Stderr => continue,
            _ if start.stdout => Message::Stdout(chunk.data),
            _ => continue,
        };
        send(message).await.map_err(gone)?;
    }
    // The log ends before the VM has; its end is told with everything known of it.
    let mut wishes = vm.shared.hub.watch();
    let status = loop {
        let status = vm.status();
        if matches!(status.state(), pb::VmState::Stopped | pb::VmState::Failed) {
            break status;
        }
        wishes.next(&vm.shared.hub).await.ok_or_else(|| Status::unavailable("the runtime ends"))?;
    };
    let exit = status.exit.and_then(|e| e.status);
    match (exit, status.failure) {
        (Some(exit), _) => send(Message::Exit(exit)).await.map_err(gone),
        (None, Some(failure)) => Err(Status::aborted(failure.message)),
        (None, None) => {
            let stopped = pb::ExitStatus { code: 137, signal: 9, ..Default::default() };
            send(Message::Exit(stopped)).await.map_err(gone)
        }
    }
}

async fn logs(vm: &Vm, request: pb::LogsRequest, answers: &Sender<pb::LogsResponse>) -> Result<(), Status> {
    let mut left = request.limit_bytes.unwrap_or(u64::MAX);
    let since = request.since.map(|t| (t.seconds, t.nanos));
    let mut reader = vm.log.reader();
    let mut seen = None;
    if let Some(lines) = request.tail_lines {
        for chunk in vm.log.skip_to_tail(lines).map_err(unreadable)? {
            seen = Some(chunk.sequence + chunk.data.len() as u64);
            if !send_log(chunk, since, &mut left, answers).await? {
                return Ok(());
            }
        }
        // What the tail left out is read past, up to where it ended.
        while let Some(chunk) = reader.read(&vm.log).map_err(unreadable)? {
            if seen.is_some_and(|end| chunk.sequence >= end)
                && !send_log(chunk, since, &mut left, answers).await?
            {
                return Ok(());
            }
        }
    }
    loop {
        let chunk = if request.follow { reader.follow(&vm.log).await } else { reader.read(&vm.log) };
        let Some(chunk) = chunk.map_err(unreadable)? else { return Ok(()) };
        if !send_log(chunk, since, &mut left, answers).await? {
            return Ok(());
        }
    }
}

/// Sends a piece unless it is too old; false once the limit is reached.
async fn send_log(
    chunk: pb::OutputChunk,
    since: Option<(i64, i32)>,
    left: &mut u64,
    answers: &Sender<pb::LogsResponse>,
) -> Result<bool, Status> {
    let time = chunk.time.map(|t| (t.seconds, t.nanos));
    if since.is_some() && time < since {
        return Ok(true);
    }
    let length = usize::try_from(*left).unwrap_or(usize::MAX).min(chunk.data.len());
    *left -= length as u64;
    let data = chunk.data.slice(..length);
    let response = pb::LogsResponse { stream: chunk.stream, data, time: chunk.time };
    answers.send(Ok(response)).await.map_err(gone)?;
    Ok(*left > 0)
}
