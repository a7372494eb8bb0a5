//! Secrets reach the workload and nothing else.

use crate::harness::{Node, kill, processes, shell, uid, workload};
use camino::Utf8Path;
use imp_proto::v1 as pb;
use rustix::process::Signal;
use std::{fs, process::Command};

const SECRET: &str = "correct-horse-battery-staple";

/// Files below a directory that hold the text, as it is or in one of base64's three alignments.
fn holding(dir: &Utf8Path, text: &str) -> Vec<String> {
    let mut grep = Command::new("grep");
    grep.args(["--recursive", "--files-with-matches", "--fixed-strings", "--binary-files=text"]);
    for form in forms(text) {
        grep.args(["-e", &form]);
    }
    let output = grep.arg(dir).output().unwrap();
    assert!(output.stderr.is_empty() && output.status.code() < Some(2), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn forms(text: &str) -> Vec<String> {
    let mut forms = vec![text.to_owned()];
    for skip in 0..3 {
        // Whole groups of three bytes look the same wherever the rest begins.
        let inner = &text.as_bytes()[skip..skip + (text.len() - skip) / 3 * 3];
        forms.push(base64(inner));
    }
    forms
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

#[tokio::test]
async fn a_secret_is_on_no_disk_and_in_no_command_line() {
    let mut node = Node::start("secret").await.unwrap();
    let mut spec =
        shell("[ \"$TOKEN\" = correct-horse-battery-\"${X}staple\" ] && echo got it; sleep 1000").unwrap();
    spec.needs_secrets = true;
    workload(&mut spec).env =
        vec![pb::EnvVar { name: "PLAIN".into(), value: "not-at-all-a-hidden-thing".into() }];
    node.put(&spec).await.unwrap();
    let waiting = node.until(&spec, "it to be taken", |s| s.observed_generation == 1).await.unwrap();
    assert!(waiting.vmm.is_none(), "nothing is started without them");
    let secrets = || pb::VmSecrets {
        env: vec![pb::EnvVar { name: "TOKEN".into(), value: SECRET.into() }],
        ..Default::default()
    };
    node.put_with(&spec, Some(secrets())).await.unwrap();
    node.said(&spec, "got it").await.unwrap();
    let look = |node: &Node, text: &str| holding(&node.path(""), text);
    assert!(!look(&node, "not-at-all-a-hidden-thing").is_empty(), "the search finds what is on disk");
    assert_eq!(look(&node, SECRET), Vec::<String>::new());
    for pid in processes(&uid(&spec)).into_iter().chain([node.pid().unwrap()]) {
        for file in ["cmdline", "environ"] {
            let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap();
            assert!(!String::from_utf8_lossy(&bytes).contains(SECRET), "{file} of {pid}");
        }
    }
    // After the runtime's death the VM goes on; the next attempt waits for the secrets to be put again.
    let pid = node.running(&spec).await.unwrap().vmm.unwrap().pid;
    node.restart().await.unwrap();
    assert_eq!(node.running(&spec).await.unwrap().vmm.unwrap().pid, pid);
    kill(pid, Signal::KILL).unwrap();
    node.ended(&spec).await.unwrap();
    spec.attempt = 1;
    let status = node.put(&spec).await.unwrap();
    assert!(status.vmm.is_none_or(|v| v.pid == 0), "no secrets, no VM");
    node.put_with(&spec, Some(secrets())).await.unwrap();
    node.running(&spec).await.unwrap();
    assert_eq!(look(&node, SECRET), Vec::<String>::new());
}
