//! What `kubectl get` shows.

use imp_api::{ImpNetwork, ImpVM};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::environment::{client, plane};

/// The table that kubectl asks the API server for.
async fn table(path: &str) -> Value {
    let request = http::Request::get(path)
        .header("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .unwrap();
    client().await.request(request).await.unwrap()
}

/// Names of the columns of `kubectl get`, and of those that `-o wide` adds.
fn names(table: &Value) -> (Vec<&str>, Vec<&str>) {
    let columns = table["columnDefinitions"].as_array().unwrap();
    let of = |wide: bool| {
        columns
            .iter()
            .filter(|column| (column["priority"].as_i64() != Some(0)) == wide)
            .map(|column| column["name"].as_str().unwrap())
            .collect()
    };
    (of(false), of(true))
}

#[tokio::test]
async fn vms_show_what_people_look_for() {
    let api: Api<ImpVM> = Api::default_namespaced(client().await);
    let vm = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": "shown"},
        "spec": {"classRef": {"name": "small"}, "networkRef": {"name": "net"}, "image": "nginx:1"}});
    api.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
    let status = json!({"status": {"phase": "Failed", "nodeName": "n1", "ip": "10.0.0.2", "exitCode": 42, "restartCount": 3,
        "message": "exited with code 42", "vmm": {"driver": "qemu", "accelerator": "tcg"}, "conditions": [
        {"type": "Scheduled", "status": "True", "reason": "NodeAssigned", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        {"type": "Ready", "status": "False", "reason": "Failed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    api.patch_status("shown", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();

    let table = table("/apis/imp.dev/v1alpha1/namespaces/default/impvms/shown").await;
    let (usual, wide) = names(&table);
    assert_eq!(usual, ["Name", "Phase", "Ready", "Node", "IP", "Image", "Age"]);
    assert_eq!(wide, ["Class", "Template", "Network", "Exit Code", "Restarts", "Accelerator", "Message"]);
    let cells = table["rows"][0]["cells"].as_array().unwrap();
    let age = usual.len() - 1;
    assert!(cells[age].as_str().is_some_and(|age| !age.is_empty()), "{cells:?}");
    let others: Vec<&Value> =
        cells.iter().enumerate().filter(|(index, _)| *index != age).map(|(_, cell)| cell).collect();
    assert_eq!(
        json!(others),
        json!([
            "shown",
            "Failed",
            "False",
            "n1",
            "10.0.0.2",
            "nginx:1",
            "small",
            null,
            "net",
            42,
            3,
            "tcg",
            "exited with code 42"
        ])
    );
}

#[tokio::test]
async fn every_kind_has_its_columns() {
    for (plural, expected) in [
        ("impvmclasses", vec!["Name", "VCPU", "Memory", "Disk", "Arch", "Age"]),
        ("impvmtemplates", vec!["Name", "Class", "Network", "Image", "Age"]),
        ("impnetworks", vec!["Name", "Subnet", "NAT", "Age"]),
        ("impvmsnapshots", vec!["Name", "Source", "Phase", "Schedule", "Age"]),
        ("impvmmigrations", vec!["Name", "Source", "Target", "Phase", "Age"]),
        ("impwarmpools", vec!["Name", "Snapshot", "Size", "Ready", "Age"]),
        ("impvmrunnerpools", vec!["Name", "Platform", "Template", "Idle", "Active", "Age"]),
        ("clusterimpconfigs", vec!["Name", "CNI", "DefaultFraction", "Age"]),
        ("clusterimpnodeprofiles", vec!["Name", "Fraction", "MaxVMs", "Ready", "CPUs", "VMM", "KVM", "Age"]),
    ] {
        let table = table(&format!("/apis/imp.dev/v1alpha1/{plural}")).await;
        assert_eq!(names(&table).0, expected, "{plural}");
    }
}

#[tokio::test]
async fn kinds_are_found_by_short_name_and_category() {
    let api: Api<ImpNetwork> = Api::default_namespaced(client().await);
    let network = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpNetwork", "metadata": {"name": "categorised"},
        "spec": {"subnet": "10.0.0.0/24", "nat": {"enabled": true}}});
    api.create(&PostParams::default(), &serde_json::from_value(network).unwrap()).await.unwrap();
    let plane = plane().await;
    for what in ["imp", "all", "impnet"] {
        let text = crate::environment::output(plane.kubectl().args(["get", what])).unwrap();
        let row = text
            .lines()
            .find(|line| line.contains("categorised"))
            .unwrap_or_else(|| panic!("{what}: {text}"));
        assert!(row.contains("10.0.0.0/24") && row.contains("true"), "{row}");
    }
    for short in ["impvm", "impcls", "impvmt", "impsnap", "impmig", "impwp", "imprp", "impcfg", "impnp"] {
        crate::environment::output(plane.kubectl().args(["get", short])).unwrap();
    }
}
