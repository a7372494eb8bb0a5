//! A node of a test's own: the real runtime in a network namespace, with its own state, sockets and control groups.

use anyhow::{Context as _, Result, bail, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use futures::StreamExt as _;
use imp_proto::{
    unix,
    v1::{self as pb, runtime_client::RuntimeClient, watch_vms_response::Event},
};
use imp_testkit::{boot, cgroups, netns::NetNs, wait::wait_for};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    os::unix::process::ExitStatusExt as _,
    process::{Child, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use tonic::transport::Channel;

/// Everything that is waited for comes in this time, also on a busy machine with emulated CPUs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// How the runtime of a node is started.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// The point at which the runtime dies, twice if it comes there twice.
    pub(crate) kill_at: Option<&'static str>,
    /// Another file in the place of the host's boot id, as after a reboot.
    pub(crate) boot_id: Option<Utf8PathBuf>,
    /// Other boot files.
    pub(crate) boot_dir: Option<Utf8PathBuf>,
    /// Another search path for programs.
    pub(crate) path: Option<String>,
    /// Further arguments.
    pub(crate) arguments: Vec<String>,
}

/// The node. Dropping it ends every process it made and removes all else.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) netns: NetNs,
    pub(crate) options: Options,
    dir: tempfile::TempDir,
    runtime: Option<Child>,
}

/// A program as it is shipped; `cargo xtask test` builds them.
pub(crate) fn program(name: &str) -> Utf8PathBuf {
    let built = Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/x86_64-unknown-linux-musl/dist");
    std::env::var("IMP_PROGRAMS").map_or(built, Utf8PathBuf::from).join(name)
}

/// The directory with kernel and initramfs.
pub(crate) fn boot_dir() -> Result<Utf8PathBuf> {
    let files = boot::of_checkout()?;
    Ok(files.kernel.parent().context("the kernel has no directory")?.to_owned())
}

impl Node {
    /// A node whose runtime serves.
    pub(crate) async fn start(name: &str) -> Result<Self> {
        Self::start_with(name, Options::default()).await
    }

