use std::cell::Cell;
use std::collections::HashMap;

use http::StatusCode;
use imp_api::ImpVM;
use serde_json::json;

use super::objects::{Data, Kind, Objects, Reader};
use super::{environment, pull_secrets};
use crate::subresources::error::ApiError;

/// A namespace's objects in memory.
#[derive(Default)]
struct Memory {
    objects: HashMap<(Kind, &'static str), Data>,
    account: Vec<String>,
    reads: Cell<usize>,
}

impl Memory {
    fn with(mut self, kind: Kind, name: &'static str, data: &[(&str, &[u8])]) -> Self {
        let data = data.iter().map(|(key, value)| ((*key).to_owned(), value.to_vec())).collect();
        self.objects.insert((kind, name), data);
        self
    }
}

impl Reader for &Memory {
    async fn read(&self, kind: Kind, name: &str) -> Result<Option<Data>, ApiError> {
        self.reads.set(self.reads.get() + 1);
        Ok(self
            .objects
            .iter()
            .find(|((of, called), _)| *of == kind && *called == name)
            .map(|(_, data)| data.clone()))
    }

    async fn default_pull_secrets(&self) -> Result<Vec<String>, ApiError> {
        Ok(self.account.clone())
    }
}

fn vm(spec: serde_json::Value) -> ImpVM {
    let mut object = json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u-1",
            "labels": {"app": "shop"}, "annotations": {"x/y": "noted"}},
        "spec": {"classRef": {"name": "small"}},
        "status": {"nodeName": "n1", "ip": "10.0.0.2"}});
    object["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(object).unwrap()
}

fn env(variables: &serde_json::Value) -> ImpVM {
    vm(json!({ "env": variables }))
}

async fn resolve(vm: &ImpVM, memory: &Memory) -> Result<Vec<(String, String)>, ApiError> {
    environment::resolve(vm, &mut Objects::new(memory)).await
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[tokio::test]
async fn env_stands_above_env_from_and_each_object_is_read_once() {
    let memory = Memory::default().with(Kind::ConfigMap, "c", &[("A", b"1"), ("B", b"2")]).with(
        Kind::Secret,
        "s",
        &[("PW", b"p")],
    );
    let vm = vm(json!({
        "envFrom": [{"configMapRef": {"name": "c"}}, {"prefix": "S_", "secretRef": {"name": "s"}}],
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "PW"}}}, {"name": "C", "value": "3"}, {"name": "D"}],
    }));
    let expected = [("A", "1"), ("B", "2"), ("S_PW", "p"), ("A", "p"), ("C", "3"), ("D", "")];
    assert_eq!(resolve(&vm, &memory).await.unwrap(), pairs(&expected));
    assert_eq!(memory.reads.get(), 2);
}

#[tokio::test]
async fn literals_are_expanded_and_nothing_else_is() {
    let memory = Memory::default().with(Kind::Secret, "s", &[("PW", b"$(A)$$x$")]);
    let vm = env(&json!([
        {"name": "A", "value": "a"},
        {"name": "PW", "valueFrom": {"secretKeyRef": {"name": "s", "key": "PW"}}},
        {"name": "URL", "value": "db://$(A):$(PW)@h/$(LATER)/$$(A)"},
        {"name": "LATER", "value": "l"},
    ]));
    let expected =
        [("A", "a"), ("PW", "$(A)$$x$"), ("URL", "db://a:$(A)$$x$@h/$(LATER)/$(A)"), ("LATER", "l")];
    assert_eq!(resolve(&vm, &memory).await.unwrap(), pairs(&expected));
}

