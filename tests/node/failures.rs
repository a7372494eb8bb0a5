//! What cannot work ends with its own reason, in a bounded time, and is gone by a deletion.

use crate::harness::{Node, Options, PATIENCE, boot_dir, shell, vm};
use camino::Utf8Path;
use imp_proto::v1::{self as pb, FailureReason};
use imp_testkit::boot::Cpio;
use std::{fs, process::Stdio, time::Duration};

#[tokio::test]
async fn a_guest_that_never_says_hello_is_given_up_with_its_last_words() {
    let dir = tempfile::tempdir().unwrap();
    let dir = Utf8Path::from_path(dir.path()).unwrap();
    let mut cpio = Cpio::new(Vec::new());
    for name in ["dev", "bin"] {
        cpio.directory(name, 0o755).unwrap();
    }
    cpio.character_device("dev/console", 0o600, 5, 1).unwrap();
    cpio.file("bin/busybox", 0o755, &fs::read("/bin/busybox").unwrap()).unwrap();
    let init =
        "#!/bin/busybox sh\necho an init that has no idea > /dev/console\nexec /bin/busybox sleep 1000\n";
    cpio.file("init", 0o755, init.as_bytes()).unwrap();
    fs::write(dir.join("initramfs.cpio"), cpio.finish().unwrap()).unwrap();
    fs::hard_link(boot_dir().unwrap().join("vmlinux"), dir.join("vmlinux"))
        .or_else(|_| fs::copy(boot_dir().unwrap().join("vmlinux"), dir.join("vmlinux")).map(drop))
        .unwrap();
    let arguments = vec!["--hello-seconds=10".to_owned()];
    let options = Options { boot_dir: Some(dir.to_owned()), arguments, ..Default::default() };
    let node = Node::start_with("hello", options).await.unwrap();
    let spec = shell("true").unwrap();
    node.put(&spec).await.unwrap();
    let status = node.ended(&spec).await.unwrap();
    let failure = status.failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::GuestUnreachable, "{failure:?}");
    assert!(failure.message.contains("within 10 s"), "{failure:?}");
    assert!(failure.message.contains("an init that has no idea"), "{failure:?}");
    node.delete(&spec, None).await.unwrap();
    node.removed(&spec).await.unwrap();
}

#[tokio::test]
async fn fr53_a_vm_is_deleted_while_its_image_is_pulled() {
    let arguments = vec!["--insecure-registry=127.0.0.1:5000".to_owned()];
    let node = Node::start_with("pull", Options { arguments, ..Default::default() }).await.unwrap();
    // A registry that takes connections and never answers.
    let mut mute = node.netns.command("busybox");
    mute.args(["nc", "-ll", "-p", "5000", "-e", "sleep", "1000"]);
    let mut mute = mute.stdin(Stdio::null()).process_group_of_its_own().spawn().unwrap();
    let spec = vm("127.0.0.1:5000/any:1", &[]);
    node.put(&spec).await.unwrap();
    node.state(&spec, pb::VmState::Pulling).await.unwrap();
    node.delete(&spec, None).await.unwrap();
    let gone = tokio::time::timeout(Duration::from_secs(5), node.removed(&spec)).await;
    mute.kill().unwrap();
    mute.wait().unwrap();
    gone.expect("a pull in flight does not hold a deletion up").unwrap();
}

trait ProcessGroup {
    fn process_group_of_its_own(&mut self) -> &mut Self;
}

impl ProcessGroup for std::process::Command {
    fn process_group_of_its_own(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}

#[tokio::test]
async fn an_image_that_is_not_there_is_tried_again_until_it_is() {
    let node = Node::start("absent").await.unwrap();
    let home = node.path("late");
    let spec = vm(&format!("oci:{home}:latest"), &["echo", "made it"]);
    node.put(&spec).await.unwrap();
    let status = node.until(&spec, "a failure", |s| s.failure.is_some()).await.unwrap();
    let failure = status.failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::ImageNotFound, "{failure:?}");
    assert!(failure.retrying && failure.message.contains(home.as_str()), "{failure:?}");
    let copied = std::process::Command::new("cp")
        .args(["-r", imp_testkit::images::busybox().unwrap().directory.as_str(), home.as_str()])
        .status()
        .unwrap();
    assert!(copied.success());
    let status = node.ended(&spec).await.unwrap();
    assert_eq!(status.state(), pb::VmState::Stopped, "{status:?}");
    assert_eq!(node.logs(&spec).await.unwrap(), "made it\n");
}

#[tokio::test]
async fn nonsense_is_refused_and_said_at_once() {
    let node = Node::start("nonsense").await.unwrap();
    let mut spec = shell("true").unwrap();
    spec.resources = Some(pb::Resources { vcpus: 0, memory_mib: 128, disk_gib: 1 });
    let refused = node.put(&spec).await.unwrap_err().to_string();
    assert!(refused.contains("at least 1 vCPU"), "{refused}");

    let mut spec = shell("true").unwrap();
    spec.network.as_mut().unwrap().address = "300.1.1.1/24".into();
    node.put(&spec).await.unwrap();
    let failure = node.ended(&spec).await.unwrap().failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::InvalidSpec, "{failure:?}");
    assert!(failure.message.contains("300.1.1.1/24"), "{failure:?}");

    let spec = vm("UPPER CASE", &[]);
    node.put(&spec).await.unwrap();
    let failure = node.ended(&spec).await.unwrap().failure.unwrap();
    assert_eq!(failure.reason(), FailureReason::ImageInvalid, "{failure:?}");
    node.delete(&spec, None).await.unwrap();
    tokio::time::timeout(PATIENCE, node.removed(&spec)).await.unwrap().unwrap();
}

#[tokio::test]
async fn who_is_not_named_is_turned_away() {
    let arguments = vec!["--user=4711".to_owned()];
    let node = Node::start_with("peer", Options { arguments, ..Default::default() }).await.unwrap();
    // The directory is root's; a client must be able to reach the socket for its refusal to mean anything.
    let socket = node.socket();
    let chmod = |path: &Utf8Path| {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    chmod(socket.parent().unwrap());
    let answers = |user: u32| {
        let socket = socket.clone();
        std::thread::spawn(move || {
            let id = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(id, id, id).unwrap();
            let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            // A server of HTTP/2 sends its settings at once.
            std::io::Read::read(&mut stream, &mut [0; 9]).unwrap_or(0)
        })
        .join()
        .unwrap()
    };
    assert!(answers(4711) > 0, "the agent's user gets in");
    assert_eq!(answers(4712), 0, "another user does not");
    assert!(node.log().contains("4712"), "and that is told");
}
