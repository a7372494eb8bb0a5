//! Operator and agent write one status, each its own fields, by server-side apply.

use imp_api::names::field_manager;
use imp_api::{ImpVM, ImpVMStatus, VMPhase};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::environment::client;

fn condition(type_: &str, status: &str, reason: &str) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: String::new(),
        observed_generation: Some(1),
        last_transition_time: Time(Timestamp::from_second(1_700_000_000).unwrap()),
    }
}

/// Applies a status as `manager`, not by force: a conflict is an error.
async fn apply(
    api: &Api<ImpVM>,
    name: &str,
    manager: &str,
    status: &ImpVMStatus,
) -> Result<ImpVM, kube::Error> {
    let object = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": name}, "status": status});
    api.patch_status(name, &PatchParams::apply(manager), &Patch::Apply(object)).await
}

#[tokio::test]
async fn two_managers_share_a_status() {
    let api: Api<ImpVM> = Api::default_namespaced(client().await);
    let vm = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM", "metadata": {"name": "shared"},
        "spec": {"templateRef": {"name": "t"}}});
    api.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();

    let operator = ImpVMStatus {
        node_name: Some("n1".into()),
        ip: Some("10.0.0.2".into()),
        restart_count: Some(0),
        conditions: vec![
            condition("Scheduled", "True", "NodeAssigned"),
            condition("NodeHealthy", "True", "NodeReady"),
        ],
        ..ImpVMStatus::default()
    };
    apply(&api, "shared", field_manager::OPERATOR, &operator).await.unwrap();
    let agent = ImpVMStatus {
        phase: Some(VMPhase::Running),
        runtime_pid: Some(42),
        conditions: vec![condition("Ready", "True", "Running")],
        ..ImpVMStatus::default()
    };
    let merged = apply(&api, "shared", field_manager::AGENT, &agent).await.unwrap();
    let status = merged.status.unwrap();
    assert_eq!((status.node_name.as_deref(), status.phase), (Some("n1"), Some(VMPhase::Running)));
    assert_eq!(status.conditions.len(), 3, "each manager keeps its own conditions: {:?}", status.conditions);

    // The operator drops a field and a condition of its own; the agent's stay.
    let operator = ImpVMStatus {
        ip: None,
        conditions: vec![condition("Scheduled", "True", "NodeAssigned")],
        ..operator
    };
    let merged = apply(&api, "shared", field_manager::OPERATOR, &operator).await.unwrap();
    let status = merged.status.clone().unwrap();
    let types: Vec<&str> = status.conditions.iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!((status.ip, status.runtime_pid, types), (None, Some(42), vec!["Scheduled", "Ready"]));

    // What one manager owns the other cannot take by accident.
    let thief = ImpVMStatus { runtime_pid: Some(1), ..operator.clone() };
    match apply(&api, "shared", field_manager::OPERATOR, &thief).await.unwrap_err() {
        kube::Error::Api(status) => {
            assert!(status.code == 409 && status.message.contains("runtimePID"), "{status:?}");
        }
        error => panic!("{error}"),
    }

    // Applying the same again writes nothing.
    let again = apply(&api, "shared", field_manager::OPERATOR, &operator).await.unwrap();
    assert_eq!(again.metadata.resource_version, merged.metadata.resource_version);

    let managers: Vec<Value> = merged
        .metadata
        .managed_fields
        .iter()
        .flatten()
        .map(|entry| json!([entry.manager, entry.subresource]))
        .collect();
    for manager in [field_manager::OPERATOR, field_manager::AGENT] {
        assert!(managers.contains(&json!([manager, "status"])), "{managers:?}");
    }
}
