//! Tells the cluster of Imp's CA: agents by ConfigMap `imp-ca`, the API server by the APIService's caBundle. The leader
//! does, and writes nothing that is true already.

use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use imp_api::names;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::watch;

use crate::ca::Authority;

/// Key of the certificate in ConfigMap `imp-ca`.
const CA_KEY: &str = "ca.crt";
/// Pause after a failed write.
const RETRY: Duration = Duration::from_secs(5);

/// The CA as it changes, see [`crate::certificates::Certificates::authority`].
pub type Authorities = watch::Receiver<Option<Arc<Authority>>>;

/// Keeps ConfigMap `namespace`/imp-ca true, for good.
pub async fn config_map(client: Client, namespace: String, authority: Authorities) {
    let api = Api::<ConfigMap>::namespaced(client, &namespace);
    let write = async |found: Option<&ConfigMap>, authority: &Authority| {
        let text = found.and_then(|map| map.data.as_ref()?.get(CA_KEY)).map(String::as_str);
        if text == Some(authority.pem()) {
            return Ok(());
        }
        let body = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": names::CA_NAME, "labels": {"app.kubernetes.io/part-of": "imp"}},
            "data": {CA_KEY: authority.pem()},
        });
        let params = PatchParams::apply(names::field_manager::OPERATOR).force();
        api.patch(names::CA_NAME, &params, &Patch::Apply(&body)).await.map(drop)
    };
    keep(&api, names::CA_NAME, authority, write).await;
}

/// Keeps caBundle of the APIService of the aggregated API true, for good. Where there is no APIService, none is made: it
/// comes with the chart.
pub async fn api_service(client: Client, authority: Authorities) {
    let api = Api::<APIService>::all(client);
    let name = format!("v1alpha1.{}", names::SUBRESOURCES_GROUP);
    let write = async |found: Option<&APIService>, authority: &Authority| {
        let Some(found) = found else { return Ok(()) };
        let bundle = ByteString(authority.pem().as_bytes().to_vec());
        if found.spec.as_ref().is_some_and(|spec| spec.ca_bundle.as_ref() == Some(&bundle)) {
            return Ok(());
        }
        let body = json!({"spec": {"caBundle": bundle, "insecureSkipTLSVerify": null}});
        let params = PatchParams {
            field_manager: Some(names::field_manager::OPERATOR.to_owned()),
            ..PatchParams::default()
        };
        match api.patch(&name, &params, &Patch::Merge(&body)).await {
            // Deleted since it was seen.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            result => result.map(drop),
        }
    };
    keep(&api, &name, authority, write).await;
}

/// Calls `write` whenever the object called `name` or the CA changes, until both fit.
async fn keep<K>(
    api: &Api<K>,
    name: &str,
    mut authority: Authorities,
    write: impl AsyncFn(Option<&K>, &Authority) -> kube::Result<()>,
) where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = std::pin::pin!(watcher(api.clone(), config).default_backoff());
    let mut object: Option<K> = None;
    // What is there is known once the first list was read.
    let mut synced = false;
    let mut retry = false;
    loop {
        tokio::select! {
            () = next(&mut events, &mut object, &mut synced) => {}
            changed = authority.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(RETRY), if retry => {}
        }
        let current = authority.borrow_and_update().clone();
        let (true, Some(current)) = (synced, current) else { continue };
        let result = write(object.as_ref(), &current).await;
        retry = result.is_err();
        if let Err(error) = result {
            let kind = K::kind(&());
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "{kind} {name} was not told of Imp's CA; trying again"
            );
        }
    }
}

/// Takes in the next event of the watch.
async fn next<K>(
    events: &mut (impl Stream<Item = watcher::Result<Event<K>>> + Unpin),
    object: &mut Option<K>,
    synced: &mut bool,
) {
    match events.next().await {
        Some(Ok(Event::Init)) => (*object, *synced) = (None, false),
        Some(Ok(Event::InitApply(found) | Event::Apply(found))) => *object = Some(found),
        Some(Ok(Event::Delete(_))) => *object = None,
        Some(Ok(Event::InitDone)) => *synced = true,
        Some(Err(error)) => {
            tracing::debug!(error = &error as &dyn std::error::Error, "a watch broke; it is begun again");
        }
        // A watcher never ends; if it did, the CA is still followed.
        None => std::future::pending().await,
    }
}