    /// The same with other settings.
    pub(crate) async fn start_with(name: &str, options: Options) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("imp-node-{name}-{}-{count}", std::process::id());
        let netns = NetNs::named(&name);
        netns.create()?;
        let dir = tempfile::tempdir()?;
        let mut node = Self { name, netns, options, dir, runtime: None };
        fs::create_dir(node.path("kill"))?;
        if let Some(point) = node.options.kill_at {
            imp_killpoint::arm(node.path("kill").as_std_path(), point, 2)?;
        }
        node.boot().await?;
        Ok(node)
    }

    pub(crate) fn path(&self, name: &str) -> Utf8PathBuf {
        Utf8Path::from_path(self.dir.path()).unwrap_or_else(|| Utf8Path::new("/nonexistent")).join(name)
    }

    pub(crate) fn socket(&self) -> Utf8PathBuf {
        self.path("runtime.sock")
    }

    /// What the runtimes of this node have logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("runtime.log")).unwrap_or_default()
    }

    /// Starts the runtime and waits until it serves, or has died where it was told to.
    pub(crate) async fn boot(&mut self) -> Result<()> {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("runtime.log"))?;
        let boot_dir = self.options.boot_dir.clone().map_or_else(boot_dir, Ok)?;
        let runtime = program("imp-runtime");
        let mut command = match &self.options.boot_id {
            None => self.netns.command(runtime.as_str()),
            Some(file) => {
                let mut command = self.netns.command("unshare");
                let script = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
                command.args(["--mount", "sh", "-c", script, file.as_str(), runtime.as_str()]);
                command
            }
        };
        command
            .args(["--state-dir", self.path("state").as_str(), "--run-dir", self.path("run").as_str()])
            .args(["--socket", self.socket().as_str(), "--boot-dir", boot_dir.as_str()])
            .args(["--cgroup-parent", &self.name])
            .args(&self.options.arguments)
            .env(imp_killpoint::VARIABLE, self.path("kill"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if let Some(path) = &self.options.path {
            command.env("PATH", path);
        }
        self.runtime = Some(command.spawn().with_context(|| format!("start {runtime}"))?);
        wait_for(PATIENCE, "the runtime to serve", async || {
            if self.died()?.is_some() {
                return Ok(());
            }
            let asked = async { anyhow::Ok(self.client().await?.list_vms(pb::ListVmsRequest {}).await?) };
            asked.await.map(drop).map_err(|e| format!("{e:#}; its log: {}", self.log()))
        })
        .await
    }

    /// How the runtime ended, if it did: `Some(true)` by SIGKILL.
    fn died(&mut self) -> Result<Option<bool>, String> {
        let Some(child) = &mut self.runtime else { return Ok(Some(false)) };
        let status = child.try_wait().map_err(|e| e.to_string())?;
        Ok(status.map(|s| s.signal() == Some(Signal::KILL.as_raw())))
    }

    /// Whether the runtime was killed where it was told to. It must not end in any other way.
    pub(crate) fn was_killed(&mut self) -> Result<bool> {
        match self.died().map_err(anyhow::Error::msg)? {
            None => Ok(false),
            Some(true) => Ok(true),
            Some(false) => bail!("the runtime ended by itself; its log: {}", self.log()),
        }
    }

    pub(crate) fn pid(&self) -> Result<u32> {
        Ok(self.runtime.as_ref().context("the runtime was not started")?.id())
    }

    /// SIGKILL for the runtime.
    pub(crate) fn kill(&mut self) -> Result<()> {
        let mut child = self.runtime.take().context("the runtime was not started")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// SIGKILL, and a new runtime.
    pub(crate) async fn restart(&mut self) -> Result<()> {
        self.kill()?;
        self.boot().await
    }

    pub(crate) async fn client(&self) -> Result<RuntimeClient<Channel>> {
        Ok(RuntimeClient::new(unix::connect(self.socket()).await?))
    }

    pub(crate) async fn put(&self, spec: &pb::VmSpec) -> Result<pb::VmStatus> {
        self.put_with(spec, None).await
    }

    pub(crate) async fn put_with(
        &self,
        spec: &pb::VmSpec,
        secrets: Option<pb::VmSecrets>,
    ) -> Result<pb::VmStatus> {
        let request = pb::PutVmRequest { spec: Some(spec.clone()), secrets };
        let answer = self.client().await?.put_vm(request).await?.into_inner();
        answer.status.context("no status")
    }

    pub(crate) async fn delete(&self, spec: &pb::VmSpec, grace_seconds: Option<u32>) -> Result<bool> {
        let request = pb::DeleteVmRequest { vm: spec.vm.clone(), grace_seconds };
        Ok(self.client().await?.delete_vm(request).await?.into_inner().gone)
    }

    /// Waits until the VM's status is as wanted, told by the runtime's watch.
    pub(crate) async fn until(
        &self,
        spec: &pb::VmSpec,
        what: &str,
        wanted: impl Fn(&pb::VmStatus) -> bool,
    ) -> Result<pb::VmStatus> {
        let mut last = None;
        let watching = async {
            let mut events = self.client().await?.watch_vms(pb::WatchVmsRequest {}).await?.into_inner();
            while let Some(event) = events.next().await {
                if let Some(Event::Vm(status)) = event?.event
                    && status.vm == spec.vm
                {
                    if wanted(&status) {
                        return Ok(status);
                    }
                    last = Some(status);
                }
            }
            bail!("the watch ended")
        };
        let result = tokio::time::timeout(PATIENCE, watching).await;
        match result {
            Ok(Ok(status)) => Ok(status),
            Ok(Err(error)) => Err(error.context(format!("waiting for {what}; last seen: {last:?}"))),
            Err(_) => bail!("waited {PATIENCE:?} for {what}; last seen: {last:#?}; log: {}", self.log()),
        }
    }

    pub(crate) async fn state(&self, spec: &pb::VmSpec, state: pb::VmState) -> Result<pb::VmStatus> {
        let attempt = spec.attempt;
        self.until(spec, state.as_str_name(), |s| s.state() == state && s.attempt == attempt).await
    }

    pub(crate) async fn running(&self, spec: &pb::VmSpec) -> Result<pb::VmStatus> {
        self.state(spec, pb::VmState::Running).await
    }

    /// Waits for the end of the VM's attempt, whatever it is.
    pub(crate) async fn ended(&self, spec: &pb::VmSpec) -> Result<pb::VmStatus> {
        let attempt = spec.attempt;
        let ended = |s: &pb::VmStatus| {
            matches!(s.state(), pb::VmState::Stopped | pb::VmState::Failed) && s.attempt == attempt
        };
        self.until(spec, "its end", ended).await
    }

    /// Waits until nothing of the VM is left, and looks whether that is true.
    pub(crate) async fn removed(&self, spec: &pb::VmSpec) -> Result<()> {
        let uid = uid(spec);
        let watching = async {
            let mut events = self.client().await?.watch_vms(pb::WatchVmsRequest {}).await?.into_inner();
            let mut there = false;
            while let Some(event) = events.next().await {
                match event?.event {
                    Some(Event::Removed(removed)) if removed == uid => return Ok(()),
                    Some(Event::Vm(status)) if status.vm == spec.vm => there = true,
                    Some(Event::Synced(_)) if !there => return Ok(()),
                    _ => {}
                }
            }
            bail!("the watch ended")
        };
        match tokio::time::timeout(PATIENCE, watching).await {
            Ok(result) => result?,
            Err(_) => bail!("waited {PATIENCE:?} for {uid} to be removed; log: {}", self.log()),
        }
        let left = self.leftovers(&uid);
        ensure!(left.is_empty(), "left of {uid}: {left:?}");
        Ok(())
    }

    /// Everything on the machine that belongs to a VM: processes, control groups, files, links, rules.
    pub(crate) fn leftovers(&self, uid: &str) -> Vec<String> {
        let mut left: Vec<String> = processes(uid).into_iter().map(|pid| format!("process {pid}")).collect();
        for hierarchy in cgroups::hierarchies().unwrap_or_default() {
            let dir = hierarchy.mount_point.join(&self.name).join(uid);
            if dir.exists() {
                left.push(dir.to_string());
            }
        }
        let dirs = [self.path("state/vms").join(uid), self.path("run/vms").join(uid)];
        left.extend(dirs.iter().filter(|d| d.exists()).map(ToString::to_string));
        if self.vms_on_disk().is_empty() {
            let links = self.output("ip", &["-br", "link"]);
            left.extend(links.lines().filter(|l| !l.starts_with("lo")).map(|l| format!("link {l}")));
            let rules = self.output("nft", &["list", "ruleset"]);
            left.extend((!rules.trim().is_empty()).then(|| format!("rules {rules}")));
        }
        left
    }

    /// UIDs of the VMs that the journal knows.
    pub(crate) fn vms_on_disk(&self) -> Vec<String> {
        let dir = self.path("state/vms").read_dir_utf8();
        dir.into_iter().flatten().flatten().map(|e| e.file_name().to_owned()).collect()
    }

    /// What a program prints in the node's network namespace.
    pub(crate) fn output(&self, program: &str, args: &[&str]) -> String {
        let output = self.netns.command(program).args(args).output();
        output.map_or_else(|e| e.to_string(), |o| String::from_utf8_lossy(&o.stdout).into_owned())
    }

    /// The workload's log as it is now: both streams, in order.
    pub(crate) async fn logs(&self, spec: &pb::VmSpec) -> Result<String> {
        let request = pb::LogsRequest { vm: spec.vm.clone(), ..Default::default() };
        Ok(String::from_utf8(
            collect(self.client().await?.logs(request).await?.into_inner(), |_| true).await?,
        )?)
    }

    /// Waits until the workload's log contains a text.
    pub(crate) async fn said(&self, spec: &pb::VmSpec, text: &str) -> Result<String> {
        wait_for(PATIENCE, &format!("{text:?} in the log"), async || match self.logs(spec).await {
            Ok(log) if log.contains(text) => Ok(log),
            Ok(log) => Err(log),
            Err(e) => Err(format!("{e:#}")),
        })
        .await
    }

    /// Runs a command in the guest.
    pub(crate) async fn exec(&self, spec: &pb::VmSpec, argv: &[&str]) -> Result<Executed> {
        self.exec_with(spec, argv, b"").await
    }

    /// The same with bytes for its standard input.
    pub(crate) async fn exec_with(&self, spec: &pb::VmSpec, argv: &[&str], input: &[u8]) -> Result<Executed> {
        use pb::exec_request::Message;
        let start = pb::ExecStart {
            vm: spec.vm.clone(),
            argv: argv.iter().map(ToString::to_string).collect(),
            stdin: !input.is_empty(),
            stdout: true,
            stderr: true,
            ..Default::default()
        };
        let mut messages = vec![Message::Start(start)];
        if !input.is_empty() {
            messages.extend(input.chunks(32 << 10).map(|c| Message::Stdin(c.to_vec().into())));
            messages.push(Message::CloseStdin(()));
        }
        let messages = messages.into_iter().map(|m| pb::ExecRequest { message: Some(m) });
        // The request stays open: its end would mean that the client is gone.
        let requests = futures::stream::iter(messages.collect::<Vec<_>>()).chain(futures::stream::pending());
        let mut answers = self.client().await?.exec(requests).await?.into_inner();
        let mut executed = Executed::default();
        while let Some(answer) = answers.next().await {
            use pb::exec_response::Message;
            match answer?.message {
                Some(Message::Stdout(data)) => executed.stdout.extend_from_slice(&data),
                Some(Message::Stderr(data)) => executed.stderr.extend_from_slice(&data),
                Some(Message::Exit(exit)) => executed.exit = exit,
                _ => {}
            }
        }
        Ok(executed)
    }
}

/// What a command in a guest did.
#[derive(Debug, Default)]
pub(crate) struct Executed {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exit: pb::ExitStatus,
}

impl Executed {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim().to_owned()
    }
}

