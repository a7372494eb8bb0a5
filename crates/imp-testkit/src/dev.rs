//! A development cluster of a test's own, whole or light, driven by the same commands as a person's (`cargo xtask up`, `down`).

mod processes;

pub use processes::Killed;

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use crate::cluster::State;
use crate::cluster::layout::Layout;
use crate::wait::wait_for;
use crate::{files, node};
use anyhow::{Context as _, Result, bail, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use imp_killpoint::VARIABLE;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};

/// The cluster. Dropping it runs `down`.
#[derive(Debug)]
pub struct Dev {
    /// Prefix of its network namespaces, parent of its cgroups.
    pub name: String,
    /// Its data.
    pub dir: Utf8PathBuf,
    port: u16,
}

fn workspace() -> Utf8PathBuf {
    let here = Utf8Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

fn target() -> Utf8PathBuf {
    std::env::var("CARGO_TARGET_DIR").map_or_else(|_| workspace().join("target"), Utf8PathBuf::from)
}

/// Set by `cargo xtask test`; by hand, what cargo built last.
fn xtask_program() -> Utf8PathBuf {
    std::env::var("IMP_XTASK").map_or_else(|_| target().join("debug/xtask"), Utf8PathBuf::from)
}

impl Dev {
    /// A cluster that will be reached at `port` of 127.0.0.1; starts nothing.
    pub fn at(port: u16) -> Self {
        let name = format!("imp-test-{port}");
        Self { dir: Utf8Path::new("/var/tmp").join(&name), name, port }
    }

    /// Runs `cargo xtask up --detach` with further arguments (`--light`, `--nodes=2`) on a free port.
    ///
    /// # Errors
    /// When `IMP_XTASK` does not name the program xtask, or it fails.
    pub fn up(args: &[&str]) -> Result<Self> {
        Self::up_with(args, None)
    }

    /// The same with programs of a light cluster that die where `kill_dir` says; it has a directory for each: `imp-operator`, `n1-imp-agent`,
    /// `n1-imp-runtime`. See `imp_killpoint`.
    ///
    /// # Errors
    /// As [`Dev::up`].
    pub fn up_with(args: &[&str], kill_dir: Option<&Utf8Path>) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let dev = Self::at(port);
        let mut command = dev.xtask(&[&["up", "--detach"], args].concat());
        command.env_remove(VARIABLE).envs(kill_dir.map(|dir| (VARIABLE, dir)));
        let output = command.output().context("run xtask")?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "up failed: {text}");
        eprintln!("{text}");
        Ok(dev)
    }

    /// A client of the API server with an administrator's rights.
    ///
    /// # Errors
    /// When `up` left no kubeconfig, or it can't be used.
    pub async fn client(&self) -> Result<Client> {
        let kubeconfig = Kubeconfig::read_from(self.place().join("kubeconfig"))?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    /// The record of its processes.
    ///
    /// # Errors
    /// When there is none.
    pub fn state(&self) -> Result<State> {
        State::load(&self.dir)?.context("the cluster does not run")
    }

    /// A command that runs `program` on node `index`, from 1, in all of its namespaces.
    ///
    /// # Errors
    /// When the node does not run.
    pub fn on_node(&self, index: u8, program: &str) -> Result<Command> {
        let state = self.state()?;
        let name = format!("node n{index}");
        let daemon =
            state.daemons.iter().find(|d| d.name == name).with_context(|| format!("there is no {name}"))?;
        node::command(daemon, program)
    }

    /// The root directory of node `index`, from 1, as seen from here.
    ///
    /// # Errors
    /// When the node does not run.
    pub fn node_root(&self, index: u8) -> Result<Utf8PathBuf> {
        let state = self.state()?;
        let name = format!("node n{index}");
        let daemon =
            state.daemons.iter().find(|d| d.name == name).with_context(|| format!("there is no {name}"))?;
        Ok(format!("/proc/{}/root", node::init_pid(daemon)?).into())
    }

    /// What node `index`, from 1, keeps of Imp: its `/var/lib/imp`.
    pub fn node_data(&self, index: u8) -> Utf8PathBuf {
        Layout { name: self.name.clone(), dir: self.dir.clone() }.node_dir(index).join("imp")
    }

    /// Runs `cargo xtask down`.
    ///
    /// # Errors
    /// When it fails, with its own words.
    pub fn down(&self) -> Result<()> {
        let output = self.xtask(&["down"]).output().context("run xtask")?;
        ensure!(output.status.success(), "down failed: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Cuts the power of node `index`, from 1, and starts it again on its data: another boot ID, an empty /run, a new network.
    ///
    /// # Errors
    /// When the node does not run, or can't be started again.
    pub fn reboot(&self, index: u8) -> Result<()> {
        let mut state = self.state()?;
        let name = format!("node n{index}");
        let nodes = state.nodes;
        let daemon = state
            .daemons
            .iter_mut()
            .find(|d| d.name == name)
            .with_context(|| format!("there is no {name}"))?;
        let layout = Layout { name: self.name.clone(), dir: self.dir.clone() };
        node::power_off(daemon)?;
        node::delete_network(&layout, index)?;
        node::create_network(&layout, index, nodes)?;
        *daemon = node::power_on(&xtask_program(), &layout, index)?;
        state.save(&self.dir)
    }

    /// A command of xtask for this cluster.
    #[must_use]
    pub fn xtask(&self, args: &[&str]) -> Command {
        let mut command = Command::new(xtask_program());
        command
            .args(args)
            .current_dir(workspace())
            .env("IMP_DEV_NAME", &self.name)
            .env("IMP_DEV_DIR", &self.dir)
            .env("IMP_DEV_PORT", self.port.to_string());
        command
    }

    /// What `up` leaves for people.
    fn place(&self) -> Utf8PathBuf {
        target().join(self.name.trim_start_matches("imp-"))
    }

    /// A chart of the checkout.
    pub fn chart(&self, name: &str) -> Utf8PathBuf {
        workspace().join("charts").join(name)
    }

    /// A program with the environment that `up` tells people to set.
    pub fn command(&self, program: &str, args: &[&str]) -> Command {
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
    ///
    /// # Errors
    /// When it fails, with its own words.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.output("kubectl", args)
    }

    /// kubectl in Imp's namespace; what it prints.
    ///
    /// # Errors
    /// When it fails, with its own words.
    pub fn imp_system(&self, args: &[&str]) -> Result<String> {
        self.output("kubectl", &[&["--namespace=imp-system"], args].concat())
    }

    /// Helm; what it prints.
    ///
    /// # Errors
    /// When it fails, with its own words.
    pub fn helm(&self, args: &[&str]) -> Result<String> {
        self.output("helm", args)
    }

    /// A kubeconfig of a person who has no role; Kubernetes takes the administrator's word for who it is.
    ///
    /// # Errors
    /// When it fails, with its own words.
    pub fn impersonate(&self, user: &str) -> Result<Utf8PathBuf> {
        let text = std::fs::read_to_string(self.place().join("kubeconfig"))?;
        let mut config: Value = serde_json::from_str(&text)?;
        config["users"][0]["user"]["as"] = json!(user);
        let path = self.place().join(format!("kubeconfig-{user}"));
        files::write_private(&path, &config.to_string())?;
        Ok(path)
    }

    /// Waits until a ready pod of each of Imp's programs is there, and none is on its way out; for a whole cluster with one node.
    ///
    /// # Errors
    /// After two minutes.
    pub async fn wait_programs(&self) -> Result<()> {
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
