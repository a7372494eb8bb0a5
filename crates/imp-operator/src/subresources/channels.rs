//! Kubernetes' channels over WebSocket (`v5.channel.k8s.io`, and `v4` without close): the first byte of each binary
//! message names the channel. As in k8s.io/apimachinery `pkg/util/remotecommand` and `pkg/util/httpstream/wsstream`.

use bytes::{BufMut as _, Bytes, BytesMut};
use imp_proto::v1::{ExitStatus, TerminalSize};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Status, StatusCause, StatusDetails};
use serde::Deserialize;

/// Newest first.
pub const PROTOCOLS: [&str; 2] = ["v5.channel.k8s.io", "v4.channel.k8s.io"];
/// Standard output.
pub const STDOUT: u8 = 1;
/// Standard error.
pub const STDERR: u8 = 2;
/// The outcome, a Status.
pub const ERROR: u8 = 3;

/// What a client's message says.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// Bytes for standard input.
    Stdin(Bytes),
    /// The terminal has another size.
    Resize(TerminalSize),
    /// Standard input ended (v5).
    CloseStdin,
    /// Nothing: an empty message, by which some clients open a channel.
    Nothing,
}

/// A client's message that is none.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadInput {
    /// A channel that clients do not write to.
    #[error(
        "a message came on channel {0}, to which a client does not write: 0 is standard input, 4 the terminal's size, 255 closes a channel"
    )]
    Channel(u8),
    /// A size that is none.
    #[error("a message on channel 4 is no terminal size such as {{\"Width\":80,\"Height\":24}}")]
    Resize,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Size {
    width: u16,
    height: u16,
}

/// Reads a client's message.
///
/// # Errors
/// When it is on another channel or its size is none.
pub fn decode(mut message: Bytes) -> Result<Input, BadInput> {
    if message.is_empty() {
        return Ok(Input::Nothing);
    }
    let channel = message.split_to(1)[0];
    match channel {
        0 if message.is_empty() => Ok(Input::Nothing),
        0 => Ok(Input::Stdin(message)),
        4 if message.is_empty() => Ok(Input::Nothing),
        4 => {
            let size: Size = serde_json::from_slice(&message).map_err(|_| BadInput::Resize)?;
            Ok(Input::Resize(TerminalSize { width: size.width.into(), height: size.height.into() }))
        }
        255 if message.first() == Some(&0) => Ok(Input::CloseStdin),
        255 => Ok(Input::Nothing),
        other => Err(BadInput::Channel(other)),
    }
}

/// A message for the client.
#[must_use]
pub fn encode(channel: u8, data: &[u8]) -> Bytes {
    let mut message = BytesMut::with_capacity(1 + data.len());
    message.put_u8(channel);
    message.put_slice(data);
    message.freeze()
}

/// The outcome of a command as Kubernetes tells it: Success, or Failure with reason NonZeroExitCode and the exit code as
/// a cause.
#[must_use]
pub fn outcome(exit: &ExitStatus) -> Status {
    let code = if exit.signal == 0 { exit.code } else { 128 + exit.signal };
    if code == 0 {
        return Status { status: Some("Success".to_owned()), ..Status::default() };
    }
    let mut message = format!("command terminated with non-zero exit code: {code}");
    if !exit.message.is_empty() {
        message = format!("{message}: {}", exit.message);
    }
    let cause =
        StatusCause { reason: Some("ExitCode".to_owned()), message: Some(code.to_string()), field: None };
    Status {
        status: Some("Failure".to_owned()),
        reason: Some("NonZeroExitCode".to_owned()),
        message: Some(message),
        details: Some(StatusDetails { causes: Some(vec![cause]), ..StatusDetails::default() }),
        ..Status::default()
    }
}

/// The outcome of a stream that broke.
#[must_use]
pub fn broken(message: &str) -> Status {
    Status {
        status: Some("Failure".to_owned()),
        reason: Some("InternalError".to_owned()),
        message: Some(message.to_owned()),
        code: Some(500),
        ..Status::default()
    }
}

/// The message that carries an outcome.
#[must_use]
pub fn encode_outcome(status: &Status) -> Bytes {
    // A Status of ours always serialises; were it not to, the client sees an end without an outcome.
    encode(ERROR, &serde_json::to_vec(status).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_kubectl_sends_is_understood() {
        assert_eq!(decode(Bytes::from_static(b"\0ls\n")), Ok(Input::Stdin(Bytes::from_static(b"ls\n"))));
        let resize = decode(Bytes::from_static(b"\x04{\"Width\":80,\"Height\":24}"));
        assert_eq!(resize, Ok(Input::Resize(TerminalSize { width: 80, height: 24 })));
        assert_eq!(decode(Bytes::from_static(&[255, 0])), Ok(Input::CloseStdin));
        assert_eq!(decode(Bytes::from_static(&[0])), Ok(Input::Nothing));
        assert_eq!(decode(Bytes::from_static(&[1, 2])), Err(BadInput::Channel(1)));
        assert_eq!(decode(Bytes::from_static(b"\x04big")), Err(BadInput::Resize));
    }

    #[test]
    fn fr60_the_exit_code_is_a_cause() {
        let status =
            serde_json::to_value(outcome(&ExitStatus { code: 42, ..ExitStatus::default() })).unwrap();
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(
            status["details"]["causes"][0],
            serde_json::json!({"reason": "ExitCode", "message": "42"})
        );
        let killed = outcome(&ExitStatus { code: 0, signal: 9, ..ExitStatus::default() });
        assert!(killed.message.unwrap().contains("137"));
        assert_eq!(outcome(&ExitStatus::default()).status.as_deref(), Some("Success"));
    }

    proptest! {
        #[test]
        fn no_message_is_too_strange(message: Vec<u8>) {
            let _ = decode(Bytes::from(message));
        }

        #[test]
        fn standard_input_arrives_as_sent(data in prop::collection::vec(any::<u8>(), 1..100)) {
            prop_assert_eq!(decode(encode(0, &data)), Ok(Input::Stdin(Bytes::from(data))));
        }
    }
}
