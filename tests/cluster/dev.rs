//! A development cluster of the test's own, driven by the same commands as a person's.

use std::net::TcpListener;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use imp_testkit::wait::wait_for;
use serde_json::{Value, json};

/// The cluster. Dropping it runs `down`.
#[derive(Debug)]
pub(crate) struct Dev {
    /// Prefix of its network namespaces, parent of its cgroups.
    pub(crate) name: String,
    /// Its data.
    pub(crate) dir: Utf8PathBuf,
    port: u16,
}

fn workspace() -> Utf8PathBuf {
    let here = Utf8Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

fn target() -> Utf8PathBuf {
    std::env::var("CARGO_TARGET_DIR").map_or_else(|_| workspace().join("target"), Utf8PathBuf::from)
}

impl Dev {
    /// A cluster that will be reached at `port` of 127.0.0.1; starts nothing.
    pub(crate) fn at(port: u16) -> Self {
        let name = format!("imp-test-{port}");
        Self { dir: Utf8Path::new("/var/tmp").join(&name), name, port }
    }

    /// Runs `cargo xtask up --detach` on a free port.
    pub(crate) fn up() -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let dev = Self::at(port);
        let output = dev.xtask(&["up", "--detach"])?;
        let text = String::from_utf8_lossy(&output.stderr);
        eprintln!("{text}");
        ensure!(output.status.success(), "up failed: {text}");
        Ok(dev)
    }

    /// Runs `cargo xtask down`.
    pub(crate) fn down(&self) -> Result<()> {
        let output = self.xtask(&["down"])?;
        ensure!(output.status.success(), "down failed: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Runs a command of xtask on this cluster.
    pub(crate) fn xtask(&self, args: &[&str]) -> Result<Output> {
        let program = std::env::var("IMP_XTASK").context("run this suite with `cargo xtask test cluster`")?;
        Command::new(program)
            .args(args)
            .current_dir(workspace())
            .env("IMP_DEV_NAME", &self.name)
            .env("IMP_DEV_DIR", &self.dir)
            .env("IMP_DEV_PORT", self.port.to_string())
            .output()
            .context("run xtask")
    }

    /// What `up` leaves for people.
    fn place(&self) -> Utf8PathBuf {
        target().join(self.name.trim_start_matches("imp-"))
    }

    /// A chart of the checkout.
    pub(crate) fn chart(&self, name: &str) -> Utf8PathBuf {
        workspace().join("charts").join(name)
    }

    /// A program with the environment that `up` tells people to set.
    pub(crate) fn command(&self, program: &str, args: &[&str]) -> Command {
        let place = self.place();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(place.join("bin").join(program));
        command
            .args(args)
            .env("KUBECONFIG", place.join("kubeconfig"))
            .env("PATH", format!("{place}/bin:{path}"));
        command
    }

    fn output(&self, program: &str, args: &[&str]) -> Result<String> {
        let output = self.command(program, args).output().with_context(|| format!("run {program}"))?;
        if !output.status.success() {
            bail!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// kubectl; what it prints.
    pub(crate) fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.output("kubectl", args)
    }

    /// kubectl in Imp's namespace; what it prints.
    pub(crate) fn imp_system(&self, args: &[&str]) -> Result<String> {
        self.output("kubectl", &[&["--namespace=imp-system"], args].concat())
    }

    /// Helm; what it prints.
    pub(crate) fn helm(&self, args: &[&str]) -> Result<String> {
        self.output("helm", args)
    }

    /// A kubeconfig of a person who has no role; Kubernetes takes the administrator's word for who it is.
    pub(crate) fn impersonate(&self, user: &str) -> Result<Utf8PathBuf> {
        let text = std::fs::read_to_string(self.place().join("kubeconfig"))?;
        let mut config: Value = serde_json::from_str(&text)?;
        config["users"][0]["user"]["as"] = json!(user);
        let path = self.place().join(format!("kubeconfig-{user}"));
        imp_testkit::files::write_private(&path, &config.to_string())?;
        Ok(path)
    }

    /// Waits until a ready pod of each of Imp's programs is there, and none is on its way out.
    pub(crate) async fn wait_programs(&self) -> Result<()> {
        wait_for(Duration::from_secs(120), "Imp's pods to be ready", async || {
            let text = self.imp_system(&["get", "pods", "-o", "json"]).map_err(|e| format!("{e:#}"))?;
            let pods: Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
            let pods = pods["items"].as_array().cloned().unwrap_or_default();
            let ready = |pod: &Value| {
                let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
                pod["metadata"].get("deletionTimestamp").is_none()
                    && conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
            };
            let count = pods.iter().filter(|p| ready(p)).count();
            if count == 3 && pods.len() == 3 {
                Ok(())
            } else {
                Err(format!("{count} of {} pods are ready", pods.len()))
            }
        })
        .await
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        if self.dir.exists()
            && let Err(e) = self.down()
        {
            eprintln!("{e:#}");
        }
    }
}