#[tokio::test]
async fn fields_of_the_vm_are_read() {
    let field =
        |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let vm = env(&json!([
        field("NAME", "metadata.name"),
        field("NS", "metadata.namespace"),
        field("UID", "metadata.uid"),
        field("APP", "metadata.labels['app']"),
        field("NONE", "metadata.labels['other']"),
        field("NOTE", "metadata.annotations['x/y']"),
        field("NODE", "spec.nodeName"),
        field("IP", "status.podIP"),
        field("UNKNOWN", "status.hostIP"),
    ]));
    let expected = [
        ("NAME", "a"),
        ("NS", "ns"),
        ("UID", "u-1"),
        ("APP", "shop"),
        ("NONE", ""),
        ("NOTE", "noted"),
        ("NODE", "n1"),
        ("IP", "10.0.0.2"),
    ];
    assert_eq!(resolve(&vm, &Memory::default()).await.unwrap(), pairs(&expected));
}

#[tokio::test]
async fn what_is_missing_is_told_unless_it_is_optional() {
    let memory = Memory::default().with(Kind::Secret, "s", &[("bytes", b"hidden\xff")]).with(
        Kind::ConfigMap,
        "bad",
        &[("a=b", b"1"), ("ok", b"2")],
    );
    let key = |kind: &str, name: &str, key: &str, optional: bool| {
        env(&json!([{"name": "V", "valueFrom": {kind: {"name": name, "key": key, "optional": optional}}}]))
    };
    let from = |kind: &str, name: &str, optional: bool| {
        vm(json!({"envFrom": [{kind: {"name": name, "optional": optional}}]}))
    };
    for (required, optional, word) in [
        (key("secretKeyRef", "no", "k", false), key("secretKeyRef", "no", "k", true), "\"no\""),
        (key("secretKeyRef", "s", "k", false), key("secretKeyRef", "s", "k", true), "\"k\""),
        (key("configMapKeyRef", "no", "k", false), key("configMapKeyRef", "no", "k", true), "ConfigMap"),
        (from("secretRef", "no", false), from("secretRef", "no", true), "Secret"),
        (from("configMapRef", "no", false), from("configMapRef", "no", true), "ConfigMap"),
    ] {
        let error = resolve(&required, &memory).await.unwrap_err();
        assert_eq!((error.code, error.reason), (StatusCode::FAILED_DEPENDENCY, "SecretUnavailable"));
        assert!(error.message.contains(word), "{error}");
        assert_eq!(resolve(&optional, &memory).await.unwrap(), []);
    }
    let error = resolve(&key("secretKeyRef", "s", "bytes", true), &memory).await.unwrap_err();
    assert!(error.message.contains("UTF-8") && !error.message.contains("hidden"), "{error}");
    assert_eq!(resolve(&from("configMapRef", "bad", false), &memory).await.unwrap(), pairs(&[("ok", "2")]));
}

#[tokio::test]
async fn pull_secrets_are_the_vms_or_else_the_service_accounts() {
    let old = br#"{"r.example": {"auth": "eA=="}}"#;
    let mut memory = Memory::default()
        .with(Kind::Secret, "own", &[(".dockerconfigjson", b"own")])
        .with(Kind::Secret, "old", &[(".dockercfg", old)])
        .with(Kind::Secret, "none", &[("password", b"hidden")]);
    let resolve =
        async |vm: ImpVM, memory: &Memory| pull_secrets::resolve(&vm.spec, &mut Objects::new(memory)).await;
    let naming = |name: &str| vm(json!({"imagePullSecrets": [{"name": name}]}));
    assert_eq!(resolve(vm(json!({})), &memory).await.unwrap(), Vec::<Vec<u8>>::new());
    memory.account = vec!["old".to_owned(), "gone".to_owned(), "none".to_owned()];
    let documents = resolve(vm(json!({})), &memory).await.unwrap();
    let document: serde_json::Value = serde_json::from_slice(&documents[0]).unwrap();
    assert_eq!((documents.len(), document), (1, json!({"auths": {"r.example": {"auth": "eA=="}}})));
    assert_eq!(resolve(naming("own"), &memory).await.unwrap(), [b"own"]);
    for name in ["gone", "none"] {
        let error = resolve(naming(name), &memory).await.unwrap_err();
        assert_eq!(error.code, StatusCode::FAILED_DEPENDENCY);
        assert!(error.message.contains(name) && !error.message.contains("hidden"), "{error}");
    }
}
