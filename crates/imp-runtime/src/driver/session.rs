//! The life of one attempt: from whatever the journal says to how it ended, with the VMM gone.

use super::{Outcome, failure::Fault, guest, prepare};
use crate::{
    journal::Progress,
    vm::{Vm, now},
};
use imp_image::RootDisk;
use imp_killpoint::runtime as killpoint;
use imp_proto::v1::{self as pb, FailureReason};
use imp_vmm::{Instance, LAUNCH_MARKER, ProcessRecord, VmmExit, cgroup::Cgroup, console_log};
use std::{sync::Arc, time::Duration};

/// A guest that was told to power off, or whose VMM is about to go, is given so long before SIGKILL.
const POWER_OFF: Duration = Duration::from_secs(10);
/// For the console's last bytes to be read after the VMM is gone.
const DRAIN: Duration = Duration::from_secs(1);
/// Pause between two tries to reach a guest whose channel broke.
const RECONNECT: Duration = Duration::from_millis(100);
/// Console lines in a message.
const LINES: usize = 5;
/// How far back a panic is looked for: its trace follows, of some forty lines.
const PANIC_LINES: usize = 150;

/// A VM that runs, and the image it was started from.
struct Running {
    instance: Arc<dyn Instance>,
    image: Option<RootDisk>,
}

/// Lives an attempt to its end.
pub(super) async fn live(vm: &Vm) -> Outcome {
    let running = match begin(vm).await {
        Ok(running) => running,
        Err(outcome) => return outcome,
    };
    let outcome = alive(vm, &running).await;
    end(vm, &*running.instance, outcome).await
}

/// Starts the VM, or finds the one that an earlier process started.
async fn begin(vm: &Vm) -> Result<Running, Outcome> {
    let Some(attempt) = vm.record().attempt else { return Err(Outcome::Stopped) };
    let rebooted = attempt.boot_id != vm.shared.boot_id;
    match attempt.progress {
        Progress::Preparing => start(vm).await,
        Progress::Launching | Progress::Launched(_) | Progress::Configured(_) if rebooted => {
            let text = "the node was rebooted while the VM ran; its disk is kept";
            Err(over(vm, Fault::new(FailureReason::HostRebooted, text)))
        }
        Progress::Launching => match vm.shared.vmm.find(&vm.uid).await {
            Ok(Some(record)) => adopt(vm, record).await,
            Ok(None) if ran(vm) => Err(over(vm, away(vm))),
            Ok(None) => start(vm).await,
            Err(e) => Err(Outcome::Failed(Fault::of(FailureReason::VmmStartFailed, &e))),
        },
        Progress::Launched(record) | Progress::Configured(record) => adopt(vm, record).await,
        Progress::Ended | Progress::Freed => Err(Outcome::Stopped),
    }
}

/// A VMM was started in this attempt, whatever became of it.
fn ran(vm: &Vm) -> bool {
    std::fs::metadata(vm.run_dir().join(LAUNCH_MARKER)).is_ok_and(|m| m.len() > 0)
}

/// What is known to have happened goes before what a crash made unknown.
fn over(vm: &Vm, fault: Fault) -> Outcome {
    vm.status().exit.map_or(Outcome::Failed(fault), Outcome::Exited)
}

fn away(vm: &Vm) -> Fault {
    let text = "the VMM ended while nobody watched it";
    Fault::new(FailureReason::VmmCrashed, with_console(vm, text))
}

async fn start(vm: &Vm) -> Result<Running, Outcome> {
    let prepared = tokio::select! {
        prepared = prepare::prepare(vm) => prepared.map_err(Outcome::Failed)?,
        () = vm.must_stop() => return Err(Outcome::Stopped),
    };
    let instance = prepare::launch(vm, &prepared.launch).await.map_err(Outcome::Failed)?;
    Ok(Running { instance, image: Some(prepared.image) })
}

async fn adopt(vm: &Vm, record: ProcessRecord) -> Result<Running, Outcome> {
    let adopted = vm.shared.vmm.adopt(&record, &vm.run_dir()).await;
    match adopted {
        Ok(Some(instance)) => {
            tracing::info!(pid = record.pid, "adopted");
            if matches!(vm.record().attempt.map(|a| a.progress), Some(Progress::Launching)) {
                let progressed = vm.progress(Progress::Launched(record));
                progressed.map_err(|e| Outcome::Failed(e.into()))?;
            }
            // Holding its image keeps the disk from being collected under it.
            let digest = vm.status().image.unwrap_or_default().digest;
            let image = vm.shared.images.lookup(&digest).await.unwrap_or_default();
            Ok(Running { instance, image })
        }
        Ok(None) => Err(over(vm, away(vm))),
        Err(e) => Err(Outcome::Failed(Fault::of(FailureReason::VmmCrashed, &e))),
    }
}

/// From a VMM that runs to a reason to end it.
async fn alive(vm: &Vm, running: &Running) -> Outcome {
    let instance = &running.instance;
    let console = vm.console.pump(instance);
    tokio::pin!(console);
    let mut pumping = true;
    let talk = talk(vm, running);
    tokio::pin!(talk);
    loop {
        tokio::select! {
            outcome = &mut talk => return outcome,
            exit = instance.wait() => {
                if pumping {
                    let _ = tokio::time::timeout(DRAIN, &mut console).await;
                }
                return classify(vm, exit);
            }
            () = &mut console, if pumping => pumping = false,
        }
    }
}

