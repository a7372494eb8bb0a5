//! The environment of a VM's workload, as the kubelet makes a container's
//! (`makeEnvironmentVariables` in k8s.io/kubernetes/pkg/kubelet/kubelet_pods.go).

use imp_api::{FieldPath, ImpVM};
use k8s_openapi::api::core::v1::{EnvFromSource, EnvVar, EnvVarSource};
use kube::ResourceExt as _;

use super::objects::{Kind, Objects, Reader, missing};
use crate::subresources::error::ApiError;

/// A variable. No Debug: its value may be a Secret's.
pub(super) type Variable = (String, String);

/// The variables of `vm` in order; the last of a name wins. First `envFrom`, then `env`, in whose literal values
/// `$(NAME)` stands for an earlier variable; other values are never expanded.
///
/// # Errors
/// 424 when something is missing that is not optional, or is no text; 503 when it cannot be read.
pub(super) async fn resolve<R: Reader>(
    vm: &ImpVM,
    objects: &mut Objects<R>,
) -> Result<Vec<Variable>, ApiError> {
    let mut variables = Vec::new();
    for source in &vm.spec.env_from {
        variables.extend(all_of(source, objects).await?.into_iter().map(literally));
    }
    for var in &vm.spec.env {
        match &var.value_from {
            None => variables.push((var.name.clone(), var.value.clone().unwrap_or_default())),
            Some(source) => {
                let value = value_of(vm, var, source, objects).await?;
                variables.extend(value.map(|value| literally((var.name.clone(), value))));
            }
        }
    }
    Ok(super::expand::expand(&variables))
}

/// Keeps a value from being expanded: `$$` stands for `$`.
fn literally((name, value): Variable) -> Variable {
    (name, value.replace('$', "$$"))
}

/// The entries of a ConfigMap or Secret.
async fn all_of<R: Reader>(
    source: &EnvFromSource,
    objects: &mut Objects<R>,
) -> Result<Vec<Variable>, ApiError> {
    let prefix = source.prefix.as_deref().unwrap_or_default();
    let (kind, name, optional) = match (&source.config_map_ref, &source.secret_ref) {
        (Some(map), _) => (Kind::ConfigMap, &map.name, map.optional),
        (None, Some(secret)) => (Kind::Secret, &secret.name, secret.optional),
        (None, None) => return Ok(Vec::new()),
    };
    let Some(data) = objects.get(kind, name, optional == Some(true)).await? else { return Ok(Vec::new()) };
    data.iter()
        .map(|(key, value)| (format!("{prefix}{key}"), key, value))
        // What cannot be the name of a variable is passed over, as for pods.
        .filter(|(variable, ..)| !variable.is_empty() && !variable.contains(['=', '\0']))
        .map(|(variable, key, value)| Ok((variable, text(kind, name, key, value)?)))
        .collect()
}

/// The value of one variable; `None`: it is not set.
async fn value_of<R: Reader>(
    vm: &ImpVM,
    var: &EnvVar,
    source: &EnvVarSource,
    objects: &mut Objects<R>,
) -> Result<Option<String>, ApiError> {
    let (kind, name, key, optional) = match source {
        EnvVarSource { config_map_key_ref: Some(key), .. } => {
            (Kind::ConfigMap, &key.name, &key.key, key.optional)
        }
        EnvVarSource { secret_key_ref: Some(key), .. } => (Kind::Secret, &key.name, &key.key, key.optional),
        EnvVarSource { field_ref: Some(field), .. } => {
            return Ok(FieldPath::parse(&field.field_path).map(|path| field_of(vm, &path)));
        }
        // Condition SpecHonored names it (imp_api::not_honoured).
        _ => return Ok(None),
    };
    let entry = objects.entry(kind, name, key, optional == Some(true)).await.map_err(|mut error| {
        error.message = format!("variable {:?}: {}", var.name, error.message);
        error
    })?;
    entry.map(|value| text(kind, name, key, value)).transpose()
}

fn text(kind: Kind, name: &str, key: &str, value: &[u8]) -> Result<String, ApiError> {
    match std::str::from_utf8(value) {
        Ok(text) if !text.contains('\0') => Ok(text.to_owned()),
        _ => Err(missing(format!(
            "{kind:?} {name:?} holds under key {key:?} what cannot be a variable's value: no UTF-8 text, or a NUL"
        ))),
    }
}

/// A field that the VM does not have is empty, as for pods.
fn field_of(vm: &ImpVM, path: &FieldPath) -> String {
    let status = vm.status.as_ref();
    match path {
        FieldPath::Name => Some(vm.name_any()),
        FieldPath::Namespace => vm.namespace(),
        FieldPath::Uid => vm.uid(),
        FieldPath::Label(key) => vm.labels().get(key).cloned(),
        FieldPath::Annotation(key) => vm.annotations().get(key).cloned(),
        FieldPath::NodeName => status.and_then(|status| status.node_name.clone()),
        FieldPath::Ip => status.and_then(|status| status.ip.clone()),
    }
    .unwrap_or_default()
}
