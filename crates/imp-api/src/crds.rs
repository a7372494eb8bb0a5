//! The kinds as CustomResourceDefinitions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt as _;

use crate::{
    ClusterImpConfig, ClusterImpNodeProfile, ImpNetwork, ImpVM, ImpVMClass, ImpVMMigration, ImpVMRunnerPool,
    ImpVMSnapshot, ImpVMTemplate, ImpWarmPool,
};

/// API group of all kinds.
pub const GROUP: &str = "imp.dev";
/// The only version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of all kinds.
pub const API_VERSION: &str = "imp.dev/v1alpha1";

/// CustomResourceDefinitions of all ten kinds, ready to be applied.
pub fn crds() -> Vec<CustomResourceDefinition> {
    [
        ImpVM::crd(),
        ImpVMClass::crd(),
        ImpVMTemplate::crd(),
        ImpNetwork::crd(),
        ImpVMSnapshot::crd(),
        ImpVMMigration::crd(),
        ImpWarmPool::crd(),
        ImpVMRunnerPool::crd(),
        optional_spec(ClusterImpConfig::crd()),
        optional_spec(ClusterImpNodeProfile::crd()),
    ]
    .into_iter()
    .map(finish)
    .collect()
}

/// File name and YAML of each CustomResourceDefinition, as they stand in `charts/imp-crds/templates`.
///
/// # Errors
/// When a definition cannot be written as YAML, which would be a fault of this crate.
pub fn crd_yaml() -> Result<Vec<(String, String)>, serde_saphyr::ser_error::Error> {
    crds()
        .iter()
        .map(|crd| {
            let header = "# Generated from crates/imp-api by `cargo xtask crds`; do not edit.\n";
            Ok((
                format!("{}.yaml", crd.spec.names.plural),
                format!("{header}{}", serde_saphyr::to_string(crd)?),
            ))
        })
        .collect()
}

/// Makes `spec` of a kind whose fields are all optional optional itself.
fn optional_spec(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for schema in schemas(&mut crd) {
        if let Some(spec) = schema.properties.as_mut().and_then(|properties| properties.get_mut("spec")) {
            spec.default = Some(JSON(serde_json::json!({})));
        }
        schema.required = None;
    }
    crd
}

/// What the derive leaves to do.
fn finish(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    // Uninstalling the chart must not delete every VM of the cluster.
    crd.metadata.annotations.get_or_insert_default().insert("helm.sh/resource-policy".into(), "keep".into());
    for schema in schemas(&mut crd) {
        not_nullable(schema);
    }
    crd
}

fn schemas(crd: &mut CustomResourceDefinition) -> impl Iterator<Item = &mut JSONSchemaProps> {
    crd.spec.versions.iter_mut().filter_map(|version| version.schema.as_mut()?.open_api_v3_schema.as_mut())
}

/// Takes `nullable` away everywhere: the API server then drops a null (or puts the default in its place) before it
/// validates, so that null and absent are the same for rules and readers, as in Kubernetes' own kinds.
fn not_nullable(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    schema.properties.iter_mut().flat_map(|properties| properties.values_mut()).for_each(not_nullable);
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => not_nullable(items),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(not_nullable),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        not_nullable(values);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn definitions_in_the_tree_are_current() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts/imp-crds/templates");
        let wanted = crd_yaml().unwrap();
        if std::env::var_os("IMP_UPDATE").is_some() {
            std::fs::create_dir_all(&directory).unwrap();
            for (name, yaml) in &wanted {
                std::fs::write(directory.join(name), yaml).unwrap();
            }
        }
        for (name, yaml) in &wanted {
            let found = std::fs::read_to_string(directory.join(name)).unwrap_or_default();
            assert!(
                found == *yaml,
                "charts/imp-crds/templates/{name} is out of date: run `cargo xtask crds`"
            );
        }
        let files = std::fs::read_dir(&directory).unwrap().count();
        assert_eq!(files, wanted.len(), "{} holds files that belong to no kind", directory.display());
    }

    #[test]
    fn yaml_says_what_the_types_say() {
        for ((name, yaml), crd) in crd_yaml().unwrap().iter().zip(crds()) {
            let read: CustomResourceDefinition = serde_saphyr::from_str(yaml).unwrap();
            assert_eq!(read, crd, "{name}");
            assert!(!yaml.contains("{{"), "{name} would be taken for a template by Helm");
        }
    }

    /// Client-side `kubectl apply` keeps the whole object in an annotation, and annotations may have 256 KiB.
    #[test]
    fn definitions_fit_client_side_apply() {
        for crd in crds() {
            let size = serde_json::to_vec(&crd).unwrap().len();
            assert!(size < 256 * 1024 - 4096, "{:?} has {size} bytes", crd.metadata.name);
        }
    }

    #[test]
    fn nothing_is_nullable_and_everything_is_described() {
        for crd in crds() {
            let name = crd.metadata.name.clone().unwrap();
            assert!(!serde_json::to_string(&crd).unwrap().contains("nullable"), "{name}");
            for version in &crd.spec.versions {
                let schema = version.schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap();
                described(&name, schema);
            }
        }
    }

    fn described(path: &str, schema: &JSONSchemaProps) {
        for (field, schema) in schema.properties.iter().flatten() {
            let path = format!("{path}.{field}");
            let known = ["apiVersion", "kind", "metadata"].contains(&field.as_str());
            assert!(
                known || schema.description.as_ref().is_some_and(|text| text.len() > 3),
                "{path} has no description"
            );
            described(&path, schema);
        }
    }
}
