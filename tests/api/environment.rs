//! One control plane for all tests of the process, with the definitions of the chart in it.

use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use imp_testkit::controlplane::{ControlPlane, Options};
use imp_testkit::wait::wait_for;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client};
use serde_json::Value;
use tokio::sync::OnceCell;

static PLANE: OnceCell<Result<ControlPlane, String>> = OnceCell::const_new();

/// The shared control plane. It ends with the process: nothing drops a static, the testkit sees to it from outside.
pub(crate) async fn plane() -> &'static ControlPlane {
    // A failure is kept too: the other tests need not wait for it again.
    let plane = PLANE.get_or_init(async || start().await.map_err(|error| format!("{error:#}"))).await;
    plane.as_ref().unwrap_or_else(|error| panic!("start the control plane: {error}"))
}

/// A client of an administrator, for the calling test's runtime.
pub(crate) async fn client() -> Client {
    plane().await.client().await.unwrap()
}

async fn start() -> Result<ControlPlane> {
    let plane = ControlPlane::start(Options::default()).await?;
    // As a person would without Helm, and so that the annotation of client-side apply must carry each definition.
    let charts = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/imp-crds/templates");
    output(plane.kubectl().args(["apply", "--filename", charts]))?;
    let crds: Api<CustomResourceDefinition> = Api::all(plane.client().await?);
    wait_for(Duration::from_secs(30), "ten kinds to be served", async || {
        let list = crds.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let missing: Vec<_> =
            list.items.iter().filter(|crd| !established(crd)).map(|crd| &crd.metadata.name).collect();
        if list.items.len() == 10 && missing.is_empty() {
            Ok(())
        } else {
            Err(format!("not established: {missing:?}"))
        }
    })
    .await?;
    Ok(plane)
}

fn established(crd: &CustomResourceDefinition) -> bool {
    let conditions = crd.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Established" && condition.status == "True")
}

/// The API of an object's kind, in namespace `default` where the kind has namespaces.
pub(crate) fn api_of(client: &Client, object: &Value) -> Api<DynamicObject> {
    let kind = object["kind"].as_str().unwrap_or_else(|| panic!("no kind in {object}"));
    let crd = imp_api::crds().into_iter().find(|crd| crd.spec.names.kind == kind);
    let crd = crd.unwrap_or_else(|| panic!("no such kind: {kind}"));
    let gvk = GroupVersionKind::gvk("imp.dev", "v1alpha1", kind);
    let resource = ApiResource::from_gvk_with_plural(&gvk, &crd.spec.names.plural);
    if crd.spec.scope == "Namespaced" {
        Api::namespaced_with(client.clone(), "default", &resource)
    } else {
        Api::all_with(client.clone(), &resource)
    }
}

/// Standard output of a command that must succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let Output { status, stdout, stderr } = command.output().with_context(|| format!("start {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}\n{}", String::from_utf8_lossy(&stderr));
    }
    Ok(String::from_utf8(stdout)?)
}

/// `part` with all that is in it also in `whole`; lists must have equal length.
pub(crate) fn missing_from(whole: &Value, part: &Value) -> Option<String> {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => part.iter().find_map(|(key, part)| {
            missing_from(whole.get(key).unwrap_or(&Value::Null), part)
                .map(|problem| format!(".{key}{problem}"))
        }),
        (Value::Array(whole), Value::Array(part)) if whole.len() == part.len() => {
            whole.iter().zip(part).enumerate().find_map(|(index, (whole, part))| {
                missing_from(whole, part).map(|problem| format!("[{index}]{problem}"))
            })
        }
        _ => (whole != part).then(|| format!(": {whole} where {part} was expected")),
    }
}
