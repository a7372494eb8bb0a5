//! Runs nft(8).

use std::io;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::NetError;

/// How much of what the program prints goes into an error, in bytes.
const LONGEST_MESSAGE: usize = 2048;

/// Loads `script` in one transaction: it is in force as a whole or not at all.
///
/// # Errors
/// When the program can't be run, fails, or takes longer than `limit`. It has ended in each case.
pub(crate) async fn load(program: &str, script: &str, limit: Duration) -> Result<(), NetError> {
    let doing = || format!("load the node's network rules with {program}");
    let run = async {
        let mut command = Command::new(program);
        command.args(["-f", "-"]).env("LC_ALL", "C");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A group of its own, so that a wrapper's children end with it.
        command.process_group(0).kill_on_drop(true);
        let mut child = command.spawn()?;
        let mut group = Group(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
        let mut input = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let write = async move {
            match input.write_all(script.as_bytes()).await {
                // It gave up early; its status and words say why.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                other => other,
            }
        };
        let (written, output) = tokio::join!(write, child.wait_with_output());
        group.0 = None;
        written?;
        output
    };
    let output = tokio::time::timeout(limit, run)
        .await
        .map_err(|_| NetError::Timeout { doing: doing(), after: limit })?
        .map_err(|error| NetError::io(doing(), error))?;
    if output.status.success() {
        return Ok(());
    }
    let words = &output.stderr[..output.stderr.len().min(LONGEST_MESSAGE)];
    Err(NetError::Nft {
        program: program.to_owned(),
        status: output.status.to_string(),
        message: String::from_utf8_lossy(words).trim().to_owned(),
    })
}

/// Kills a process group when dropped, unless the process was waited for.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended by itself just now.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}
