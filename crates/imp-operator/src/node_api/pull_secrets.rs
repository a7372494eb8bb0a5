//! Credentials for the registry of a VM's image.

use imp_api::ImpVMSpec;
use serde_json::json;

use super::objects::{Data, Kind, Objects, Reader, missing};
use crate::subresources::error::ApiError;

const CONFIG_JSON: &str = ".dockerconfigjson";
/// Of the older type kubernetes.io/dockercfg: what stands under `auths` of the newer.
const CONFIG: &str = ".dockercfg";

/// The VM's pull secrets as documents of type kubernetes.io/dockerconfigjson; a VM that names none has those of its
/// namespace's ServiceAccount `default`, as a pod has.
///
/// # Errors
/// 424 when one that the VM names does not exist or is none. What the ServiceAccount names and does not exist is passed
/// over, as for pods: most images need none.
pub(super) async fn resolve<R: Reader>(
    spec: &ImpVMSpec,
    objects: &mut Objects<R>,
) -> Result<Vec<Vec<u8>>, ApiError> {
    let own: Vec<String> = spec.image_pull_secrets.iter().map(|reference| reference.name.clone()).collect();
    let optional = own.is_empty();
    let names = if optional { objects.reader().default_pull_secrets().await? } else { own };
    let mut documents = Vec::new();
    for name in names {
        match objects.get(Kind::Secret, &name, optional).await?.map(document) {
            Some(Some(document)) => documents.push(document),
            None => tracing::debug!(secret = name, "a pull secret of ServiceAccount default does not exist"),
            Some(None) if optional => {
                tracing::debug!(secret = name, "a pull secret of ServiceAccount default is none");
            }
            Some(None) => {
                return Err(missing(format!(
                    "Secret {name:?} of spec.imagePullSecrets has no key {CONFIG_JSON:?}: its type must be kubernetes.io/dockerconfigjson"
                )));
            }
        }
    }
    Ok(documents)
}

fn document(data: &Data) -> Option<Vec<u8>> {
    if let Some(document) = data.get(CONFIG_JSON) {
        return Some(document.clone());
    }
    let auths: serde_json::Value = serde_json::from_slice(data.get(CONFIG)?).ok()?;
    Some(json!({ "auths": auths }).to_string().into_bytes())
}
