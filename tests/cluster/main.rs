//! Suite `cluster`: the commands as a person uses them, a kubelet, the chart.

mod leftovers;

use std::net::TcpListener;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use imp_testkit::dev::Dev;
use imp_testkit::wait::wait_for;
use leftovers::Leftovers;
use rustix::process::{Pid, Signal, kill_process};

/// What a VM may need to be seen as it is after programs were restarted.
const SETTLE: Duration = Duration::from_secs(120);

/// One cluster serves all steps: they are what a person does one after another, and each start takes half a minute.
#[tokio::test]
async fn from_up_to_down() -> Result<()> {
    let before = Leftovers::look()?;
    let dev = Dev::up(&[])?;
    second_up_finds_it(&dev)?;
    people_see_the_vm(&dev)?;
    exec_log_and_exit_code(&dev)?;
    a_person_without_the_role_is_refused(&dev)?;
    vm_survives_deleted_pods(&dev).await?;
    vm_survives_reinstalled_daemon_sets(&dev).await?;
    deleted_vm_is_gone(&dev)?;
    dev.down()?;
    before.compare(&Leftovers::look()?, &dev)
}

#[test]
fn a_busy_port_is_told_before_anything_is_started() -> Result<()> {
    let before = Leftovers::look()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let dev = Dev::at(listener.local_addr()?.port());
    let output = dev.xtask(&["up", "--detach"]).output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "up took a busy port");
    let told = error.lines().filter(|l| l.starts_with("error: ") && l.contains("is busy")).count();
    ensure!(told == 1 && !error.contains("start etcd"), "{error}");
    before.compare(&Leftovers::look()?, &dev)
}

/// Starts a light cluster, and cuts its start off with `signal` as soon as its node is there.
async fn cut_off(dev: &Dev, signal: Signal) -> Result<()> {
    let mut up = dev.xtask(&["up", "--light"]);
    let mut up = up.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    wait_for(SETTLE, "the node", async || {
        let state = dev.state().map_err(|e| format!("{e:#}"))?;
        if state.daemons.iter().any(|d| d.name == "node n1") { Ok(()) } else { Err(format!("{state:?}")) }
    })
    .await?;
    let pid = Pid::from_raw(i32::try_from(up.id())?).context("a PID")?;
    kill_process(pid, signal)?;
    ensure!(!up.wait()?.success(), "up was cut off and says that it succeeded");
    Ok(())
}

#[tokio::test]
async fn ctrl_c_while_it_starts_leaves_nothing() -> Result<()> {
    let before = Leftovers::look()?;
    let dev = Dev::at(free_port()?);
    cut_off(&dev, Signal::INT).await?;
    before.compare(&Leftovers::look()?, &dev)
}

#[tokio::test]
async fn down_removes_what_a_killed_up_left() -> Result<()> {
    let before = Leftovers::look()?;
    let dev = Dev::at(free_port()?);
    cut_off(&dev, Signal::KILL).await?;
    ensure!(before.compare(&Leftovers::look()?, &dev).is_err(), "a killed up left nothing to remove");
    dev.down()?;
    before.compare(&Leftovers::look()?, &dev)
}

#[tokio::test]
async fn a_rebooted_node_has_another_boot_id_and_the_same_data() -> Result<()> {
    let dev = Dev::at(free_port()?);
    cut_off(&dev, Signal::KILL).await?;
    let on_node = async |script: &str| {
        wait_for(SETTLE, "the node to answer", async || {
            let mut command = dev.on_node(1, "sh").map_err(|e| format!("{e:#}"))?;
            // A node's PID 1 is there before its root is.
            let script =
                format!("hostname | grep -qx n1 && test -s /etc/machine-id && test ! -e /.old && {script}");
            let output = command.args(["-c", &script]).output().map_err(|e| e.to_string())?;
            if output.status.success() {
                Ok(String::from_utf8_lossy(&output.stdout).into_owned())
            } else {
                Err(format!("{output:?}"))
            }
        })
        .await
    };
    let boot_id = "cat /proc/sys/kernel/random/boot_id";
    let before =
        on_node(&format!("(test -e /sys/class/net/left || ip link add left type veth peer name right) && echo kept > /var/lib/imp/kept && {boot_id}"))
            .await?;
    dev.reboot(1)?;
    let after =
        on_node(&format!("test ! -e /sys/class/net/left && grep -qx kept /var/lib/imp/kept && {boot_id}"))
            .await?;
    ensure!(before.trim().len() == 36 && before != after, "{before} and {after}");
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    ensure!(machine != before && machine != after, "the machine's own boot ID is seen");
    dev.down()
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn second_up_finds_it(dev: &Dev) -> Result<()> {
    let output = dev.xtask(&["up", "--detach"]).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && text.contains("runs already"), "{text}");
    Ok(())
}

