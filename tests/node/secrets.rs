//! Secrets reach the workload and nothing else.

use crate::harness::{Node, kill, processes, shell, uid, workload};
use imp_proto::v1 as pb;
use rustix::process::Signal;
use std::{fs, path::Path};

const SECRET: &str = "correct-horse-battery-staple";

/// Files below a directory that hold the text, as it is or in one of base64's three alignments.
fn holding(dir: &Path, text: &str, found: &mut Vec<String>) {
    let forms = forms(text);
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            holding(&entry.path(), text, found);
        } else if kind.is_file() {
            let bytes = fs::read(entry.path()).unwrap_or_default();
            let held = forms.iter().any(|form| bytes.windows(form.len()).any(|w| w == form.as_bytes()));
            if held {
                found.push(entry.path().display().to_string());
            }
        }
    }
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
    let look = |node: &Node, text: &str| {
        let mut found = Vec::new();
        holding(node.path("").as_std_path(), text, &mut found);
        found
    };
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
