//! Serves VMs' streams to the operator: `NodeStreams` over mutual TLS, forwarded message by message to the runtime's
//! socket. Both sides are HTTP/2, whose flow control makes a slow reader hold the writer from end to end.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use imp_proto::v1::node_streams_server::{NodeStreams, NodeStreamsServer};
use imp_proto::v1::{
    ConsoleRequest, ConsoleResponse, ExecRequest, ExecResponse, LogsRequest, LogsResponse, VmRef,
    console_request, exec_request,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use crate::context::Context;
use crate::runtime::Client;
use crate::tls::ServerTls;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Forwards streams of VMs that are bound to this node.
#[derive(Clone, Debug)]
pub struct Proxy {
    context: Arc<Context>,
    runtime: watch::Receiver<Option<Client>>,
}

impl Proxy {
    /// A proxy to the runtime that `runtime` names.
    #[must_use]
    pub fn new(context: Arc<Context>, runtime: watch::Receiver<Option<Client>>) -> Self {
        Self { context, runtime }
    }

    /// The runtime, if this very VM is bound to this node.
    fn runtime(&self, vm: Option<&VmRef>, kind: &'static str) -> Result<Client, Status> {
        let vm = vm.ok_or_else(|| Status::invalid_argument("the request names no VM"))?;
        if !self.context.bound.contains(vm) {
            return Err(Status::not_found(format!(
                "ImpVM {}/{} with UID {} is not bound to node {}",
                vm.namespace, vm.name, vm.uid, self.context.node
            )));
        }
        self.context.metrics.opened(kind);
        let client = self.runtime.borrow().clone();
        client.ok_or_else(|| {
            Status::unavailable(format!(
                "the runtime of node {} does not answer; the VM runs on",
                self.context.node
            ))
        })
    }
}

/// The rest of a client's messages after the first; a broken client ends the stream.
fn rest<T: Send + 'static>(first: T, messages: Streaming<T>) -> impl Stream<Item = T> + Send + 'static {
    futures::stream::iter([first]).chain(
        messages
            .take_while(|message| std::future::ready(message.is_ok()))
            .filter_map(async |message| message.ok()),
    )
}

async fn first<T>(messages: &mut Streaming<T>) -> Result<T, Status> {
    messages
        .message()
        .await?
        .ok_or_else(|| Status::invalid_argument("the stream ended before its first message"))
}

fn exec_target(message: &ExecRequest) -> Option<&VmRef> {
    match &message.message {
        Some(exec_request::Message::Start(start)) => start.vm.as_ref(),
        _ => None,
    }
}

#[tonic::async_trait]
impl NodeStreams for Proxy {
    type ExecStream = Answers<ExecResponse>;
    async fn exec(
        &self,
        request: Request<Streaming<ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let mut messages = request.into_inner();
        let start = first(&mut messages).await?;
        let mut runtime = self.runtime(exec_target(&start), "exec")?;
        Ok(Response::new(runtime.exec(rest(start, messages)).await?.into_inner().boxed()))
    }

    type AttachStream = Answers<ExecResponse>;
    async fn attach(
        &self,
        request: Request<Streaming<ExecRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut messages = request.into_inner();
        let start = first(&mut messages).await?;
        let mut runtime = self.runtime(exec_target(&start), "attach")?;
        Ok(Response::new(runtime.attach(rest(start, messages)).await?.into_inner().boxed()))
    }

    type LogsStream = Answers<LogsResponse>;
    async fn logs(&self, request: Request<LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let mut runtime = self.runtime(request.vm.as_ref(), "logs")?;
        Ok(Response::new(runtime.logs(request).await?.into_inner().boxed()))
    }

    type ConsoleStream = Answers<ConsoleResponse>;
    async fn console(
        &self,
        request: Request<Streaming<ConsoleRequest>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let mut messages = request.into_inner();
        let start = first(&mut messages).await?;
        let target = match &start.message {
            Some(console_request::Message::Start(vm)) => Some(vm),
            _ => None,
        };
        let mut runtime = self.runtime(target, "console")?;
        Ok(Response::new(runtime.console(rest(start, messages)).await?.into_inner().boxed()))
    }
}

/// Accepts the operator's connections for good.
pub async fn serve(listener: TcpListener, tls: ServerTls, proxy: Proxy) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let (tls, proxy) = (tls.clone(), proxy.clone());
                tokio::spawn(async move {
                    if let Err(error) = connection(stream, &tls, proxy).await {
                        tracing::info!(%peer, error = &*error as &dyn std::error::Error, "a connection for streams ended");
                    }
                });
            }
            // Out of file descriptors, most likely: others must end first.
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "no connection for streams can be accepted"
                );
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    tls: &ServerTls,
    proxy: Proxy,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    stream.set_nodelay(true)?;
    let stream = tls.accept(stream).await?;
    let service = TowerToHyperService::new(NodeStreamsServer::new(proxy));
    let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    builder
        .timer(hyper_util::rt::TokioTimer::new())
        .keep_alive_interval(Some(std::time::Duration::from_secs(20)))
        .keep_alive_timeout(std::time::Duration::from_secs(10))
        .max_concurrent_streams(256);
    builder.serve_connection(TokioIo::new(stream), service).await?;
    Ok(())
}
