//! What clients and the API server's aggregator ask first: groups, versions, resources, OpenAPI.

use axum::Json;
use imp_api::names::SUBRESOURCES_GROUP;
use serde_json::{Value, json};

/// Version of the aggregated API.
pub const VERSION: &str = "v1alpha1";

fn group() -> Value {
    let version = json!({"groupVersion": format!("{SUBRESOURCES_GROUP}/{VERSION}"), "version": VERSION});
    json!({"name": SUBRESOURCES_GROUP, "versions": [version], "preferredVersion": version})
}

/// `/apis`.
pub async fn groups() -> Json<Value> {
    Json(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group()]}))
}

/// `/apis/<group>`.
pub async fn this_group() -> Json<Value> {
    let mut answer = group();
    answer["kind"] = "APIGroup".into();
    answer["apiVersion"] = "v1".into();
    Json(answer)
}

/// `/apis/<group>/<version>`.
pub async fn resources() -> Json<Value> {
    let resource = |name: &str, kind: &str, verbs: &[&str]| json!({"name": format!("impvms/{name}"), "singularName": "", "namespaced": true, "kind": kind, "verbs": verbs});
    let streams = ["create", "get"];
    Json(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{SUBRESOURCES_GROUP}/{VERSION}"),
        "resources": [
            resource("attach", "ImpVMAttachOptions", &streams),
            resource("console", "ImpVMConsoleOptions", &streams),
            resource("exec", "ImpVMExecOptions", &streams),
            resource("log", "ImpVMLogOptions", &["get"]),
        ],
    }))
}

fn paths() -> Value {
    let prefix = format!("/apis/{SUBRESOURCES_GROUP}/{VERSION}/namespaces/{{namespace}}/impvms/{{name}}");
    let name =
        |name: &str| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
    let mut paths = serde_json::Map::new();
    for (subresource, text) in [
        ("attach", "connect to the standard streams of the VM's workload"),
        ("console", "connect to the VM's serial console"),
        ("exec", "run a command in the VM"),
        ("log", "read the output of the VM's workload"),
    ] {
        let call = json!({
            "description": text,
            "operationId": format!("connectNamespacedImpVM{subresource}"),
            "parameters": [name("namespace"), name("name")],
            "responses": {"200": {"description": "OK"}},
        });
        paths.insert(format!("{prefix}/{subresource}"), json!({"get": call}));
    }
    Value::Object(paths)
}

/// `/openapi/v2`: this API has no types of its own, so there is nothing to describe.
pub async fn openapi_v2() -> Json<Value> {
    Json(
        json!({"swagger": "2.0", "info": {"title": "Imp", "version": VERSION}, "paths": {}, "definitions": {}}),
    )
}

/// `/openapi/v3`.
pub async fn openapi_v3() -> Json<Value> {
    let path = format!("apis/{SUBRESOURCES_GROUP}/{VERSION}");
    let url = format!("/openapi/v3/{path}");
    Json(json!({"paths": {path: {"serverRelativeURL": url}}}))
}

/// `/openapi/v3/apis/<group>/<version>`.
pub async fn openapi_v3_group() -> Json<Value> {
    Json(
        json!({"openapi": "3.0.0", "info": {"title": "Imp", "version": VERSION}, "paths": paths(), "components": {"schemas": {}}}),
    )
}
