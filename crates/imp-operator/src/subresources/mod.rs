//! The aggregated API `subresources.imp.dev/v1alpha1`: what flows into and out of VMs, by way of the API server.
//!
//! A call is authenticated ([`authn`]: the API server vouches for its user), authorised (a SubjectAccessReview), and
//! forwarded to the agent of the VM's node over mutual TLS ([`node`]). exec, attach and console speak Kubernetes'
//! channels over WebSocket ([`channels`]), log is plain text.

use axum::Router;
use axum::body::Body;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{Extension, Path, RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures::StreamExt as _;
use http::{HeaderMap, Uri};
use imp_proto::v1::{ConsoleRequest, ExecRequest, console_request, exec_request};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

pub mod authn;
mod authz;
pub mod channels;
pub mod discovery;
pub mod error;
mod log;
pub mod node;
mod pump;
mod query;
pub mod server;

use authn::{PeerCertificates, RequestHeader, User};
use error::ApiError;
use node::{NodeTls, Target};
use pump::{Console, Exec, Kind, QUEUE};
use query::Options;

/// Largest message of a client in bytes.
const MAX_MESSAGE: usize = 1 << 20;

/// What the API needs.
#[derive(Clone)]
pub struct Subresources {
    /// Client of the API server.
    pub client: Client,
    /// Who vouches for callers. The same one checks client certificates in the TLS server.
    pub front: RequestHeader,
    /// How agents are reached.
    pub nodes: NodeTls,
}

impl std::fmt::Debug for Subresources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subresources").field("front", &self.front).finish_non_exhaustive()
    }
}

/// The API's routes. The TLS server puts [`PeerCertificates`] into each request's extensions and serves connections with
/// upgrades.
pub fn router(state: Subresources) -> Router {
    const VM: &str = "/apis/subresources.imp.dev/v1alpha1/namespaces/{namespace}/impvms/{name}";
    Router::new()
        .route("/apis", get(discovery::groups))
        .route("/apis/subresources.imp.dev", get(discovery::this_group))
        .route("/apis/subresources.imp.dev/v1alpha1", get(discovery::resources))
        .route("/openapi/v2", get(discovery::openapi_v2))
        .route("/openapi/v3", get(discovery::openapi_v3))
        .route("/openapi/v3/apis/subresources.imp.dev/v1alpha1", get(discovery::openapi_v3_group))
        .route(&format!("{VM}/exec"), get(exec))
        .route(&format!("{VM}/attach"), get(attach))
        .route(&format!("{VM}/console"), get(console))
        .route(&format!("{VM}/log"), get(log_text))
        .layer(axum::middleware::from_fn_with_state(state.clone(), authenticated))
        .fallback(unknown)
        .with_state(state)
}

async fn unknown(uri: Uri) -> ApiError {
    ApiError::not_found(format!("the server could not find the requested resource {}", uri.path()))
}

