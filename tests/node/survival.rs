//! What survives the runtime, and what a reboot of the host means.

use crate::harness::{Node, Options, kill, processes, shell, uid, vm};
use imp_proto::v1::{self as pb, FailureReason};
use rustix::process::Signal;
use std::fs;

/// Seconds that the guest's kernel has been up.
async fn uptime(node: &Node, spec: &pb::VmSpec) -> f64 {
    let text = node.exec(spec, &["cut", "-d ", "-f1", "/proc/uptime"]).await.unwrap().text();
    text.parse().unwrap_or_else(|_| panic!("{text:?}"))
}

#[tokio::test]
async fn fr47_fr48_fr50_a_vm_outlives_the_runtime_and_loses_no_line() {
    let mut node = Node::start("adopt").await.unwrap();
    let mut spec =
        shell("i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo $i; [ $i = 10 ] && sleep 3; sleep 0.1; done; sleep 1000").unwrap();
    let forward = pb::PortForward { host_port: 8080, guest_port: 80, ..Default::default() };
    spec.network.as_mut().unwrap().ports = vec![forward];
    spec.network.as_mut().unwrap().masquerade = true;
    node.put(&spec).await.unwrap();
    let pid = node.running(&spec).await.unwrap().vmm.unwrap().pid;
    let rules = node.output("nft", &["list", "ruleset"]);
    assert!(rules.contains("8080"), "{rules}");
    let mut before = 0.0;
    for round in 0..3 {
        node.said(&spec, &format!("{}\n", 5 + round * 10)).await.unwrap();
        node.restart().await.unwrap();
        let status = node.running(&spec).await.unwrap();
        assert_eq!(status.vmm.unwrap().pid, pid, "the same process");
        let connected = |s: &pb::VmStatus| s.guest.as_ref().is_some_and(|g| g.connected);
        node.until(&spec, "the guest to be reached again", connected).await.unwrap();
        let now = uptime(&node, &spec).await;
        assert!(now > before, "the same kernel");
        before = now;
        assert_eq!(node.output("nft", &["list", "ruleset"]), rules, "fr50: rules are as they were");
    }
    let expected: String = (1..=60).map(|i| format!("{i}\n")).collect();
    assert_eq!(node.said(&spec, "60\n").await.unwrap(), expected, "no line lost, none twice");
    assert_eq!(processes(&uid(&spec)).len(), 1, "one VMM");
    node.delete(&spec, Some(0)).await.unwrap();
    node.removed(&spec).await.unwrap();
}

#[tokio::test]
async fn an_end_that_nobody_watched_is_told_all_the_same() {
    let mut node = Node::start("unwatched").await.unwrap();
    // One that exits, one whose VMM is killed, one that runs on: while there is no runtime.
    let exits = shell("echo up; while [ ! -e /go ]; do sleep 0.1; done; sleep 1; exit 42").unwrap();
    let (killed, stays) = (shell("echo up; sleep 1000").unwrap(), shell("echo up; sleep 1000").unwrap());
    for spec in [&exits, &killed, &stays] {
        node.put(spec).await.unwrap();
        node.said(spec, "up").await.unwrap();
    }
    let pid = node.running(&killed).await.unwrap().vmm.unwrap().pid;
    assert_eq!(node.exec(&exits, &["touch", "/go"]).await.unwrap().exit.code, 0);
    node.kill().unwrap();
    kill(pid, Signal::KILL).unwrap();
    // A guest whose workload has ended waits to be asked how, so that the time does not matter.
    std::thread::sleep(std::time::Duration::from_secs(2));
    node.boot().await.unwrap();
    let status = node.ended(&exits).await.unwrap();
    assert_eq!(status.exit.as_ref().and_then(|e| e.status.as_ref()).map(|s| s.code), Some(42), "{status:?}");
    let failure = node.ended(&killed).await.unwrap().failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::VmmCrashed, "{failure:?}");
    node.running(&stays).await.unwrap();
}

#[tokio::test]
async fn after_a_reboot_of_the_host_the_attempt_is_over_and_the_disk_is_there() {
    let mut node = Node::start("reboot").await.unwrap();
    let mut spec = shell("echo x >> /boots; sync; wc -l < /boots; sleep 1000").unwrap();
    node.put(&spec).await.unwrap();
    node.said(&spec, "1\n").await.unwrap();
    let pid = node.running(&spec).await.unwrap().vmm.unwrap().pid;

    // What a reboot does: no process, no link, no rule, no socket; another boot id.
    node.kill().unwrap();
    kill(pid, Signal::KILL).unwrap();
    imp_testkit::cgroups::kill(node.name.as_str().into()).unwrap();
    assert!(imp_testkit::cgroups::remove(node.name.as_str().into()).is_empty());
    node.netns.delete().unwrap();
    node.netns.create().unwrap();
    fs::remove_dir_all(node.path("run")).unwrap();
    let boot_id = node.path("boot_id");
    fs::write(&boot_id, "11111111-2222-4333-8444-555555555555\n").unwrap();
    node.options.boot_id = Some(boot_id);
    node.boot().await.unwrap();

    let failure = node.ended(&spec).await.unwrap().failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::HostRebooted, "{failure:?}");
    spec.attempt = 1;
    node.put(&spec).await.unwrap();
    node.running(&spec).await.unwrap();
    node.said(&spec, "2\n").await.unwrap();
    node.delete(&spec, Some(0)).await.unwrap();
    node.removed(&spec).await.unwrap();
}

