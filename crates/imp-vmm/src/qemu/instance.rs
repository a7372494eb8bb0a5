//! A running QEMU, launched or adopted.

use super::{
    command::{CONSOLE_SOCKET, GUEST_SOCKET},
    io_error, qmp, timeout,
};
use crate::{BoxStream, Instance, ProcessRecord, VmmError, VmmExit, process::Process};
use async_trait::async_trait;
use camino::Utf8PathBuf;
use std::{sync::Arc, time::Duration};
use tokio::{
    net::UnixStream,
    sync::{Mutex, OnceCell},
};

/// Most that a monitor command may take.
const COMMAND_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct QemuInstance {
    record: ProcessRecord,
    run_dir: Utf8PathBuf,
    process: Arc<Process>,
    exit: OnceCell<VmmExit>,
    monitor: Mutex<()>,
}

impl QemuInstance {
    pub(super) fn new(record: ProcessRecord, run_dir: Utf8PathBuf, process: Arc<Process>) -> Self {
        Self { record, run_dir, process, exit: OnceCell::new(), monitor: Mutex::new(()) }
    }

    async fn execute(&self, command: &'static str) -> Result<(), VmmError> {
        let _one_at_a_time = self.monitor.lock().await;
        let run = async { qmp::connect(&self.run_dir).await?.execute(command).await };
        let answer = tokio::time::timeout(COMMAND_DEADLINE, run).await;
        answer.map_err(|_| timeout(command, COMMAND_DEADLINE))?.map(drop)
    }

    async fn connect(&self, socket: &str) -> Result<BoxStream, VmmError> {
        let path = self.run_dir.join(socket);
        let stream =
            UnixStream::connect(&path).await.map_err(io_error(format!("cannot connect to {path}")))?;
        Ok(Box::new(stream))
    }
}

#[async_trait]
impl Instance for QemuInstance {
    fn record(&self) -> &ProcessRecord {
        &self.record
    }

    async fn wait(&self) -> VmmExit {
        *self.exit.get_or_init(|| self.process.wait()).await
    }

    async fn connect_guest(&self) -> Result<BoxStream, VmmError> {
        self.connect(GUEST_SOCKET).await
    }

    async fn connect_console(&self) -> Result<BoxStream, VmmError> {
        self.connect(CONSOLE_SOCKET).await
    }

    async fn pause(&self) -> Result<(), VmmError> {
        self.execute("stop").await
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.execute("cont").await
    }

    fn kill(&self) -> Result<(), VmmError> {
        self.process.kill().map_err(io_error(format!("cannot kill process {}", self.record.pid)))
    }
}
