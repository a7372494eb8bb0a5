//! QEMU's monitor protocol (docs/interop/qmp-spec): one JSON object a line.

use super::{command::QMP_SOCKET, io_error};
use crate::VmmError;
use camino::Utf8Path;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
};

/// Longest line that is read; QEMU's own answers are far shorter.
const MAX_LINE: u64 = 1 << 20;

/// A connection in command mode. QEMU serves one at a time, so it is kept only as long as it is needed.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: BufReader<UnixStream>,
}

/// Connects, reads the greeting and enters command mode. The caller sets the deadline.
pub(super) async fn connect(run_dir: &Utf8Path) -> Result<Qmp, VmmError> {
    let path = run_dir.join(QMP_SOCKET);
    let stream = UnixStream::connect(&path).await.map_err(io_error(format!("cannot connect to {path}")))?;
    let mut qmp = Qmp { stream: BufReader::new(stream) };
    let greeting = qmp.read().await?;
    if greeting.get("QMP").is_none() {
        return Err(VmmError::Refused { command: "connection".to_owned(), message: greeting.to_string() });
    }
    qmp.execute("qmp_capabilities").await?;
    Ok(qmp)
}

impl Qmp {
    async fn read(&mut self) -> Result<Value, VmmError> {
        let mut line = String::new();
        let read = (&mut self.stream).take(MAX_LINE).read_line(&mut line).await;
        let length = read.map_err(io_error("cannot read from the VMM's monitor".to_owned()))?;
        if length == 0 {
            let source = std::io::ErrorKind::UnexpectedEof.into();
            return Err(VmmError::Io { doing: "the VMM closed its monitor".to_owned(), source });
        }
        serde_json::from_str(&line).map_err(|e| VmmError::Io {
            doing: "the VMM's monitor does not speak QMP".to_owned(),
            source: e.into(),
        })
    }

    /// Runs a command without arguments; events that come before its answer are left out.
    pub(super) async fn execute(&mut self, command: &str) -> Result<Value, VmmError> {
        let mut line = json!({"execute": command, "id": command}).to_string();
        line.push('\n');
        let written = self.stream.get_mut().write_all(line.as_bytes()).await;
        written.map_err(io_error(format!("cannot send {command} to the VMM")))?;
        loop {
            let mut answer = self.read().await?;
            if answer.get("id").and_then(Value::as_str) != Some(command) {
                continue;
            }
            if let Some(error) = answer.get("error") {
                let message =
                    error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
                return Err(VmmError::Refused { command: command.to_owned(), message });
            }
            return Ok(answer["return"].take());
        }
    }
}