#[tokio::test]
async fn what_belongs_to_no_vm_is_removed_at_start() {
    let mut node = Node::start("orphan").await.unwrap();
    let spec = shell("sleep 1000").unwrap();
    node.put(&spec).await.unwrap();
    let pid = node.running(&spec).await.unwrap().vmm.unwrap().pid;
    node.kill().unwrap();
    // The journal is lost (a disk replaced, a directory emptied): the VM is nobody's.
    fs::remove_dir_all(node.path("state/vms").join(uid(&spec))).unwrap();
    node.boot().await.unwrap();
    imp_testkit::wait::wait_for(crate::harness::PATIENCE, "the orphan to be gone", async || {
        let left = node.leftovers(&uid(&spec));
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}, VMM {pid}")) }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_record_that_cannot_be_read_costs_no_vm_its_life() {
    let mut node = Node::start("unreadable").await.unwrap();
    let spec = shell("sleep 1000").unwrap();
    node.put(&spec).await.unwrap();
    let pid = node.running(&spec).await.unwrap().vmm.unwrap().pid;
    node.kill().unwrap();
    let record = node.path("state/vms").join(uid(&spec)).join("vm.json");
    let kept = fs::read(&record).unwrap();
    fs::write(&record, "{").unwrap();
    node.boot().await.unwrap();
    assert!(processes(&uid(&spec)).contains(&u32::try_from(pid).unwrap()), "it is left alone");
    assert!(node.log().contains("cannot be read"), "and that is told");
    let refused =
        [node.put(&spec).await.err(), node.delete(&spec, None).await.err()].map(|e| e.unwrap().to_string());
    assert!(refused.iter().all(|e| e.contains("vm.json") && e.contains("repair it")), "{refused:?}");
    // Repaired by a person: it is taken up again.
    node.kill().unwrap();
    fs::write(&record, kept).unwrap();
    node.boot().await.unwrap();
    assert_eq!(node.running(&spec).await.unwrap().vmm.unwrap().pid, pid);
    assert!(!node.exec(&spec, &["hostname"]).await.unwrap().text().is_empty());
}

#[tokio::test]
async fn a_second_runtime_on_the_same_state_is_refused() {
    let node = Node::start("second").await.unwrap();
    let output = std::process::Command::new(crate::harness::program("imp-runtime"))
        .args(["--state-dir", node.path("state").as_str(), "--run-dir", node.path("run").as_str()])
        .args(["--socket", node.path("other.sock").as_str()])
        .args(["--boot-dir", crate::harness::boot_dir().unwrap().as_str(), "--cgroup-parent", &node.name])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("one at a time"), "{words}");
    let spec = vm(&imp_testkit::images::busybox().unwrap().reference(), &["true"]);
    node.put(&spec).await.unwrap();
    node.ended(&spec).await.unwrap();
}

#[tokio::test]
async fn fr25_a_network_tool_that_hangs_is_told_and_not_waited_for_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let (path, hangs) = (dir.path().join("nft"), dir.path().join("hangs"));
    let real = std::process::Command::new("sh").args(["-c", "command -v nft"]).output().unwrap().stdout;
    let real = String::from_utf8(real).unwrap();
    let script =
        format!("#!/bin/sh\n[ -e {} ] && exec sleep 600\nexec {} \"$@\"\n", hangs.display(), real.trim());
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let search = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    let options = Options { path: Some(search), ..Default::default() };
    let node = Node::start_with("nft", options).await.unwrap();
    fs::write(&hangs, "").unwrap();
    let spec = shell("true").unwrap();
    node.put(&spec).await.unwrap();
    let told = |s: &pb::VmStatus| s.network.as_ref().is_some_and(|n| !n.ready && n.message.contains("nft"));
    node.until(&spec, "it to say that its network is not ready", told).await.unwrap();
    // The attempt has failed; it is over once what was made is gone, and that takes the same tool.
    fs::remove_file(&hangs).unwrap();
    let failure = node.ended(&spec).await.unwrap().failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::NetworkFailed, "{failure:?}");
    assert!(failure.message.contains("nft") && !failure.retrying, "{failure:?}");
    node.delete(&spec, None).await.unwrap();
    node.removed(&spec).await.unwrap();
}
