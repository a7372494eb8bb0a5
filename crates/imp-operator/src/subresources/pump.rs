//! Forwards between a client's WebSocket and a node's gRPC stream. Nothing is buffered beyond a few messages: who does
//! not read holds up who writes, in both directions, each on its own.

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use imp_proto::v1::{
    ConsoleRequest, ConsoleResponse, ExecRequest, ExecResponse, console_request, exec_request, exec_response,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use tokio::sync::mpsc;
use tonic::Streaming;

use super::channels::{self, Input, STDERR, STDOUT};

/// Messages on their way to the node.
pub(super) const QUEUE: usize = 4;

/// What a node's message means for the client.
pub(super) enum Output {
    Data(u8, Bytes),
    Outcome(Box<Status>),
    Nothing,
}

/// A kind of stream: how its messages translate.
pub(super) trait Kind {
    type Request: Send + 'static;
    type Answer: Send + 'static;
    /// `None`: not for the node.
    fn request(input: Input) -> Option<Self::Request>;
    fn output(answer: Self::Answer) -> Output;
    /// What the end of the node's stream means if no outcome came before.
    fn end() -> Status;
}

/// Exec and attach.
pub(super) struct Exec;

impl Kind for Exec {
    type Request = ExecRequest;
    type Answer = ExecResponse;

    fn request(input: Input) -> Option<ExecRequest> {
        let message = match input {
            Input::Stdin(data) => exec_request::Message::Stdin(data),
            Input::Resize(size) => exec_request::Message::Resize(size),
            Input::CloseStdin => exec_request::Message::CloseStdin(()),
            Input::Nothing => return None,
        };
        Some(ExecRequest { message: Some(message) })
    }

    fn output(answer: ExecResponse) -> Output {
        match answer.message {
            Some(exec_response::Message::Stdout(data)) => Output::Data(STDOUT, data),
            Some(exec_response::Message::Stderr(data)) => Output::Data(STDERR, data),
            Some(exec_response::Message::Exit(exit)) => Output::Outcome(Box::new(channels::outcome(&exit))),
            Some(exec_response::Message::Started(())) | None => Output::Nothing,
        }
    }

    fn end() -> Status {
        channels::broken("the VM's node ended the stream without telling how the command ended")
    }
}

/// The serial console.
pub(super) struct Console;

impl Kind for Console {
    type Request = ConsoleRequest;
    type Answer = ConsoleResponse;

    fn request(input: Input) -> Option<ConsoleRequest> {
        match input {
            Input::Stdin(data) => {
                Some(ConsoleRequest { message: Some(console_request::Message::Input(data)) })
            }
            // A serial line has neither a size nor an end.
            Input::Resize(_) | Input::CloseStdin | Input::Nothing => None,
        }
    }

    fn output(answer: ConsoleResponse) -> Output {
        Output::Data(STDOUT, answer.output)
    }

    fn end() -> Status {
        Status { status: Some("Success".to_owned()), ..Status::default() }
    }
}

/// Forwards until either side ends. Dropping the node's streams tells the node that the client is gone.
pub(super) async fn pump<K: Kind>(
    socket: WebSocket,
    requests: mpsc::Sender<K::Request>,
    mut answers: Streaming<K::Answer>,
) {
    let (mut sink, mut stream) = socket.split();
    let outcome = tokio::select! {
        outcome = to_client::<K>(&mut sink, &mut answers) => outcome,
        outcome = to_node::<K>(&mut stream, requests) => outcome,
    };
    // A client that is gone hears nothing, and nothing is to be done about it.
    if let Some(status) = outcome {
        let _ = sink.send(Message::Binary(channels::encode_outcome(&status))).await;
        let close = CloseFrame { code: axum::extract::ws::close_code::NORMAL, reason: "".into() };
        let _ = sink.send(Message::Close(Some(close))).await;
        let _ = sink.close().await;
    }
}

/// `None`: the client is gone.
async fn to_client<K: Kind>(
    sink: &mut SplitSink<WebSocket, Message>,
    answers: &mut Streaming<K::Answer>,
) -> Option<Status> {
    loop {
        match answers.message().await {
            Ok(Some(answer)) => match K::output(answer) {
                Output::Data(channel, data) => {
                    sink.send(Message::Binary(channels::encode(channel, &data))).await.ok()?;
                }

                Output::Outcome(status) => return Some(*status),
                Output::Nothing => {}
            },
            Ok(None) => return Some(K::end()),
            Err(status) => {
                return Some(channels::broken(&format!(
                    "the stream from the VM's node broke: {}",
                    status.message()
                )));
            }
        }
    }
}

/// Never returns while the client is there and makes sense. `None`: the client is gone.
async fn to_node<K: Kind>(
    stream: &mut SplitStream<WebSocket>,
    requests: mpsc::Sender<K::Request>,
) -> Option<Status> {
    while let Some(Ok(message)) = stream.next().await {
        let data = match message {
            Message::Binary(data) => data,
            Message::Text(_) => {
                return Some(channels::broken("a text message came; this protocol has binary ones only"));
            }
            Message::Close(_) => return None,
            Message::Ping(_) | Message::Pong(_) => continue,
        };
        let input = match channels::decode(data) {
            Ok(input) => input,
            Err(error) => return Some(channels::broken(&error.to_string())),
        };
        let Some(request) = K::request(input) else { continue };
        if requests.send(request).await.is_err() {
            // The node reads no more; its outcome is on the way to the client.
            std::future::pending::<()>().await;
        }
    }
    None
}
