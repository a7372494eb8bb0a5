//! Probes: a command in the workload's root, or an HTTP request to the workload.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use imp_proto::v1::{CheckResponse, ExecCheckRequest, HttpCheckRequest};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::agent::{Machine, Wanted};
use crate::exec::start_program;
use crate::process::launch::Streams;
use crate::process::stream::Stream;

/// How much of a command's output or of a status line is reported, in bytes.
const MAX_MESSAGE: usize = 1024;
/// Kubernetes' default for `timeoutSeconds`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1);

fn deadline(milliseconds: u32) -> Duration {
    if milliseconds == 0 { DEFAULT_TIMEOUT } else { Duration::from_millis(milliseconds.into()) }
}

/// Runs a command; success is exit code 0 in time.
pub(crate) async fn exec(machine: &Arc<Machine>, request: ExecCheckRequest) -> CheckResponse {
    let wanted = Wanted {
        argv: request.argv,
        environment: Vec::new(),
        user: String::new(),
        working_dir: String::new(),
        streams: Streams::Pipes { stdin: false },
    };
    let (mut child, streams) = match start_program(machine, wanted).await {
        Ok(started) => started,
        Err(e) => return CheckResponse { success: false, message: e.message },
    };
    let limit = deadline(request.timeout_milliseconds);
    let mut head = Vec::new();
    let run = async {
        let mut process = child.clone();
        tokio::select! {
            ended = process.wait() => ended,
            () = collect(&streams.stdout, streams.stderr.as_ref(), &mut head) => process.wait().await,
        }
    };
    let ended = timeout(limit, run).await;
    let Ok(ended) = ended else {
        // SIGKILL to all that the check started; it is reaped as any other process.
        let _ = child.kill(9, true);
        child.wait().await;
        return CheckResponse {
            success: false,
            message: format!("the command did not end within {limit:?}"),
        };
    };
    for stream in [Some(&streams.stdout), streams.stderr.as_ref()].into_iter().flatten() {
        while let Ok(Some(data)) = stream.read_now() {
            if data.is_empty() || head.len() >= MAX_MESSAGE {
                break;
            }
            head.extend_from_slice(&data);
        }
    }
    head.truncate(MAX_MESSAGE);
    let status = ended.status(false);
    let output = String::from_utf8_lossy(&head).trim_end().to_owned();
    let message = match (status.code, output.is_empty()) {
        (0, _) => output,
        (code, true) => format!("exit code {code}"),
        (code, false) => format!("exit code {code}: {output}"),
    };
    CheckResponse { success: status.code == 0, message }
}

/// Reads both streams to their end; keeps the beginning.
async fn collect(stdout: &Stream, stderr: Option<&Stream>, head: &mut Vec<u8>) {
    let (mut out, mut err) = (true, stderr.is_some());
    while out || err {
        let data = tokio::select! {
            data = stdout.read(), if out => { out = matches!(data, Ok(Some(_))); data }
            data = async { match stderr { Some(s) => s.read().await, None => Ok(None) } }, if err => {
                err = matches!(data, Ok(Some(_)));
                data
            }
        };
        if let Ok(Some(data)) = data
            && head.len() < MAX_MESSAGE
        {
            head.extend_from_slice(&data);
        }
    }
}

/// Requests `path`; success is a status from 200 to 399 in time, as Kubernetes has it.
pub(crate) async fn http(machine: &Machine, request: HttpCheckRequest) -> CheckResponse {
    let limit = deadline(request.timeout_milliseconds);
    let checked = match timeout(limit, get(machine.address, &request)).await {
        Ok(checked) => checked,
        Err(_) => Err(anyhow::anyhow!("no answer within {limit:?}")),
    };
    match checked {
        Ok((status, line)) => CheckResponse { success: (200..400).contains(&status), message: line },
        Err(e) => CheckResponse { success: false, message: format!("{e:#}") },
    }
}

async fn get(address: Option<IpAddr>, request: &HttpCheckRequest) -> Result<(u16, String)> {
    let port = u16::try_from(request.port)
        .ok()
        .filter(|p| *p != 0)
        .with_context(|| format!("{} is not a port", request.port))?;
    let path = if request.path.is_empty() { "/" } else { request.path.as_str() };
    ensure!(
        path.starts_with('/') && !path.contains(|c: char| c.is_whitespace() || c.is_control()),
        "{path:?} is not a path"
    );
    // A workload may listen on its address, on the loopback, or on both.
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let target = address.unwrap_or(loopback);
    let mut stream = match TcpStream::connect((target, port)).await {
        Ok(stream) => stream,
        Err(first) => TcpStream::connect((loopback, port))
            .await
            .map_err(|_| first)
            .with_context(|| format!("connect to {target} port {port}"))?,
    };
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: {target}:{port}\r\nUser-Agent: imp-probe\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.context("send the request")?;
    let mut answer = Vec::new();
    let mut buffer = [0u8; MAX_MESSAGE];
    while !answer.contains(&b'\n') && answer.len() < MAX_MESSAGE {
        let n = stream.read(&mut buffer).await.context("read the answer")?;
        if n == 0 {
            break;
        }
        answer.extend_from_slice(&buffer[..n]);
    }
    status_line(&answer)
}

/// RFC 9112: `HTTP/1.1 200 OK`.
fn status_line(answer: &[u8]) -> Result<(u16, String)> {
    let line = answer.split(|b| *b == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line).trim_end().to_owned();
    let mut words = line.split(' ');
    match (words.next(), words.next().and_then(|w| w.parse::<u16>().ok())) {
        (Some(version), Some(status)) if version.starts_with("HTTP/1.") => Ok((status, line)),
        _ => bail!("the answer is not HTTP/1: {line:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines() {
        assert_eq!(status_line(b"HTTP/1.1 204 No Content\r\nX: y\r\n").unwrap().0, 204);
        assert_eq!(status_line(b"HTTP/1.0 500\r\n").unwrap(), (500, "HTTP/1.0 500".into()));
        for bad in [&b""[..], b"SSH-2.0-x\r\n", b"HTTP/1.1 abc\r\n", b"\xff\xfe"] {
            assert!(status_line(bad).is_err());
        }
    }
}