fn people_see_the_vm(dev: &Dev) -> Result<()> {
    let table = dev.kubectl(&["get", "impvm", "-A"])?;
    ensure!(table.contains("hello") && table.contains("Running"), "{table}");
    let story = dev.kubectl(&["describe", "impvm", "hello"])?;
    ensure!(story.contains("Scheduled") && story.contains("GuestReady"), "{story}");
    let explained = dev.kubectl(&["explain", "impvm.spec"])?;
    ensure!(explained.contains("classRef") && explained.contains("image"), "{explained}");
    Ok(())
}

fn exec_log_and_exit_code(dev: &Dev) -> Result<()> {
    let name = dev.kubectl(&["imp", "exec", "hello", "--", "hostname"])?;
    ensure!(name.trim() == "hello", "{name}");
    let page = dev.kubectl(&["imp", "exec", "hello", "--", "wget", "-qO-", "http://127.0.0.1/"])?;
    ensure!(page.contains("hello from hello"), "{page}");
    let log = dev.kubectl(&["imp", "logs", "hello"])?;
    ensure!(log.contains("hello from hello"), "{log}");
    let status = dev.command("kubectl", &["imp", "exec", "hello", "--", "sh", "-c", "exit 7"]).status()?;
    ensure!(status.code() == Some(7), "{status}");
    Ok(())
}

/// Denied without the role, and with it allowed: so the role is what decides.
fn a_person_without_the_role_is_refused(dev: &Dev) -> Result<()> {
    let kubeconfig = dev.impersonate("jane")?;
    let exec = || {
        let mut command = dev.command("kubectl", &["imp", "exec", "hello", "--", "true"]);
        command.env("KUBECONFIG", &kubeconfig).output().context("run kubectl imp exec")
    };
    let refused = exec()?;
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && error.to_lowercase().contains("forbidden"), "{error}");
    dev.kubectl(&["create", "rolebinding", "jane", "--clusterrole=imp-edit", "--user=jane"])?;
    let allowed = exec()?;
    ensure!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
    dev.kubectl(&["delete", "rolebinding", "jane"])?;
    Ok(())
}

/// PID of the VMM and time since the guest's kernel started: what a VM that lived through something keeps.
#[derive(Debug)]
struct Life {
    pid: String,
    uptime: f64,
}

fn life(dev: &Dev) -> Result<Life> {
    let pid = dev.kubectl(&["get", "impvm", "hello", "-o", "jsonpath={.status.runtimePID}"])?;
    ensure!(!pid.is_empty(), "the VM has no runtimePID");
    let uptime = dev.kubectl(&["imp", "exec", "hello", "--", "cat", "/proc/uptime"])?;
    let uptime = uptime.split_whitespace().next().context("no uptime")?.parse()?;
    Ok(Life { pid, uptime })
}

/// Waits until the VM can be asked again, and checks that it is the same life.
async fn same_life(dev: &Dev, before: &Life) -> Result<()> {
    let after =
        wait_for(SETTLE, "the VM to answer through exec", async || life(dev).map_err(|e| format!("{e:#}")))
            .await?;
    ensure!(after.pid == before.pid && after.uptime > before.uptime, "it was {before:?} and is {after:?}");
    wait_for(SETTLE, "the VM to be Running", async || {
        match dev.kubectl(&["get", "impvm", "hello", "-o", "jsonpath={.status.phase}/{.status.restartCount}"])
        {
            Ok(text) if matches!(text.as_str(), "Running/" | "Running/0") => Ok(()),
            Ok(text) => Err(text),
            Err(e) => Err(format!("{e:#}")),
        }
    })
    .await
}

async fn vm_survives_deleted_pods(dev: &Dev) -> Result<()> {
    let before = life(dev)?;
    for component in ["agent", "runtime", "operator"] {
        dev.imp_system(&["delete", "pod", "-l", &format!("app.kubernetes.io/component={component}")])?;
    }
    dev.wait_programs().await?;
    same_life(dev, &before).await
}

async fn vm_survives_reinstalled_daemon_sets(dev: &Dev) -> Result<()> {
    let before = life(dev)?;
    dev.imp_system(&["delete", "daemonset", "imp-agent", "imp-runtime", "--wait=true"])?;
    wait_for(SETTLE, "the pods to be gone", async || {
        let selector = "app.kubernetes.io/component in (agent, runtime)";
        match dev.imp_system(&["get", "pods", "-l", selector, "-o", "name"]) {
            Ok(names) if names.trim().is_empty() => Ok(()),
            Ok(names) => Err(names),
            Err(e) => Err(format!("{e:#}")),
        }
    })
    .await?;
    dev.helm(&["upgrade", "imp", dev.chart("imp").as_str(), "--namespace=imp-system", "--reuse-values"])?;
    dev.wait_programs().await?;
    same_life(dev, &before).await
}

fn deleted_vm_is_gone(dev: &Dev) -> Result<()> {
    dev.kubectl(&["delete", "impvm", "hello", "--timeout=60s"])?;
    let left = dev.kubectl(&["get", "impvm", "-A", "-o", "name"])?;
    ensure!(left.trim().is_empty(), "{left}");
    Ok(())
}