/// Connects to the guest, again and again where the channel breaks, until there is a reason to end.
async fn talk(vm: &Vm, running: &Running) -> Outcome {
    let deadline = tokio::time::Instant::now() + vm.shared.config.hello_deadline;
    let mut known = vm.status().timings.is_some_and(|t| t.guest_connected.is_some());
    loop {
        let connecting = guest::connect(&*running.instance);
        let connected = tokio::select! {
            connected = connecting => connected,
            () = vm.must_stop() => return guest::kill_wish(vm),
            () = tokio::time::sleep_until(deadline), if !known => return unreachable(vm),
        };
        match connected {
            Ok(client) => {
                known = true;
                killpoint("guest-connected");
                vm.set_guest(Some(client.clone()));
                vm.update(|status| {
                    status.timings.get_or_insert_default().guest_connected.get_or_insert_with(now);
                });
                if let Some(outcome) = guest::serve(vm, client, running.image.as_ref()).await {
                    return outcome;
                }
                vm.set_guest(None);
                tracing::warn!("the guest's channel broke; it is taken up again");
            }
            Err(error) => tracing::debug!(%error, "the guest does not answer yet"),
        }
        tokio::time::sleep(RECONNECT).await;
    }
}

fn unreachable(vm: &Vm) -> Outcome {
    let seconds = vm.shared.config.hello_deadline.as_secs();
    let text = format!("the guest did not say hello within {seconds} s of its start");
    Outcome::Failed(Fault::new(FailureReason::GuestUnreachable, with_console(vm, &text)))
}

/// Why a VMM went that was not told to.
fn classify(vm: &Vm, exit: VmmExit) -> Outcome {
    if let Some(exit) = vm.status().exit {
        return Outcome::Exited(exit);
    }
    if let Some(words) = panic_words(&console_log::tail(vm.console.path(), PANIC_LINES)) {
        let text = format!("the guest's kernel panicked; its console's last words: {words}");
        return Outcome::Failed(Fault::new(FailureReason::KernelPanic, text));
    }
    let group = Cgroup::of(&vm.shared.config.cgroup_parent, &vm.uid);
    if group.is_ok_and(|group| group.oom_kills() > 0) {
        let text =
            "the VMM was killed for memory: the guest's memory and the VMM's overhead did not fit its limit";
        return Outcome::Failed(Fault::new(FailureReason::VmmOomKilled, text));
    }
    match exit {
        VmmExit { code: Some(0), .. } => Outcome::Exited(pb::WorkloadExit {
            status: Some(pb::ExitStatus {
                message: "the guest powered itself off or rebooted".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        VmmExit { code, signal } => {
            let how = match (code, signal) {
                (_, Some(signal)) => format!("was ended by signal {signal}"),
                (Some(code), None) => format!("exited with code {code}"),
                (None, None) => "is gone".to_owned(),
            };
            let log = console_log::tail(&vm.run_dir().join("vmm.log"), 3).join(" | ");
            let said = if log.is_empty() { String::new() } else { format!(" and said: {log}") };
            let text = format!("the VMM {how}{said}");
            Outcome::Failed(Fault::new(FailureReason::VmmCrashed, with_console(vm, &text)))
        }
    }
}

/// What a kernel said of its panic, up to where the trace of calls begins.
fn panic_words(lines: &[String]) -> Option<String> {
    let at = lines.iter().rposition(|line| line.contains("Kernel panic"))?;
    let told = lines[at..].iter().take(LINES).take_while(|line| !line.contains("Call Trace"));
    Some(told.map(String::as_str).collect::<Vec<_>>().join(" | "))
}

fn with_console(vm: &Vm, text: &str) -> String {
    let lines = console_log::tail(vm.console.path(), LINES);
    if lines.is_empty() {
        text.to_owned()
    } else {
        format!("{text}; its console's last words: {}", lines.join(" | "))
    }
}

/// Makes sure that the VMM is gone: resources are free only then.
async fn end(vm: &Vm, instance: &dyn Instance, outcome: Outcome) -> Outcome {
    vm.set_guest(None);
    vm.update(|status| status.state = pb::VmState::Stopping.into());
    let by_itself = matches!(outcome, Outcome::Exited(_));
    if !by_itself || tokio::time::timeout(POWER_OFF, instance.wait()).await.is_err() {
        if let Err(error) = instance.kill() {
            tracing::error!(%error, "the VMM cannot be killed");
        }
        instance.wait().await;
    }
    killpoint("vmm-gone");
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_told_without_its_trace() {
        let mut lines = vec!["[1.0] all is well".to_owned()];
        assert_eq!(panic_words(&lines), None);
        lines.push("[2.0] Kernel panic - not syncing: bad luck".to_owned());
        lines.push("[2.1] CPU: 0 PID: 7".to_owned());
        lines.push("[2.2] Call Trace:".to_owned());
        lines.extend((0..60).map(|n| format!("[2.3] function_{n}")));
        let words = panic_words(&lines).unwrap();
        assert_eq!(words, "[2.0] Kernel panic - not syncing: bad luck | [2.1] CPU: 0 PID: 7");
    }
}
