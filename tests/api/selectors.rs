//! Agents watch the VMs of their own node alone, by field selector.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use imp_api::ImpVM;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

use crate::environment::client;

async fn vms(client: &Client) -> Api<ImpVM> {
    let namespace = json!({"metadata": {"name": "selectors"}});
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &serde_json::from_value(namespace).unwrap()).await.unwrap();
    let api: Api<ImpVM> = Api::namespaced(client.clone(), "selectors");
    for (name, spec_node, status) in [
        ("pending", None, json!({"phase": "Pending"})),
        ("pinned", Some("n2"), json!({"phase": "Pending"})),
        ("one", None, json!({"phase": "Running", "nodeName": "n1"})),
        ("two", None, json!({"phase": "Starting", "nodeName": "n1"})),
        ("three", None, json!({"phase": "Running", "nodeName": "n2"})),
    ] {
        let vm = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name},
            "spec": {"templateRef": {"name": "t"}, "nodeName": spec_node}});
        api.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(json!({"status": status})))
            .await
            .unwrap();
    }
    api
}

#[tokio::test]
async fn vms_are_selected_by_node_and_phase() {
    let api = vms(&client().await).await;
    for (selector, expected) in [
        ("status.nodeName=n1", vec!["one", "two"]),
        ("status.nodeName=", vec!["pending", "pinned"]),
        ("status.phase=Running", vec!["one", "three"]),
        ("status.phase=Running,status.nodeName=n1", vec!["one"]),
        ("status.phase!=Running", vec!["pending", "pinned", "two"]),
        ("spec.nodeName=n2", vec!["pinned"]),
    ] {
        let found = api.list(&ListParams::default().fields(selector)).await.unwrap();
        let found: BTreeSet<String> = found.iter().map(|vm| vm.name_any()).collect();
        assert_eq!(found, expected.into_iter().map(str::to_owned).collect(), "{selector}");
    }

    // A VM that is bound while somebody watches by node appears to the watcher.
    let start = api.list(&ListParams::default().fields("status.nodeName=n9")).await.unwrap();
    assert!(start.items.is_empty());
    let version = start.metadata.resource_version.unwrap();
    let mut events =
        api.watch(&WatchParams::default().fields("status.nodeName=n9"), &version).await.unwrap().boxed();
    let bind = Patch::Merge(json!({"status": {"nodeName": "n9"}}));
    api.patch_status("pending", &PatchParams::default(), &bind).await.unwrap();
    let event = tokio::time::timeout(Duration::from_secs(30), events.try_next())
        .await
        .expect("no event in 30 s")
        .unwrap();
    match event {
        Some(WatchEvent::Added(vm)) => assert_eq!(vm.name_any(), "pending"),
        other => panic!("{other:?}"),
    }
}
