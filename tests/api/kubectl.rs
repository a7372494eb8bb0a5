//! What kubectl makes of the definitions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::ListParams;

use crate::environment::{client, output, plane};

#[tokio::test]
async fn explain_reads_well() {
    let plane = plane().await;
    let explain = |what: &str| output(plane.kubectl().args(["explain", what])).unwrap();
    let vm = explain("impvm.spec");
    for expected in
        ["OCI image of the root disk", "imagePullSecrets", "rootDisk", "terminationGracePeriodSeconds"]
    {
        assert!(vm.contains(expected), "{expected} is not in:\n{vm}");
    }
    for (what, expected) in [
        ("impvm", "A virtual machine with a kernel of its own"),
        ("impvm.status.phase", "Where the VM is in its life"),
        ("impvm.spec.lifecycle", "an ephemeral VM is done"),
        ("impvmclass.spec.memoryMiB", "Memory in MiB"),
        ("impnetwork.spec.nat.enabled", "Masquerade"),
        ("clusterimpnodeprofile.status.vmms.hardwareVirtualization", "hardware virtualisation"),
    ] {
        let text = explain(what);
        assert!(text.contains(expected), "{expected} is not in:\n{text}");
    }
}

/// The annotation of client-side apply holds the whole definition; a second apply compares with it.
#[tokio::test]
async fn definitions_are_applied_by_the_client() {
    let plane = plane().await;
    let templates = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/imp-crds/templates");
    let text = output(plane.kubectl().args(["apply", "--filename", templates])).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 10, "{text}");
    assert!(lines.iter().all(|line| line.ends_with("unchanged")), "{text}");
    let crds: Api<CustomResourceDefinition> = Api::all(client().await);
    for crd in crds.list(&ListParams::default()).await.unwrap() {
        let annotations = crd.metadata.annotations.unwrap_or_default();
        assert!(
            annotations.contains_key("kubectl.kubernetes.io/last-applied-configuration"),
            "{:?}",
            crd.metadata.name
        );
        assert_eq!(annotations.get("helm.sh/resource-policy").map(String::as_str), Some("keep"));
        let status = crd.status.unwrap_or_default();
        let structural =
            status.conditions.unwrap_or_default().into_iter().find(|c| c.type_ == "NonStructuralSchema");
        assert!(structural.is_none(), "{:?}: {structural:?}", crd.metadata.name);
    }
}

/// A manifest with a typing error is told to the person, not pruned in silence.
#[tokio::test]
async fn strict_validation_names_unknown_fields() {
    let manifest = "apiVersion: imp.dev/v1alpha1\nkind: ImpVM\nmetadata: {name: typo}\nspec: {templateRef: {name: t}, imagePullSecret: []}\n";
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), manifest).unwrap();
    let error = output(plane().await.kubectl().arg("apply").arg("--filename").arg(file.path()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("unknown field \"spec.imagePullSecret\""), "{error}");
}