/// The bytes of a log's pieces for which `wanted` holds.
pub(crate) async fn collect(
    mut stream: tonic::Streaming<pb::LogsResponse>,
    wanted: impl Fn(&pb::LogsResponse) -> bool,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await {
        let piece = piece?;
        if wanted(&piece) {
            bytes.extend_from_slice(&piece.data);
        }
    }
    Ok(bytes)
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the log of {}:\n{}", self.name, self.log());
        }
        if let Some(mut child) = self.runtime.take() {
            // Gone already, or about to be.
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Err(e) = cgroups::kill(Utf8Path::new(&self.name)) {
            eprintln!("{e:#}");
        }
        let left = cgroups::remove(Utf8Path::new(&self.name));
        if !left.is_empty() {
            eprintln!("control groups left: {left:?}");
        }
        if let Err(e) = self.netns.delete() {
            eprintln!("{e:#}");
        }
    }
}

/// Processes whose command line names the VM.
pub(crate) fn processes(uid: &str) -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        *pid != std::process::id() && String::from_utf8_lossy(&line).contains(uid)
    })
    .collect()
}

pub(crate) fn kill(pid: i32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid).context("no process number")?;
    kill_process(pid, signal).with_context(|| format!("send {signal:?} to {pid:?}"))
}

pub(crate) fn uid(spec: &pb::VmSpec) -> String {
    spec.vm.as_ref().map(|vm| vm.uid.clone()).unwrap_or_default()
}

