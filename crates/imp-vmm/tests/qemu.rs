//! The QEMU driver with a real guest. Needs root and the guest's initramfs.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use camino::{Utf8Path, Utf8PathBuf};
use imp_proto::channel::{NONCE_LEN, client_hello};
use imp_testkit::boot::{self, BootFiles};
use imp_vmm::{
    Accelerator, Instance, LaunchConfig, Vmm as _,
    cgroup::{Cgroup, Limits},
    kvm,
    qemu::Qemu,
};
use std::time::Duration;

const IDS: (u32, u32) = (64_321, 64_321);

fn boot_files() -> BootFiles {
    boot::of_checkout().unwrap()
}

fn config(uid: &str, run_dir: &Utf8Path, boot: &BootFiles, cgroup: &Cgroup) -> LaunchConfig {
    LaunchConfig {
        uid: uid.to_owned(),
        run_dir: run_dir.to_owned(),
        kernel: boot.kernel.clone(),
        initrd: boot.initrd.clone(),
        vcpus: 1,
        memory_mib: 128,
        drives: Vec::new(),
        nic: None,
        accelerator: Accelerator::Tcg,
        ids: IDS,
        cgroup: cgroup.dirs().to_vec(),
    }
}

async fn hello(instance: &dyn Instance, nonce: u8) {
    let said = async {
        let mut channel = instance.connect_guest().await.unwrap();
        client_hello(&mut channel, [nonce; NONCE_LEN]).await.unwrap();
    };
    tokio::time::timeout(Duration::from_secs(60), said).await.expect("the guest says hello");
}

#[tokio::test]
async fn fr47_a_guest_is_started_adopted_paused_and_ended_and_leaves_nothing() {
    let boot = boot_files();
    let dir = tempfile::tempdir().unwrap();
    let run_dir = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
    let uid = format!("vmm-test-{}", std::process::id());
    let cgroup =
        Cgroup::create("imp-test", &uid, Limits { memory_bytes: 256 << 20, cpu_millis: 1000 }).unwrap();
    let qemu = Qemu::new(Utf8Path::new("qemu-system-x86_64")).unwrap();
    let instance = qemu.launch(&config(&uid, &run_dir, &boot, &cgroup)).await.unwrap();
    let record = instance.record().clone();
    hello(&*instance, 1).await;
    instance.pause().await.unwrap();
    instance.resume().await.unwrap();

    let status = std::fs::read_to_string(format!("/proc/{}/status", record.pid)).unwrap();
    let line = |name: &str| status.lines().find(|l| l.starts_with(name)).unwrap().to_owned();
    assert_eq!(line("Uid:").split_whitespace().nth(1).unwrap(), IDS.0.to_string());
    assert!(line("CapEff:").ends_with("0000000000000000"));
    assert!(line("NoNewPrivs:").ends_with('1'));
    assert!(cgroup.pids().contains(&record.pid));
    let session = rustix::process::getsid(rustix::process::Pid::from_raw(record.pid)).unwrap();
    assert_eq!(session.as_raw_nonzero().get(), record.pid, "a session of its own");

    let again = qemu.launch(&config(&uid, &run_dir, &boot, &cgroup)).await.unwrap_err().to_string();
    assert!(again.contains("already runs"), "fr48: no second boot: {again}");
    drop(instance);
    let other = Qemu::new(Utf8Path::new("qemu-system-x86_64")).unwrap();
    assert_eq!(other.find(&uid).await.unwrap(), Some(record.clone()));
    let mut wrong = record.clone();
    wrong.start_time += 1;
    assert!(other.adopt(&wrong, &run_dir).await.unwrap().is_none(), "another process with that PID");
    let adopted = other.adopt(&record, &run_dir).await.unwrap().expect("it still runs");
    hello(&*adopted, 2).await;
    adopted.kill().unwrap();
    tokio::time::timeout(Duration::from_secs(1), adopted.wait())
        .await
        .expect("the end is seen within a second");
    cgroup.remove().await.unwrap();
    assert!(other.adopt(&record, &run_dir).await.unwrap().is_none());
    assert_eq!(other.find(&uid).await.unwrap(), None);
}

#[tokio::test]
async fn a_vmm_that_cannot_start_says_why_and_leaves_nothing() {
    let boot = boot_files();
    let dir = tempfile::tempdir().unwrap();
    let run_dir = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
    let uid = format!("vmm-test-bad-{}", std::process::id());
    let cgroup =
        Cgroup::create("imp-test", &uid, Limits { memory_bytes: 256 << 20, cpu_millis: 1000 }).unwrap();
    let qemu = Qemu::new(Utf8Path::new("qemu-system-x86_64")).unwrap();
    let bad = LaunchConfig { kernel: "/etc/passwd".into(), ..config(&uid, &run_dir, &boot, &cgroup) };
    let error = qemu.launch(&bad).await.unwrap_err().to_string();
    assert!(error.contains("kernel"), "{error}");
    assert_eq!(qemu.find(&uid).await.unwrap(), None);
    let nonsense = LaunchConfig { uid: "a,b".into(), ..config(&uid, &run_dir, &boot, &cgroup) };
    let error = qemu.launch(&nonsense).await.unwrap_err().to_string();
    assert!(error.contains("\"a,b\""), "{error}");
    cgroup.remove().await.unwrap();
}

#[tokio::test]
async fn a_launch_that_is_given_up_leaves_nothing() {
    let boot = boot_files();
    let dir = tempfile::tempdir().unwrap();
    let run_dir = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
    let uid = format!("vmm-test-dropped-{}", std::process::id());
    let cgroup =
        Cgroup::create("imp-test", &uid, Limits { memory_bytes: 256 << 20, cpu_millis: 1000 }).unwrap();
    let qemu = Qemu::new(Utf8Path::new("qemu-system-x86_64")).unwrap();
    let config = config(&uid, &run_dir, &boot, &cgroup);
    {
        let launch = qemu.launch(&config);
        tokio::pin!(launch);
        // Polled until the process is there, then dropped.
        let begun = imp_testkit::wait::wait_for(Duration::from_secs(30), "the process", async || {
            tokio::select! {
                _ = &mut launch => Ok(()),
                () = tokio::task::yield_now() => if cgroup.pids().is_empty() { Err("none yet") } else { Ok(()) },
            }
        });
        begun.await.unwrap();
    }
    imp_testkit::wait::wait_for(Duration::from_secs(10), "the process to be gone", async || {
        if cgroup.pids().is_empty() { Ok(()) } else { Err(format!("{:?}", cgroup.pids())) }
    })
    .await
    .unwrap();
    cgroup.remove().await.unwrap();
}

#[tokio::test]
async fn hardware_virtualisation_is_believed_after_a_guest_only_and_remembered() {
    let boot = boot_files();
    let dir = tempfile::tempdir().unwrap();
    let scratch = Utf8PathBuf::from_path_buf(dir.path().to_owned()).unwrap();
    let state = scratch.join("kvm.json");
    let qemu = Qemu::new(Utf8Path::new("qemu-system-x86_64")).unwrap();
    let probe = kvm::probe(&qemu, &boot.kernel, &boot.initrd, &scratch, &state, IDS).await.unwrap();
    assert_eq!(probe.usable, probe.reason.is_empty(), "{probe:?}");
    let again =
        kvm::probe(&qemu, &boot.kernel, &boot.initrd, Utf8Path::new("/nowhere"), &state, IDS).await.unwrap();
    assert_eq!(again, probe, "the second answer needs no trial");
    eprintln!("{probe:?}");
}
