//! Logs, exec and the console.

use crate::harness::{Node, collect, shell};
use imp_proto::v1 as pb;

#[tokio::test]
async fn a_log_keeps_streams_apart_and_is_followed_to_its_end() {
    let node = Node::start("logs").await.unwrap();
    let spec = shell("echo one; echo two >&2; i=0; while [ $i -lt 5 ]; do i=$((i+1)); echo line $i; sleep 0.2; done; printf 'no newline'").unwrap();
    node.put(&spec).await.unwrap();
    node.running(&spec).await.unwrap();
    let mut client = node.client().await.unwrap();
    let request = pb::LogsRequest { vm: spec.vm.clone(), follow: true, ..Default::default() };
    let followed = client.logs(request).await.unwrap().into_inner();
    let out = collect(followed, |p| p.stream() == pb::OutputStream::Stdout).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&out), "one\nline 1\nline 2\nline 3\nline 4\nline 5\nno newline");
    node.ended(&spec).await.unwrap();
    let all = |request: pb::LogsRequest| {
        let mut client = client.clone();
        async move { client.logs(request).await.unwrap().into_inner() }
    };
    let vm = spec.vm.clone();
    let errors = all(pb::LogsRequest { vm: vm.clone(), ..Default::default() }).await;
    assert_eq!(collect(errors, |p| p.stream() == pb::OutputStream::Stderr).await.unwrap(), b"two\n");
    let tail = all(pb::LogsRequest { vm: vm.clone(), tail_lines: Some(2), ..Default::default() }).await;
    assert_eq!(String::from_utf8_lossy(&collect(tail, |_| true).await.unwrap()), "line 5\nno newline");
    let limited = all(pb::LogsRequest { vm, limit_bytes: Some(5), ..Default::default() }).await;
    assert_eq!(collect(limited, |_| true).await.unwrap().len(), 5);
}

#[tokio::test]
async fn a_command_in_a_vm_has_streams_and_an_end() {
    let node = Node::start("exec").await.unwrap();
    let spec = shell("echo ready; sleep 1000").unwrap();
    node.put(&spec).await.unwrap();
    node.running(&spec).await.unwrap();
    let input = vec![b'x'; 1 << 20];
    let done = node.exec_with(&spec, &["sh", "-c", "echo err >&2; cat; exit 4"], &input).await.unwrap();
    assert_eq!(done.exit.code, 4);
    assert_eq!(done.stdout.len(), input.len(), "a mebibyte there and back");
    assert_eq!(done.stderr, b"err\n");
    let done = node.exec(&spec, &["/no/such"]).await.unwrap();
    assert_eq!(done.exit.code, 127, "{done:?}");
    assert!(done.exit.message.contains("/no/such"), "{done:?}");
    let done = node.exec(&spec, &["sh", "-c", "kill -9 $$"]).await.unwrap();
    assert_eq!((done.exit.code, done.exit.signal), (137, 9));
    assert_eq!(node.logs(&spec).await.unwrap(), "ready\n", "commands leave no trace in the workload's log");
}

#[tokio::test]
async fn the_console_tells_what_the_kernel_said() {
    use futures::StreamExt as _;
    let node = Node::start("console").await.unwrap();
    let spec = shell("echo spoken > /dev/console; sleep 1000").unwrap();
    node.put(&spec).await.unwrap();
    node.running(&spec).await.unwrap();
    let start = pb::console_request::Message::Start(spec.vm.clone().unwrap());
    let first = pb::ConsoleRequest { message: Some(start) };
    let requests = futures::stream::iter([first]).chain(futures::stream::pending());
    let mut console = node.client().await.unwrap().console(requests).await.unwrap().into_inner();
    let mut seen = String::new();
    let read = async {
        while !seen.contains("spoken") {
            seen.push_str(&String::from_utf8_lossy(&console.next().await.unwrap().unwrap().output));
        }
    };
    tokio::time::timeout(crate::harness::PATIENCE, read).await.unwrap();
}
