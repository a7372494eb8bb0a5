//! Fetches the objects that a VM refers to. They are read when a VM is handed to the runtime and never after: a running
//! VM takes changes up with its next start.

use imp_api::{ImpNetwork, ImpVM, ImpVMClass, ImpVMTemplate};
use kube::{Api, Client, ResourceExt as _};

use crate::spec::References;

/// Why a VM's references could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// An object does not exist.
    #[error("{kind} {name}, which the ImpVM refers to, does not exist: create it, or correct the reference")]
    NotFound {
        /// Its kind.
        kind: &'static str,
        /// Its name, with the namespace if it has one.
        name: String,
    },
    /// The API server did not answer.
    #[error("{kind} {name} cannot be read")]
    Read {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
        /// Why.
        source: Box<kube::Error>,
    },
}

/// Fetches template, class and network of `vm`. A template or class that does not exist is left out: the deciders know
/// what to say about it.
///
/// # Errors
/// When an object cannot be read, or the network does not exist.
pub async fn fetch(client: &Client, vm: &ImpVM) -> Result<References, ReferenceError> {
    let namespace = vm.namespace().unwrap_or_default();
    let template = match &vm.spec.template_ref {
        Some(reference) => {
            get::<ImpVMTemplate>(
                Api::namespaced(client.clone(), &namespace),
                "ImpVMTemplate",
                &reference.name,
            )
            .await?
        }
        None => None,
    };
    let inherited = template.as_ref().map(|template| &template.spec);
    let class = async {
        match imp_api::effective::class_name(&vm.spec, inherited) {
            Some(name) => get::<ImpVMClass>(Api::all(client.clone()), "ImpVMClass", name).await,
            None => Ok(None),
        }
    };
    let network = async {
        let Some(name) = imp_api::effective::network_name(&vm.spec, inherited) else { return Ok(None) };
        match get::<ImpNetwork>(Api::namespaced(client.clone(), &namespace), "ImpNetwork", name).await {
            Ok(None) => Err(ReferenceError::NotFound { kind: "ImpNetwork", name: name.to_owned() }),
            found => found,
        }
    };
    let (class, network) = tokio::try_join!(class, network)?;
    Ok(References { class, template, network })
}

async fn get<K>(api: Api<K>, kind: &'static str, name: &str) -> Result<Option<K>, ReferenceError>
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    api.get_opt(name).await.map_err(|error| ReferenceError::Read {
        kind,
        name: name.to_owned(),
        source: Box::new(error),
    })
}
