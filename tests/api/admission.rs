//! What the API server admits, what it makes of it, and what it refuses.

use kube::Client;
use kube::api::PostParams;
use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::environment::{api_of, client, missing_from};

fn table(text: &str) -> Vec<Value> {
    let rows: Vec<Value> = serde_saphyr::from_str(text).unwrap();
    assert!(!rows.is_empty());
    rows
}

/// The object of a row, with what all objects need.
fn object(row: &Value) -> Value {
    let mut object =
        json!({"apiVersion": "imp.dev/v1alpha1", "kind": row["kind"], "metadata": {"name": "example"}});
    for key in ["metadata", "spec"] {
        if let Some(value) = row.get(key) {
            object[key] = value.clone();
        }
    }
    object
}

async fn try_create(client: &Client, object: &Value) -> Result<Value, kube::Error> {
    let api = api_of(client, object);
    let parameters = PostParams { dry_run: true, ..PostParams::default() };
    let created = api.create(&parameters, &kube::api::DynamicObject::deserialize(object).unwrap()).await?;
    Ok(serde_json::to_value(created).unwrap())
}

#[tokio::test]
async fn usable_manifests_are_admitted_and_defaulted() {
    let client = client().await;
    let mut problems = Vec::new();
    for row in table(include_str!("tables/admitted.yaml")) {
        match try_create(&client, &object(&row)).await {
            Ok(created) => {
                // Nothing that was written is lost (an unknown field would be pruned), and the defaults are there.
                for part in [
                    row.get("spec").cloned().unwrap_or_default(),
                    row.get("becomes").cloned().unwrap_or_default(),
                ] {
                    if let Some(problem) =
                        (!part.is_null()).then(|| missing_from(&created["spec"], &part)).flatten()
                    {
                        problems.push(format!("{}: spec{problem}", row["name"]));
                    }
                }
            }
            Err(error) => problems.push(format!("{}: {error}", row["name"])),
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[tokio::test]
async fn what_could_never_work_is_refused_with_the_field_named() {
    let client = client().await;
    let mut problems = Vec::new();
    for row in table(include_str!("tables/refused.yaml")) {
        let expected: Vec<&str> = row["expect"].as_str().unwrap().split(" & ").collect();
        match try_create(&client, &object(&row)).await {
            Ok(_) => problems.push(format!("{}: admitted", row["name"])),
            Err(kube::Error::Api(status)) if status.code == 422 => {
                for part in expected {
                    if !status.message.contains(part) {
                        problems.push(format!("{}: {part:?} is not in: {}", row["name"], status.message));
                    }
                }
            }
            Err(error) => problems.push(format!("{}: refused in another way: {error}", row["name"])),
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// The shapes of the examples that users of the Go implementation start from.
#[tokio::test]
async fn examples_of_the_go_implementation_are_admitted() {
    let client = client().await;
    let documents: Vec<Value> = serde_saphyr::from_multiple(include_str!("tables/examples.yaml")).unwrap();
    assert!(documents.len() > 30, "{}", documents.len());
    let mut problems = Vec::new();
    for document in documents {
        match try_create(&client, &document).await {
            Ok(created) => {
                if let Some(problem) = missing_from(&created["spec"], &document["spec"]) {
                    problems.push(format!(
                        "{} {}: spec{problem}",
                        document["kind"], document["metadata"]["name"]
                    ));
                }
            }
            Err(error) => {
                problems.push(format!("{} {}: {error}", document["kind"], document["metadata"]["name"]));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[tokio::test]
async fn an_object_without_spec_is_refused_where_a_spec_is_needed() {
    let client = client().await;
    for kind in ["ImpVM", "ImpVMClass", "ImpNetwork"] {
        let error = try_create(&client, &object(&json!({"kind": kind}))).await.unwrap_err().to_string();
        assert!(error.contains("spec: Required value"), "{kind}: {error}");
    }
}

#[tokio::test]
async fn null_is_the_same_as_absent() {
    let client = client().await;
    let row = json!({"kind": "ImpVM", "spec": {
        "classRef": {"name": "small"}, "image": "x", "templateRef": null, "lifecycle": null, "expireAfter": null, "env": null,
    }});
    let created = try_create(&client, &object(&row)).await.unwrap();
    assert_eq!(created["spec"]["lifecycle"], "ephemeral");
    assert!(
        created["spec"].get("expireAfter").is_none() && created["spec"].get("templateRef").is_none(),
        "{created}"
    );
}
