//! How a VM ends is said as it was.

use crate::harness::{Node, PATIENCE, kill, shell, vm, workload};
use imp_proto::v1::{self as pb, FailureReason};
use imp_testkit::images;
use rustix::process::Signal;
use std::time::Duration;

fn exit(status: &pb::VmStatus) -> pb::ExitStatus {
    let exit = status.exit.clone();
    exit.unwrap_or_else(|| panic!("no exit: {status:?}")).status.unwrap()
}

fn failure(status: &pb::VmStatus) -> pb::Failure {
    assert_eq!(status.state(), pb::VmState::Failed, "{status:?}");
    let failure = status.failure.clone().unwrap();
    assert!(!failure.retrying, "{failure:?}");
    failure
}

#[tokio::test]
async fn fr60_the_code_is_the_workloads_whatever_code() {
    let node = Node::start("code").await.unwrap();
    for code in [0, 1, 42, 255] {
        let spec = shell(&format!("exit {code}")).unwrap();
        node.put(&spec).await.unwrap();
        let status = node.ended(&spec).await.unwrap();
        assert_eq!(status.state(), pb::VmState::Stopped);
        let exit = exit(&status);
        assert_eq!((exit.code, exit.signal, exit.oom_killed), (code, 0, false), "{exit:?}");
        let times = status.exit.unwrap();
        assert!(times.started_at.unwrap().seconds <= times.finished_at.unwrap().seconds);
        node.delete(&spec, None).await.unwrap();
        node.removed(&spec).await.unwrap();
    }
}

#[tokio::test]
async fn fr60_a_signal_is_told_as_a_signal() {
    let node = Node::start("signal").await.unwrap();
    let spec = shell("kill -SEGV $$").unwrap();
    node.put(&spec).await.unwrap();
    let ended = exit(&node.ended(&spec).await.unwrap());
    assert_eq!((ended.code, ended.signal, ended.oom_killed), (139, 11, false), "{ended:?}");

    // More than there is: the kernel chooses the one that asked for it.
    let spec = shell("tail /dev/zero").unwrap();
    node.put(&spec).await.unwrap();
    let ended = exit(&node.ended(&spec).await.unwrap());
    assert_eq!((ended.signal, ended.oom_killed), (9, true), "{ended:?}");
}

#[tokio::test]
async fn fr60_a_stop_asks_before_it_kills() {
    let node = Node::start("stop").await.unwrap();
    let mut polite = shell("trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.1; done").unwrap();
    let mut deaf = shell("trap '' TERM; echo ready; while :; do sleep 0.1; done").unwrap();
    workload(&mut deaf).termination_grace_seconds = 1;
    for spec in [&mut polite, &mut deaf] {
        node.put(spec).await.unwrap();
        node.said(spec, "ready").await.unwrap();
        spec.generation += 1;
        spec.run_state = pb::RunState::Stopped.into();
        node.put(spec).await.unwrap();
    }
    let status = node.ended(&polite).await.unwrap();
    assert_eq!((exit(&status).code, exit(&status).signal), (7, 0), "{status:?}");
    assert_eq!(node.logs(&polite).await.unwrap(), "ready\nbye\n", "its last words are kept");
    let status = node.ended(&deaf).await.unwrap();
    assert_eq!((exit(&status).code, exit(&status).signal), (137, 9), "{status:?}");
}

#[tokio::test]
async fn a_program_that_cannot_be_run_is_named() {
    let node = Node::start("program").await.unwrap();
    let image = images::busybox().unwrap().reference();
    for (argv, words, code) in [
        (vec!["/no/such/program", "x"], "/no/such/program", 127),
        (vec!["no-such-name-in-path"], "no-such-name-in-path", 127),
        (vec!["/etc/passwd"], "/etc/passwd", 126),
        (vec!["/etc"], "/etc", 126),
    ] {
        let spec = vm(&image, &argv);
        node.put(&spec).await.unwrap();
        let failure = failure(&node.ended(&spec).await.unwrap());
        assert_eq!(failure.reason(), FailureReason::WorkloadStartFailed, "{failure:?}");
        assert!(failure.message.contains(words) && failure.exit_code == code, "{failure:?}");
    }
}

#[tokio::test]
async fn a_kernel_panic_is_told_with_its_words() {
    let node = Node::start("panic").await.unwrap();
    let spec = shell("echo c > /proc/sysrq-trigger; sleep 100").unwrap();
    node.put(&spec).await.unwrap();
    let failure = failure(&node.ended(&spec).await.unwrap());
    assert_eq!(failure.reason(), FailureReason::KernelPanic, "{failure:?}");
    assert!(failure.message.contains("sysrq triggered crash"), "{failure:?}");
}

#[tokio::test]
async fn a_guest_that_powers_off_has_ended() {
    let node = Node::start("poweroff").await.unwrap();
    let spec = shell("poweroff -f").unwrap();
    node.put(&spec).await.unwrap();
    let exit = exit(&node.ended(&spec).await.unwrap());
    assert!(exit.message.contains("powered itself off"), "{exit:?}");
}

#[tokio::test]
async fn a_killed_vmm_is_seen_in_under_a_second_and_the_next_attempt_finds_the_disk() {
    let node = Node::start("vmm").await.unwrap();
    let mut spec = shell("echo line >> /kept; wc -l < /kept; sleep 1000").unwrap();
    node.put(&spec).await.unwrap();
    let pid = node.running(&spec).await.unwrap().vmm.unwrap().pid;
    node.said(&spec, "1").await.unwrap();
    // On its way to the disk, as a crash of the machine would need it too.
    assert_eq!(node.exec(&spec, &["sync"]).await.unwrap().exit.code, 0);
    kill(pid, Signal::KILL).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(1), node.ended(&spec)).await;
    let failure = failure(&ended.expect("seen in under a second").unwrap());
    assert_eq!(failure.reason(), FailureReason::VmmCrashed, "{failure:?}");
    assert!(failure.message.contains("signal 9"), "{failure:?}");

    spec.attempt = 1;
    node.put(&spec).await.unwrap();
    let again = node.running(&spec).await.unwrap();
    assert!(again.failure.is_none() && again.vmm.unwrap().pid != pid);
    node.said(&spec, "2").await.unwrap();

    // An attempt that is over is not begun again, and older wishes lose.
    spec.attempt = 0;
    let refused = node.put(&spec).await.unwrap_err().to_string();
    assert!(refused.contains("attempt"), "{refused}");
}

#[tokio::test]
async fn a_deletion_kills_at_once_where_it_says_so() {
    let node = Node::start("kill").await.unwrap();
    let mut spec = shell("trap '' TERM; echo ready; while :; do sleep 0.1; done").unwrap();
    workload(&mut spec).termination_grace_seconds = 3600;
    node.put(&spec).await.unwrap();
    node.said(&spec, "ready").await.unwrap();
    node.delete(&spec, Some(0)).await.unwrap();
    tokio::time::timeout(PATIENCE, node.removed(&spec)).await.unwrap().unwrap();
    assert!(node.delete(&spec, None).await.unwrap(), "what is gone is gone");
}
