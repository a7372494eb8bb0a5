//! A light cluster and what the steps do with it.

use anyhow::{Context as _, Result, bail, ensure};
use camino::Utf8Path;
use imp_api::ImpVM;
use imp_testkit::{dev::Dev, wait::wait_for};
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams},
    runtime::wait::await_condition,
};
use serde_json::{Value, json};
use std::time::Duration;

/// Everything that is waited for comes in this time, also on a busy machine with emulated CPUs.
pub const PATIENCE: Duration = Duration::from_secs(120);
pub const IMAGE: &str = "registry.imp-dev.local:5000/busybox:1.35";

pub struct World {
    pub dev: Dev,
    pub client: Client,
}

/// What a VM that lived through something keeps.
#[derive(Debug)]
pub struct Life {
    pid: i64,
    uptime: f64,
}

impl World {
    /// A light cluster, with the VM `hello` running.
    pub async fn start(args: &[&str]) -> Result<Self> {
        Self::start_with(args, None).await
    }

    /// The same with programs that die where `kill_dir` says.
    pub async fn start_with(args: &[&str], kill_dir: Option<&Utf8Path>) -> Result<Self> {
        let dev = Dev::up_with(&[&["--light"], args].concat(), kill_dir)?;
        let client = dev.client().await?;
        Ok(Self { dev, client })
    }

    pub fn vms(&self) -> Api<ImpVM> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Creates a VM that runs a shell script; `more` goes over the usual.
    pub async fn shell(&self, name: &str, script: &str, more: Value) -> Result<ImpVM> {
        let mut spec = json!({
            "classRef": {"name": "small"}, "networkRef": {"name": "lab"}, "image": IMAGE,
            "command": ["sh", "-c", script], "terminationGracePeriodSeconds": 5,
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            spec[key] = value.clone();
        }
        let vm = json!({
            "apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name, "namespace": "default"}, "spec": spec,
        });
        let vm = serde_json::from_value(vm)?;
        self.vms().create(&PostParams::default(), &vm).await.with_context(|| format!("create {name}"))
    }

    /// Waits until the object is as wanted.
    pub async fn until(&self, name: &str, what: &str, wanted: impl Fn(&ImpVM) -> bool) -> Result<ImpVM> {
        let condition = |vm: Option<&ImpVM>| vm.is_some_and(&wanted);
        let found = tokio::time::timeout(PATIENCE, await_condition(self.vms(), name, condition)).await;
        match found {
            Ok(Ok(Some(vm))) => Ok(vm),
            Ok(other) => bail!("waiting for {name} {what}: {other:?}"),
            Err(_) => {
                let last = self.vms().get_opt(name).await?;
                bail!("waited {PATIENCE:?} for {name} {what}; it is {}", serde_json::to_string_pretty(&last)?)
            }
        }
    }

    pub async fn phase(&self, name: &str, phase: &str) -> Result<ImpVM> {
        self.until(name, phase, |vm| self::phase(vm) == phase).await
    }

    /// Deletes a VM and waits until it is gone.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.vms().delete(name, &DeleteParams::default()).await?;
        self.gone(name).await
    }

    pub async fn gone(&self, name: &str) -> Result<()> {
        let gone = await_condition(self.vms(), name, |vm: Option<&ImpVM>| vm.is_none());
        match tokio::time::timeout(PATIENCE, gone).await {
            Ok(result) => result.map(drop).context("watch the VM"),
            Err(_) => bail!("{name} was not gone in {PATIENCE:?}: {:?}", self.vms().get_opt(name).await?),
        }
    }

    /// A command in a VM, through the API server.
    pub fn exec(&self, name: &str, argv: &[&str]) -> Result<String> {
        self.dev.kubectl(&[&["imp", "exec", name, "--"], argv].concat())
    }

    /// Waits until a VM's log contains a text.
    pub async fn said(&self, name: &str, text: &str) -> Result<String> {
        wait_for(PATIENCE, &format!("{text:?} in the log of {name}"), async || {
            match self.dev.kubectl(&["imp", "logs", name]) {
                Ok(log) if log.contains(text) => Ok(log),
                Ok(log) => Err(log),
                Err(e) => Err(format!("{e:#}")),
            }
        })
        .await
    }

    pub async fn life(&self, name: &str) -> Result<Life> {
        wait_for(PATIENCE, &format!("{name} to answer"), async || {
            let vm = self.vms().get(name).await.map_err(|e| e.to_string())?;
            let pid = vm.status.and_then(|s| s.runtime_pid).filter(|p| *p > 0).ok_or("no PID")?;
            let text = self.exec(name, &["cat", "/proc/uptime"]).map_err(|e| format!("{e:#}"))?;
            let uptime = text.split(' ').next().and_then(|t| t.parse().ok()).ok_or(text)?;
            Ok::<_, String>(Life { pid, uptime })
        })
        .await
    }

    /// Checks that a VM still lives the life that it lived before, and that its object says so.
    pub async fn lives_on(&self, name: &str, before: &Life) -> Result<()> {
        let now = self.life(name).await?;
        ensure!(now.pid == before.pid && now.uptime > before.uptime, "{name} was {before:?} and is {now:?}");
        let vm = self
            .until(name, "Ready", |vm| phase(vm) == "Running" && condition(vm, "Ready").0 == "True")
            .await?;
        ensure!(vm.status.and_then(|s| s.restart_count).unwrap_or(0) == 0, "{name} was restarted");
        Ok(())
    }

    /// What a shell prints on a node.
    pub fn on_node(&self, index: u8, script: &str) -> Result<String> {
        let output = self.dev.on_node(index, "sh")?.args(["-c", script]).output()?;
        ensure!(
            output.status.success(),
            "on n{index}: {script}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Deletes every VM and looks whether anything of one is left on a node: process, control group, tap, bridge, disk, socket,
    /// rule.
    pub async fn nothing_is_left(&self, index: u8) {
        for vm in self.vms().list(&Default::default()).await.unwrap() {
            self.delete(&vm.metadata.name.unwrap()).await.unwrap();
        }
        let script = "pgrep -l qemu; ls /run/imp/vms /var/lib/imp/vms; ip -br link | grep -v '^lo\\|^eth0'; \
             nft list tables | grep imp; find /sys/fs/cgroup -path '*/imp/*' -type d; true";
        wait_for(PATIENCE, "nothing to be left on the node", async || {
            let left = self.on_node(index, script).map_err(|e| format!("{e:#}"))?;
            let left: Vec<&str> = left.lines().filter(|l| !l.is_empty() && !l.ends_with("/vms:")).collect();
            if left.is_empty() { Ok(()) } else { Err(left.join("; ")) }
        })
        .await
        .unwrap();
    }
}

/// The phase as people see it; empty while there is none.
pub fn phase(vm: &ImpVM) -> String {
    let phase = vm.status.as_ref().and_then(|s| s.phase.as_ref());
    phase.and_then(|p| serde_json::to_value(p).ok()?.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Status, reason and message of a condition; empty where it is not there.
pub fn condition(vm: &ImpVM, kind: &str) -> (String, String, String) {
    let status = serde_json::to_value(&vm.status).unwrap_or_default();
    let all = status["conditions"].as_array().cloned().unwrap_or_default();
    let found = all.into_iter().find(|c| c["type"] == kind).unwrap_or_default();
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"), text("message"))
}