/// Lets nobody through whom the API server does not vouch for.
async fn authenticated(
    State(state): State<Subresources>,
    mut request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Result<Response, ApiError> {
    let peer = request.extensions().get::<PeerCertificates>().cloned().unwrap_or_default();
    let user = state.front.authenticate(&peer, request.headers())?;
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

type Socket = Result<WebSocketUpgrade, WebSocketUpgradeRejection>;
type Name = Path<(String, String)>;

/// The VM, if the caller may do this to it.
async fn target(
    state: &Subresources,
    user: &User,
    (namespace, name): &(String, String),
    subresource: &str,
    verb: &str,
) -> Result<Target, ApiError> {
    authz::authorize(&state.client, user, namespace, name, subresource, verb).await?;
    node::find(&state.client, namespace, name).await
}

/// A WebSocket with one of our protocols.
fn socket(upgrade: Socket) -> Result<WebSocketUpgrade, ApiError> {
    let upgrade =
        upgrade.map_err(|error| ApiError::bad_request(format!("a WebSocket is needed here: {error}")))?;
    let upgrade =
        upgrade.protocols(channels::PROTOCOLS).max_message_size(MAX_MESSAGE).max_frame_size(MAX_MESSAGE);
    if upgrade.selected_protocol().is_none() {
        return Err(ApiError::bad_request(format!(
            "no common WebSocket protocol: offer one of {}",
            channels::PROTOCOLS.join(", ")
        )));
    }
    Ok(upgrade)
}

async fn exec(
    state: State<Subresources>,
    user: Extension<User>,
    name: Path<(String, String)>,
    query: RawQuery,
    upgrade: Socket,
) -> Result<Response, ApiError> {
    exec_or_attach(state, user, name, query, upgrade, false).await
}

async fn attach(
    state: State<Subresources>,
    user: Extension<User>,
    name: Path<(String, String)>,
    query: RawQuery,
    upgrade: Socket,
) -> Result<Response, ApiError> {
    exec_or_attach(state, user, name, query, upgrade, true).await
}

async fn exec_or_attach(
    State(state): State<Subresources>,
    Extension(user): Extension<User>,
    Path(name): Name,
    RawQuery(query): RawQuery,
    upgrade: Socket,
    attach: bool,
) -> Result<Response, ApiError> {
    let target = target(&state, &user, &name, if attach { "attach" } else { "exec" }, "create").await?;
    let upgrade = socket(upgrade)?;
    target.must_run()?;
    let start = query::exec(&Options::parse(query.as_deref()), target.vm.clone(), attach)?;
    let mut agent = node::connect(&state.client, &state.nodes, &target.node).await?;
    let (requests, receiver) =
        opened(ExecRequest { message: Some(exec_request::Message::Start(start)) }).await;
    let answers = if attach { agent.attach(receiver).await } else { agent.exec(receiver).await };
    let answers = answers.map_err(|status| ApiError::from_node(&status))?.into_inner();
    Ok(upgrade.on_upgrade(move |socket| pump::pump::<Exec>(socket, requests, answers)))
}

async fn console(
    State(state): State<Subresources>,
    Extension(user): Extension<User>,
    Path(name): Name,
    upgrade: Socket,
) -> Result<Response, ApiError> {
    let target = target(&state, &user, &name, "console", "create").await?;
    let upgrade = socket(upgrade)?;
    target.must_live()?;
    let mut agent = node::connect(&state.client, &state.nodes, &target.node).await?;
    let start = ConsoleRequest { message: Some(console_request::Message::Start(target.vm)) };
    let (requests, receiver) = opened::<<Console as Kind>::Request>(start).await;
    let answers = agent.console(receiver).await.map_err(|status| ApiError::from_node(&status))?.into_inner();
    Ok(upgrade.on_upgrade(move |socket| pump::pump::<Console>(socket, requests, answers)))
}

/// A queue to the node with its first message in it.
async fn opened<T>(start: T) -> (mpsc::Sender<T>, ReceiverStream<T>) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    // The queue is new and its receiver is here.
    let _ = sender.send(start).await;
    (sender, ReceiverStream::new(receiver))
}

async fn log_text(
    State(state): State<Subresources>,
    Extension(user): Extension<User>,
    Path(name): Name,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let target = target(&state, &user, &name, "log", "get").await?;
    let options = query::log(&Options::parse(query.as_deref()), target.vm, Timestamp::now())?;
    let mut text = log::Text::new(options.timestamps, options.request.limit_bytes);
    let mut agent = node::connect(&state.client, &state.nodes, &target.node).await?;
    let chunks =
        agent.logs(options.request).await.map_err(|status| ApiError::from_node(&status))?.into_inner();
    let body = chunks.map(move |chunk| match chunk {
        Ok(chunk) => Ok(text.chunk(chunk)),
        Err(status) => Err(std::io::Error::other(status.message().to_owned())),
    });
    // The limit ends the text; a broken stream ends it with an error, so that nobody takes it for whole.
    let body = body
        .take_while(|text| std::future::ready(!matches!(text, Ok(None))))
        .filter_map(async |text| text.transpose());
    let mut headers = HeaderMap::new();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("text/plain; charset=utf-8"));
    Ok((headers, Body::from_stream(body)).into_response())
}
