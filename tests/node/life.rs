//! Lives of many VMs, ended in every phase: nothing is left of any.

use crate::harness::{Node, shell, uid};
use imp_proto::v1::VmState;
use std::fs;

#[tokio::test]
async fn fr51_fr53_fr64_a_deletion_in_any_phase_leaves_nothing() {
    let node = Node::start("phases").await.unwrap();
    for (state, script) in [
        (VmState::Pending, "sleep 1000"),
        (VmState::Pulling, "sleep 1000"),
        (VmState::Preparing, "sleep 1000"),
        (VmState::Booting, "sleep 1000"),
        (VmState::Configuring, "sleep 1000"),
        (VmState::Running, "trap 'exit 0' TERM; sleep 1000 & wait"),
        (VmState::Stopped, "exit 3"),
        (VmState::Failed, "echo c > /proc/sysrq-trigger"),
    ] {
        let spec = shell(script).unwrap();
        node.put(&spec).await.unwrap();
        // Early states are passed quickly: at least this far.
        let reached = |s: &imp_proto::v1::VmStatus| s.state() as i32 >= state as i32;
        node.until(&spec, state.as_str_name(), reached).await.unwrap();
        node.delete(&spec, Some(2)).await.unwrap();
        node.removed(&spec).await.unwrap_or_else(|e| panic!("{state:?}: {e:#}"));
    }
}

#[tokio::test]
async fn fr51_a_storm_of_vms_leaves_what_was_there_before() {
    let node = Node::start("storm").await.unwrap();
    let descriptors =
        |node: &Node| fs::read_dir(format!("/proc/{}/fd", node.pid().unwrap())).unwrap().count();
    // Network namespaces are mounts too, and other tests' come and go.
    let mounts = || -> Vec<String> {
        let all = fs::read_to_string("/proc/self/mounts").unwrap();
        all.lines().filter(|line| !line.contains("/run/netns")).map(str::to_owned).collect()
    };
    // The first VM opens what stays open.
    let first = shell("true").unwrap();
    node.put(&first).await.unwrap();
    node.ended(&first).await.unwrap();
    node.delete(&first, None).await.unwrap();
    node.removed(&first).await.unwrap();
    let (open, mounted) = (descriptors(&node), mounts());

    let specs: Vec<_> = (0..8).map(|i| shell(&format!("echo {i}; sleep 1000")).unwrap()).collect();
    for spec in &specs {
        node.put(spec).await.unwrap();
    }
    for (i, spec) in specs.iter().enumerate() {
        if i % 2 == 0 {
            node.running(spec).await.unwrap();
        }
        node.delete(spec, Some(0)).await.unwrap();
    }
    for spec in &specs {
        node.removed(spec).await.unwrap();
        assert_eq!(node.leftovers(&uid(spec)), Vec::<String>::new());
    }
    let settled =
        imp_testkit::wait::wait_for(crate::harness::PATIENCE, "descriptors to be closed", async || {
            let now = descriptors(&node);
            if now <= open + 1 { Ok(()) } else { Err(format!("{now} are open, {open} were")) }
        });
    settled.await.unwrap();
    assert_eq!(mounts(), mounted, "no mount is made on the host");
}