/// A small VM of an image, as the agent would put it. Every call gives another UID.
pub(crate) fn vm(image: &str, argv: &[&str]) -> pb::VmSpec {
    static COUNT: AtomicU32 = AtomicU32::new(1);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let uid = format!("{:08x}-0000-4000-8000-{count:012x}", std::process::id());
    pb::VmSpec {
        vm: Some(pb::VmRef { uid, namespace: "default".into(), name: format!("vm-{count}") }),
        generation: 1,
        run_state: pb::RunState::Running.into(),
        resources: Some(pb::Resources { vcpus: 1, memory_mib: 128, disk_gib: 1 }),
        image: Some(pb::ImageSpec { reference: image.to_owned(), ..Default::default() }),
        root_disk: Some(pb::RootDisk::default()),
        workload: Some(pb::Workload {
            command: argv.iter().map(ToString::to_string).collect(),
            termination_grace_seconds: 10,
            hostname: format!("vm-{count}"),
            ..Default::default()
        }),
        network: Some(pb::Network {
            id: "test".into(),
            mac: format!("02:00:00:00:00:{count:02x}"),
            address: format!("192.168.77.{}/24", 1 + count),
            gateway: "192.168.77.1".into(),
            ..Default::default()
        }),
        guest_agent: true,
        persistent: true,
        ..Default::default()
    }
}

/// A VM of busybox that runs a shell script.
pub(crate) fn shell(script: &str) -> Result<pb::VmSpec> {
    Ok(vm(&imp_testkit::images::busybox()?.reference(), &["sh", "-c", script]))
}

pub(crate) fn workload(spec: &mut pb::VmSpec) -> &mut pb::Workload {
    spec.workload.get_or_insert_default()
}
