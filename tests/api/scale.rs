//! Pools are scaled by the scale subresource.

use imp_api::{ImpVMRunnerPool, ImpWarmPool};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use crate::environment::{client, output, plane};

#[tokio::test]
async fn fr74_a_warm_pool_is_scaled_to_zero_and_stays_there() {
    let api: Api<ImpWarmPool> = Api::default_namespaced(client().await);
    // Without size, so that the default stands there at first.
    let pool = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpWarmPool", "metadata": {"name": "scaled"},
        "spec": {"snapshotRef": "s", "templateName": "t"}});
    let manager = PatchParams::apply("a-person");
    let made = api.patch("scaled", &manager, &Patch::Apply(&pool)).await.unwrap();
    assert_eq!(made.spec.size, 2);
    let status = Patch::Merge(json!({"status": {"readyCount": 1, "selector": "imp.dev/warm-pool=scaled"}}));
    api.patch_status("scaled", &PatchParams::default(), &status).await.unwrap();

    output(plane().await.kubectl().args(["scale", "impwarmpool", "scaled", "--replicas=0"])).unwrap();
    let scale = api.get_scale("scaled").await.unwrap();
    // Go leaves a zero out.
    assert_eq!(scale.spec.unwrap().replicas.unwrap_or_default(), 0);
    let status = scale.status.unwrap();
    assert_eq!((status.replicas, status.selector.as_deref()), (1, Some("imp.dev/warm-pool=scaled")));

    // The manifest again, still without size: it must not come back.
    let again = api.patch("scaled", &manager, &Patch::Apply(&pool)).await.unwrap();
    assert_eq!(again.spec.size, 0);
}

#[tokio::test]
async fn a_runner_pool_is_scaled_by_its_floor() {
    let api: Api<ImpVMRunnerPool> = Api::default_namespaced(client().await);
    let pool = json!({"apiVersion": "imp.dev/v1alpha1", "kind": "ImpVMRunnerPool", "metadata": {"name": "scaled"}, "spec": {
        "templateName": "t", "platform": {"type": "gitlab", "credentialsSecret": "c"}, "scaling": {"maxConcurrent": 5}}});
    api.create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
    let scale = |replicas: i32| Patch::Merge(json!({"spec": {"replicas": replicas}}));
    api.patch_scale("scaled", &PatchParams::default(), &scale(3)).await.unwrap();
    assert_eq!(api.get("scaled").await.unwrap().spec.scaling.unwrap().min_idle, Some(3));
    // The rules hold on this road too.
    let error = api.patch_scale("scaled", &PatchParams::default(), &scale(6)).await.unwrap_err().to_string();
    assert!(error.contains("minIdle must not exceed maxConcurrent"), "{error}");
}
