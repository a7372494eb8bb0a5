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
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::ca::Authority;

/// Key of the certificate in ConfigMap `imp-ca`.
const CA_KEY: &str = "ca.crt";
/// Pause after a failed write.
const RETRY: Duration = Duration::from_secs(5);

/// The CA as it changes, see [`crate::certificates::Certificates::authority`].
pub type Authorities = watch::Receiver<Option<Arc<Authority>>>;

/// A write that makes an object true.
type Write = (PatchParams, Patch<Value>);

/// Keeps ConfigMap `namespace`/imp-ca true, for good.
pub async fn config_map(client: Client, namespace: String, authority: Authorities) {
    let api = Api::<ConfigMap>::namespaced(client, &namespace);
    keep(&api, names::CA_NAME, authority, config_map_write, "ca-published").await;
}

fn config_map_write(found: Option<&ConfigMap>, pem: &str) -> Option<Write> {
    if found.and_then(|map| map.data.as_ref()?.get(CA_KEY)).is_some_and(|text| text == pem) {
        return None;
    }
    let body = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names::CA_NAME, "labels": {"app.kubernetes.io/part-of": "imp"}},
        "data": {CA_KEY: pem},
    });
    Some((PatchParams::apply(names::field_manager::OPERATOR).force(), Patch::Apply(body)))
}

/// Keeps caBundle of the APIService of the aggregated API true, for good. Where there is no APIService, none is made: it
/// comes with the chart.
pub async fn api_service(client: Client, authority: Authorities) {
    let name = format!("v1alpha1.{}", names::SUBRESOURCES_GROUP);
    keep(&Api::<APIService>::all(client), &name, authority, api_service_write, "api-service-told").await;
}

fn api_service_write(found: Option<&APIService>, pem: &str) -> Option<Write> {
    let bundle = ByteString(pem.as_bytes().to_vec());
    if found?.spec.as_ref().is_some_and(|spec| spec.ca_bundle.as_ref() == Some(&bundle)) {
        return None;
    }
    // A bundle is refused next to insecureSkipTLSVerify.
    let body = json!({"spec": {"caBundle": bundle, "insecureSkipTLSVerify": null}});
    let params = PatchParams {
        field_manager: Some(names::field_manager::OPERATOR.to_owned()),
        ..PatchParams::default()
    };
    Some((params, Patch::Merge(body)))
}

/// Makes what `wanted` says, whenever the object called `name` or the CA changes; then comes `killpoint`.
async fn keep<K>(
    api: &Api<K>,
    name: &str,
    mut authority: Authorities,
    wanted: fn(Option<&K>, &str) -> Option<Write>,
    killpoint: &'static str,
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
        retry = false;
        let Some((params, patch)) = wanted(object.as_ref(), current.pem()) else { continue };
        match api.patch(name, &params, &patch).await {
            Ok(_) => imp_killpoint::operator(killpoint),
            // Deleted since it was seen.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => {
                retry = true;
                let kind = K::kind(&());
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "{kind} {name} was not told of Imp's CA; trying again"
                );
            }
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
