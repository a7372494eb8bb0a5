//! The `Guest` service on the channel.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::stream::BoxStream;
use futures::{StreamExt as _, stream};
use imp_proto::v1::guest_server::{Guest, GuestServer};
use imp_proto::v1::{
    CheckResponse, ConfigureRequest, ConfigureResponse, CopyChunk, CopyFromRequest, CopyToRequest,
    CopyToResponse, ExecCheckRequest, ExecRequest, ExecResponse, GuestEvent, GuestWatchRequest,
    HttpCheckRequest, OutputChunk, OutputRequest, PowerOffRequest, PowerOffResponse, StopRequest,
    StopResponse, UsageRequest, UsageResponse,
};
use tokio::time::timeout;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status, Streaming};

use crate::agent::Agent;
use crate::{channel, checks, configure, copy, exec, power, usage};

/// Serves one connection of the host after another, until the server itself fails.
pub(crate) async fn serve(agent: Arc<Agent>) -> Result<()> {
    tonic::transport::Server::builder()
        .serve_with_incoming(GuestServer::new(Service(agent)), channel::connections())
        .await
        .context("serve the channel")
}

struct Service(Arc<Agent>);

type Reply<T> = Result<Response<T>, Status>;
type Replies<T> = BoxStream<'static, Result<T, Status>>;

#[tonic::async_trait]
impl Guest for Service {
    async fn configure(&self, request: Request<ConfigureRequest>) -> Reply<ConfigureResponse> {
        let request = request.into_inner();
        let agent = Arc::clone(&self.0);
        let attempt = request.attempt_id.clone();
        let answer = self.0.configure_once(&attempt, || configure::configure(agent, request))?;
        Ok(Response::new(answer.await))
    }

    type WatchStream = Replies<GuestEvent>;

    async fn watch(&self, _: Request<GuestWatchRequest>) -> Reply<Self::WatchStream> {
        Ok(Response::new(WatchStream::new(self.0.events()).map(Ok).boxed()))
    }

    type ExecStream = Replies<ExecResponse>;

    async fn exec(&self, request: Request<Streaming<ExecRequest>>) -> Reply<Self::ExecStream> {
        Ok(Response::new(exec::exec(&self.0, request.into_inner()).await?.boxed()))
    }

    type AttachStream = Replies<ExecResponse>;

    async fn attach(&self, request: Request<Streaming<ExecRequest>>) -> Reply<Self::AttachStream> {
        Ok(Response::new(exec::attach(&self.0, request.into_inner()).await?.boxed()))
    }

    type OutputStream = Replies<OutputChunk>;

    async fn output(&self, request: Request<OutputRequest>) -> Reply<Self::OutputStream> {
        let reader = self.0.workload()?.output.read_from(request.into_inner().from_sequence);
        let chunks = stream::unfold(reader, |mut reader| async {
            reader.next().await.map(|chunk| (Ok(chunk), reader))
        });
        Ok(Response::new(chunks.boxed()))
    }

    async fn exec_check(&self, request: Request<ExecCheckRequest>) -> Reply<CheckResponse> {
        let machine = Arc::clone(self.0.running()?);
        Ok(Response::new(checks::exec(&machine, request.into_inner()).await))
    }

    async fn http_check(&self, request: Request<HttpCheckRequest>) -> Reply<CheckResponse> {
        let machine = Arc::clone(self.0.running()?);
        Ok(Response::new(checks::http(&machine, request.into_inner()).await))
    }

    async fn stop(&self, request: Request<StopRequest>) -> Reply<StopResponse> {
        let workload = self.0.workload()?;
        if workload.exit().is_none() {
            let grace = Duration::from_millis(request.into_inner().grace_milliseconds.into());
            workload.child.kill(workload.stop_signal, false)?;
            if timeout(grace, workload.ended()).await.is_err() {
                self.0.machine()?.launcher.cgroup.kill()?;
            }
        }
        Ok(Response::new(StopResponse { exit: Some(workload.ended().await) }))
    }

    async fn power_off(&self, _: Request<PowerOffRequest>) -> Reply<PowerOffResponse> {
        let machine = self.0.machine().ok().cloned();
        // Goes on when the caller goes away.
        let settled = tokio::task::spawn_blocking(move || {
            power::settle(machine.as_deref());
            power::off_soon();
        });
        settled.await.map_err(|e| Status::internal(e.to_string()))?;
        Ok(Response::new(PowerOffResponse {}))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Reply<UsageResponse> {
        let machine = self.0.machine().ok().cloned();
        let usage = tokio::task::spawn_blocking(move || usage::usage(machine.as_deref()));
        let usage = usage.await.map_err(|e| Status::internal(e.to_string()))?;
        Ok(Response::new(UsageResponse {
            usage: Some(usage.map_err(|e| Status::internal(format!("{e:#}")))?),
        }))
    }

    async fn copy_to(&self, request: Request<Streaming<CopyToRequest>>) -> Reply<CopyToResponse> {
        copy::copy_to(Arc::clone(self.0.running()?), request.into_inner()).await?;
        Ok(Response::new(CopyToResponse {}))
    }

    type CopyFromStream = Replies<CopyChunk>;

    async fn copy_from(&self, request: Request<CopyFromRequest>) -> Reply<Self::CopyFromStream> {
        let machine = Arc::clone(self.0.machine()?);
        Ok(Response::new(copy::copy_from(machine, &request.into_inner().path)?.boxed()))
    }
}
