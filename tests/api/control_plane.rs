//! The control plane of the testkit itself: what it starts really goes away, and outages can be played.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use imp_testkit::controlplane::{Component, ControlPlane, Options};
use imp_testkit::wait::wait_for;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

#[tokio::test]
async fn a_control_plane_survives_outages_and_leaves_nothing() {
    let options = Options { controller_manager: true, ..Options::default() };
    let plane = ControlPlane::start(options).await.unwrap();
    let dir = plane.dir().to_owned();
    let client = plane.client().await.unwrap();

    // The controller-manager works: a new namespace gets its ServiceAccount, and goes away when it is deleted.
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"name": "made"}})).unwrap();
    namespaces.create(&PostParams::default(), &namespace).await.unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "made");
    wait_for(Duration::from_secs(60), "the default ServiceAccount", async || accounts.get("default").await)
        .await
        .unwrap();
    namespaces.delete("made", &DeleteParams::default()).await.unwrap();
    wait_for(Duration::from_secs(60), "the namespace to be gone", async || {
        match namespaces.get_opt("made").await {
            Ok(None) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();

    // Both parts are killed and come back on the same data.
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let map = serde_json::from_value(json!({"metadata": {"name": "kept"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    plane.kill(Component::ApiServer).unwrap();
    assert!(maps.list(&ListParams::default()).await.is_err(), "nobody answers");
    plane.kill(Component::Etcd).unwrap();
    plane.spawn(Component::Etcd).unwrap();
    plane.spawn(Component::ApiServer).unwrap();
    plane.wait_ready().await.unwrap();
    maps.get("kept").await.unwrap();

    // A person without rights has none; an administrator has.
    let stranger = plane.client_of("stranger", None).await.unwrap();
    match Api::<ConfigMap>::default_namespaced(stranger).list(&ListParams::default()).await.unwrap_err() {
        kube::Error::Api(status) => assert_eq!(status.code, 403),
        error => panic!("{error}"),
    }
    let master = plane.client_of("chief", Some("system:masters")).await.unwrap();
    Api::<ConfigMap>::default_namespaced(master).list(&ListParams::default()).await.unwrap();

    drop(plane);
    assert_eq!(processes_of(dir.as_str()), Vec::<u32>::new());
    assert!(!dir.exists(), "{dir}");
}

/// A test process that is killed, as by a time limit, has no chance to tidy up.
#[tokio::test]
async fn nothing_outlives_a_killed_test() {
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "control_plane::victim", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    let line = lines
        .map_while(Result::ok)
        .find(|line| line.contains("victim:"))
        .expect("the victim started nothing");
    let dir = line.split_once("victim:").unwrap().1.to_owned();
    assert!(processes_of(&dir).len() >= 2, "etcd and the API server run");
    victim.kill().unwrap();
    victim.wait().unwrap();
    wait_for(Duration::from_secs(30), "everything to be gone", async || {
        let left = processes_of(&dir);
        let exists = std::path::Path::new(&dir).exists();
        if left.is_empty() && !exists {
            Ok(())
        } else {
            Err(format!("processes {left:?}, directory there: {exists}"))
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
#[ignore = "nothing_outlives_a_killed_test starts and kills it"]
async fn victim() {
    let plane = ControlPlane::start(Options::default()).await.unwrap();
    println!("victim:{}", plane.dir());
    std::future::pending::<()>().await;
}

/// PIDs of processes whose arguments name `dir`.
fn processes_of(dir: &str) -> Vec<u32> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&arguments).contains(dir)
        })
        .collect()
}
