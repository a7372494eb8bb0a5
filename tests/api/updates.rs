//! What may change once an object exists.

use imp_api::ImpVM;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::environment::client;

async fn vm(name: &str, spec: Value) -> Api<ImpVM> {
    let api: Api<ImpVM> = Api::default_namespaced(client().await);
    let vm =
        json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name}, "spec": spec});
    api.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
    api
}

async fn change(api: &Api<ImpVM>, name: &str, spec: Value) -> Result<ImpVM, String> {
    let patch = Patch::Merge(json!({"spec": spec}));
    api.patch(name, &PatchParams::default(), &patch).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn a_node_is_chosen_once() {
    let api = vm("chosen", json!({"templateRef": {"name": "t"}})).await;
    let chosen = change(&api, "chosen", json!({"nodeName": "n1"})).await.unwrap();
    assert_eq!(chosen.spec.node_name.as_deref(), Some("n1"));
    for other in [json!("n2"), json!(""), Value::Null] {
        let error = change(&api, "chosen", json!({"nodeName": other})).await.unwrap_err();
        assert!(error.contains("spec.nodeName") && error.contains("cannot be changed"), "{other}: {error}");
    }
    // Everything else may still change.
    let changed = change(&api, "chosen", json!({"nodeName": "n1", "image": "other", "expireAfter": "2h"}))
        .await
        .unwrap();
    assert_eq!(changed.metadata.generation, Some(3));
}

#[tokio::test]
async fn rules_hold_for_updates() {
    let api = vm("ruled", json!({"classRef": {"name": "small"}, "image": "x"})).await;
    for (wrong, expected) in [
        (json!({"image": null}), "spec.image"),
        (json!({"classRef": null}), "spec.classRef"),
        (json!({"templateRef": {"name": "t"}}), "exclude each other"),
        (json!({"expireAfter": "5s"}), "spec.expireAfter"),
    ] {
        let error = change(&api, "ruled", wrong).await.unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // From class to template in one step is fine.
    change(&api, "ruled", json!({"classRef": null, "templateRef": {"name": "t"}})).await.unwrap();
}

#[tokio::test]
async fn status_is_changed_through_its_subresource_alone() {
    let api = vm("stateful", json!({"templateRef": {"name": "t"}})).await;
    let patch = Patch::Merge(json!({"status": {"phase": "Running"}}));
    let through_object = api.patch("stateful", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(through_object.status, None, "a status that came with the object is dropped");
    let through_status = api.patch_status("stateful", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(through_status.metadata.generation, Some(1), "status does not count as a new generation");
    let wrong = Patch::Merge(json!({"status": {"phase": "Sleeping"}}));
    let error = api.patch_status("stateful", &PatchParams::default(), &wrong).await.unwrap_err().to_string();
    assert!(error.contains("status.phase: Unsupported value"), "{error}");
}
