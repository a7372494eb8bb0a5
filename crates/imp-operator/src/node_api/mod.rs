//! The node API: what an agent needs of what only the operator may read or sign.
//!
//! An agent proves its node by its token (`caller`) and gets nothing that is not of that node: a serving certificate in
//! the node's name, and environment and pull secrets of VMs that are bound to it. No value is ever logged.

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, header};
use imp_api::ImpVM;
use kube::{Api, Client, ResourceExt as _};
use serde::{Deserialize, Serialize};

use crate::ca::CaError;
use crate::certificates::service_names;
use crate::metrics::Metrics;
use crate::publish::Authorities;
use crate::subresources::error::ApiError;

mod caller;
mod environment;
mod expand;
mod objects;
mod pull_secrets;
#[cfg(test)]
mod tests;

use objects::{Namespace, Objects};

/// Largest certificate request in bytes; a usual one has 500.
const MAX_REQUEST: usize = 16 << 10;

struct NodeApi {
    client: Client,
    /// Imp's own.
    namespace: String,
    authority: Authorities,
    reviewer: caller::Reviewer,
    metrics: Arc<Metrics>,
}

/// Routes of the node API of the operator in `namespace`.
pub fn router(client: Client, namespace: &str, authority: Authorities, metrics: Arc<Metrics>) -> Router {
    let reviewer = caller::Reviewer::new(client.clone(), namespace);
    let state = NodeApi { client, namespace: namespace.to_owned(), authority, reviewer, metrics };
    Router::new()
        .route("/node/v1/certificate", post(certificate))
        .route("/node/v1/vms/{namespace}/{name}", get(vm))
        .layer(DefaultBodyLimit::max(MAX_REQUEST))
        .with_state(Arc::new(state))
}

type Answer = Result<Response, ApiError>;

impl NodeApi {
    fn counted(&self, route: &'static str, answer: Answer) -> Answer {
        let code = answer.as_ref().map_or_else(|error| error.code, Response::status);
        self.metrics.node_api(route, code.as_u16());
        answer
    }
}

async fn certificate(State(state): State<Arc<NodeApi>>, headers: HeaderMap, request: String) -> Answer {
    let answer = sign(&state, &headers, &request).await;
    if answer.is_ok() {
        imp_killpoint::operator("certificate-signed");
    }
    state.counted("certificate", answer)
}

async fn sign(state: &NodeApi, headers: &HeaderMap, request: &str) -> Answer {
    let node = state.reviewer.node(headers).await?;
    // Such a node's certificate would pass for the operator's.
    if service_names(&state.namespace).contains(&node) {
        return Err(ApiError::forbidden(format!(
            "a node called {node} gets no certificate: that is the operator's name"
        )));
    }
    let authority = state.authority.borrow().clone();
    let authority = authority
        .ok_or_else(|| ApiError::unavailable("the operator has not read Imp's CA yet; try again"))?;
    let signed = authority.sign(request, &format!("node:{node}"), std::slice::from_ref(&node));
    let chain = signed.map_err(|error| match error {
        CaError::Request(source) => {
            ApiError::bad_request(format!("{}: {source}", CaError::Request(source.clone())))
        }
        error => ApiError::internal(format!("the certificate of node {node} cannot be made: {error}")),
    })?;
    tracing::info!(node, "signed a serving certificate");
    Ok(([(header::CONTENT_TYPE, "application/pem-certificate-chain")], chain).into_response())
}

#[derive(Deserialize)]
struct VmQuery {
    uid: Option<String>,
}

/// What a VM's node needs of it. No Debug.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct VmAnswer {
    env: Vec<EnvAnswer>,
    /// Documents of type kubernetes.io/dockerconfigjson, in base64.
    docker_config_json: Vec<String>,
}

#[derive(Serialize)]
struct EnvAnswer {
    name: String,
    value: String,
}

async fn vm(
    State(state): State<Arc<NodeApi>>,
    headers: HeaderMap,
    Path((namespace, name)): Path<(String, String)>,
    Query(query): Query<VmQuery>,
) -> Answer {
    let answer = secrets(&state, &headers, &namespace, &name, query.uid.as_deref()).await;
    if answer.is_ok() {
        imp_killpoint::operator("secrets-answered");
    }
    state.counted("vm", answer)
}

async fn secrets(
    state: &NodeApi,
    headers: &HeaderMap,
    namespace: &str,
    name: &str,
    uid: Option<&str>,
) -> Answer {
    let node = state.reviewer.node(headers).await?;
    let uid = uid.filter(|uid| !uid.is_empty());
    let uid = uid.ok_or_else(|| ApiError::bad_request("give the VM's UID: ?uid=…"))?;
    let vm = bound_vm(&state.client, namespace, name, uid, &node).await?;
    let mut objects = Objects::new(Namespace::new(state.client.clone(), namespace));
    let env = environment::resolve(&vm, &mut objects).await?;
    let documents = pull_secrets::resolve(&vm.spec, &mut objects).await?;
    tracing::info!(
        node,
        vm = name,
        namespace,
        variables = env.len(),
        pull_secrets = documents.len(),
        "handed a VM's environment and pull secrets to its node"
    );
    let answer = VmAnswer {
        env: env.into_iter().map(|(name, value)| EnvAnswer { name, value }).collect(),
        docker_config_json: documents.iter().map(|document| STANDARD.encode(document)).collect(),
    };
    Ok(([(header::CACHE_CONTROL, "no-store")], axum::Json(answer)).into_response())
}

/// The VM, if it is bound to `node` and has this UID.
async fn bound_vm(
    client: &Client,
    namespace: &str,
    name: &str,
    uid: &str,
    node: &str,
) -> Result<ImpVM, ApiError> {
    let api = Api::<ImpVM>::namespaced(client.clone(), namespace);
    let found = api.get_opt(name).await.map_err(|error| {
        ApiError::unavailable(format!("ImpVM {namespace}/{name} cannot be read: {error}"))
    })?;
    let vm = found.ok_or_else(|| ApiError::not_found(format!("there is no ImpVM {namespace}/{name}")))?;
    if vm.status.as_ref().and_then(|status| status.node_name.as_deref()) != Some(node) {
        return Err(ApiError::forbidden(format!("ImpVM {namespace}/{name} is not bound to node {node}")));
    }
    if vm.uid().as_deref() != Some(uid) {
        return Err(ApiError::conflict(format!(
            "ImpVM {namespace}/{name} is another by now: its UID is not {uid}"
        )));
    }
    Ok(vm)
}
