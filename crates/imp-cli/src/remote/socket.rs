//! Kubernetes' channels over a WebSocket, the client's side.

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use hyper_util::rt::TokioIo;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use super::cluster::Cluster;

type Stream = WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;

/// What the other side says.
pub(super) enum Said {
    Stdout(Bytes),
    Stderr(Bytes),
    Outcome(Box<Status>),
}

/// Where we write.
pub(super) struct Sender {
    sink: SplitSink<Stream, Message>,
    can_close: bool,
}

/// Where we read.
pub(super) struct Receiver(SplitStream<Stream>);

/// Opens a stream.
///
/// # Errors
/// When the API server or Imp refuses.
pub(super) async fn open(
    cluster: &Cluster,
    name: &str,
    subresource: &str,
    options: &[(&str, String)],
) -> anyhow::Result<(Sender, Receiver)> {
    let request = cluster.request(name, subresource, options)?;
    let connection =
        cluster.client.connect(request).await.map_err(|error| cluster.explain(error, name, subresource))?;
    let can_close = connection.supports_stream_close();
    let (sink, stream) = connection.into_stream().split();
    Ok((Sender { sink, can_close }, Receiver(stream)))
}

impl Sender {
    async fn send(&mut self, channel: u8, data: &[u8]) -> anyhow::Result<()> {
        let mut message = Vec::with_capacity(1 + data.len());
        message.push(channel);
        message.extend_from_slice(data);
        self.sink.send(Message::Binary(message.into())).await.context("the connection broke")
    }

    /// Bytes for standard input.
    ///
    /// # Errors
    /// When the connection broke.
    pub(super) async fn stdin(&mut self, data: &[u8]) -> anyhow::Result<()> {
        self.send(STDIN, data).await
    }

    /// Standard input ended.
    ///
    /// # Errors
    /// When the connection broke.
    pub(super) async fn close_stdin(&mut self) -> anyhow::Result<()> {
        if self.can_close { self.send(CLOSE, &[STDIN]).await } else { Ok(()) }
    }

    /// The terminal's size.
    ///
    /// # Errors
    /// When the connection broke.
    pub(super) async fn resize(&mut self, (width, height): (u32, u32)) -> anyhow::Result<()> {
        self.send(RESIZE, format!("{{\"Width\":{width},\"Height\":{height}}}").as_bytes()).await
    }

    /// Says goodbye.
    pub(super) async fn close(mut self) {
        // The other side may be gone already.
        let _ = self.sink.close().await;
    }
}

impl Receiver {
    /// The next thing that the other side says.
    ///
    /// # Errors
    /// When the connection ended without an outcome.
    pub(super) async fn next(&mut self) -> anyhow::Result<Said> {
        loop {
            let mut data = match self.0.next().await {
                Some(Ok(Message::Binary(data))) => data,
                Some(Ok(Message::Close(_))) | None => {
                    bail!("the connection ended without telling how the command ended")
                }
                Some(Ok(_)) => continue,
                Some(Err(error)) => return Err(anyhow!(error).context("the connection broke")),
            };
            if data.len() < 2 {
                continue;
            }
            match data.split_to(1)[0] {
                STDOUT => return Ok(Said::Stdout(data)),
                STDERR => return Ok(Said::Stderr(data)),
                ERROR => {
                    return Ok(Said::Outcome(Box::new(
                        serde_json::from_slice(&data).context("the outcome is not understood")?,
                    )));
                }
                _ => {}
            }
        }
    }
}

/// The exit code that an outcome tells, and what else a person should know.
///
/// # Errors
/// When the command did not end by itself.
pub(super) fn exit_code(status: &Status) -> anyhow::Result<(u8, Option<String>)> {
    if status.status.as_deref() == Some("Success") {
        return Ok((0, None));
    }
    let message = status.message.clone().unwrap_or_default();
    if status.reason.as_deref() != Some("NonZeroExitCode") {
        bail!("{message}");
    }
    let causes = status.details.iter().flat_map(|details| details.causes.iter().flatten());
    let code = causes
        .filter(|cause| cause.reason.as_deref() == Some("ExitCode"))
        .find_map(|cause| cause.message.as_ref()?.parse().ok());
    let code: u8 =
        code.ok_or_else(|| anyhow!("the command failed and its exit code is not told: {message}"))?;
    // "…exit code: 127: no such file" tells more than the code.
    let more = message.split_once(&format!("exit code: {code}: ")).map(|(_, more)| more.to_owned());
    Ok((code, more))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(json: serde_json::Value) -> Status {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn exit_codes_are_taken_from_the_cause() {
        let failed = |message: &str| {
            outcome(serde_json::json!({"status": "Failure", "reason": "NonZeroExitCode", "message": message,
                "details": {"causes": [{"reason": "ExitCode", "message": "127"}]}}))
        };
        assert_eq!(exit_code(&outcome(serde_json::json!({"status": "Success"}))).unwrap(), (0, None));
        assert_eq!(
            exit_code(&failed("command terminated with non-zero exit code: 127")).unwrap(),
            (127, None)
        );
        let more =
            exit_code(&failed("command terminated with non-zero exit code: 127: no such file")).unwrap();
        assert_eq!(more, (127, Some("no such file".to_owned())));
        let broken = outcome(
            serde_json::json!({"status": "Failure", "reason": "InternalError", "message": "the node is gone"}),
        );
        assert!(exit_code(&broken).unwrap_err().to_string().contains("the node is gone"));
    }
}
