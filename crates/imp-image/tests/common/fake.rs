//! A registry that lies, breaks off and stalls. For faults only: everything else is tested with a real one.
#![allow(unreachable_pub, reason = "a module of a test program")]

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use imp_testkit::images::{Compression, ImageBuilder, LayerBuilder};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// What goes wrong with blobs.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Break the connection after that many bytes of each answer.
    pub cut_after: Option<usize>,
    /// Ignore Range headers, as some registries do.
    pub no_ranges: bool,
    /// Change a byte of every blob.
    pub wrong_byte: bool,
    /// Send one byte more than promised (in a chunked answer).
    pub one_more: bool,
    /// Send the first half of each blob and then nothing until told.
    pub stall: bool,
    /// Answer requests for blobs with this.
    pub status: Option<u16>,
    /// Answer that many requests for blobs with 429 and a Retry-After of a second.
    pub too_many: usize,
    /// Send requests for blobs to another fake.
    pub redirect: Option<String>,
    /// Ask for a token, which is good for that many requests.
    pub token_uses: Option<u32>,
    /// Send this as the manifest, whatever was asked for.
    pub manifest: Option<Vec<u8>>,
}

struct Inner {
    faults: Faults,
    content: HashMap<String, Vec<u8>>,
    log: Mutex<Vec<String>>,
    /// Paths that were asked for with an Authorization header.
    authorized: Mutex<Vec<String>>,
    tokens: Mutex<(u32, u32)>,
    address: String,
    /// Answers that have begun and are not over; one that is dropped by its reader counts down too.
    open: watch::Sender<usize>,
    released: watch::Sender<bool>,
}

/// A running fake; it ends with the runtime.
pub struct Fake {
    inner: Arc<Inner>,
}

struct Open(Arc<Inner>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.send_modify(|open| *open -= 1);
    }
}

impl Fake {
    /// Serves one image, `app:v1`, with one layer of noise of that size.
    pub async fn start(layer_bytes: usize, faults: Faults) -> Self {
        let mut layer = LayerBuilder::new();
        let noise: Vec<u8> =
            (0_u64..).flat_map(|i| Sha256::digest(i.to_le_bytes())).take(layer_bytes).collect();
        layer.file("noise", 0o644, &noise);
        Self::serve(&ImageBuilder::new().layer(layer.finish(), Compression::None), faults).await
    }

    /// Serves an image as `app:v1`.
    pub async fn serve(image: &ImageBuilder, faults: Faults) -> Self {
        let dir = crate::common::Dir::new();
        let manifest = image.write_blobs(dir.path()).expect("blobs");
        let mut content = HashMap::new();
        for path in crate::common::files(&dir.join("blobs")) {
            let digest = format!("sha256:{}", path.file_name().expect("name"));
            content.insert(digest, std::fs::read(&path).expect("blob"));
        }
        let root = manifest["digest"].as_str().expect("digest").to_owned();
        content.insert("v1".into(), content[&root].clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let inner = Arc::new(Inner {
            faults,
            content,
            log: Mutex::default(),
            authorized: Mutex::default(),
            tokens: Mutex::default(),
            address: listener.local_addr().expect("address").to_string(),
            open: watch::channel(0).0,
            released: watch::channel(false).0,
        });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&inner));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { inner }
    }

    /// HOST:PORT.
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// Paths that were asked for with credentials.
    pub fn authorized(&self) -> Vec<String> {
        self.inner.authorized.lock().unwrap().clone()
    }

    pub fn reference(&self) -> String {
        format!("{}/app:v1", self.inner.address)
    }

    /// Requests so far: "blobs", "blobs RANGE", "manifests", "token".
    pub fn log(&self) -> Vec<String> {
        self.inner.log.lock().unwrap().clone()
    }

    pub fn count(&self, kind: &str) -> usize {
        self.log().iter().filter(|line| line.starts_with(kind)).count()
    }

    /// Lets stalled answers go on.
    pub fn release(&self) {
        self.inner.released.send_replace(true);
    }

    /// Waits until that many answers are under way.
    pub async fn wait_open(&self, count: usize) {
        let mut open = self.inner.open.subscribe();
        let wait = open.wait_for(|&open| open == count);
        tokio::time::timeout(std::time::Duration::from_secs(20), wait).await.expect("in time").expect("open");
    }
}

async fn answer(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let range = request.headers().get(header::RANGE).and_then(|v| v.to_str().ok()).map(str::to_owned);
    if request.headers().contains_key(header::AUTHORIZATION) {
        inner.authorized.lock().unwrap().push(path.clone());
    }
    let kind = if path == "/token" { "token" } else { path.split('/').nth(3).unwrap_or_default() };
    inner.log.lock().unwrap().push(format!("{kind} {}", range.clone().unwrap_or_default()).trim().to_owned());
    if path == "/token" {
        return token(&inner, &request);
    }
    if let Some(refusal) = refuse(&inner, &request) {
        return refusal;
    }
    let name = path.rsplit('/').next().unwrap_or_default();
    let Some(content) = inner.content.get(name).cloned() else {
        let body = r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#;
        return (StatusCode::NOT_FOUND, body).into_response();
    };
    if kind == "manifests" {
        return inner.faults.manifest.clone().unwrap_or(content).into_response();
    }
    let busy = inner.log.lock().unwrap().iter().filter(|line| line.starts_with("blobs")).count();
    if busy <= inner.faults.too_many {
        return (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "1")]).into_response();
    }
    if let Some(other) = &inner.faults.redirect {
        let there = format!("http://{other}/v2/app/blobs/{name}");
        return (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, there)]).into_response();
    }
    blob(&inner, content, range.as_deref())
}

/// A token for whoever says user:password.
fn token(inner: &Inner, request: &Request) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    // base64 of "user:password"
    if authorization != Some("Basic dXNlcjpwYXNzd29yZA==") {
        return (StatusCode::UNAUTHORIZED, r#"{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}"#)
            .into_response();
    }
    assert!(request.uri().query().is_some_and(|query| query.contains("scope=repository%3Aapp%3Apull")));
    let mut tokens = inner.tokens.lock().unwrap();
    *tokens = (tokens.0 + 1, inner.faults.token_uses.unwrap_or(0));
    format!(r#"{{"token":"t{}"}}"#, tokens.0).into_response()
}

fn refuse(inner: &Inner, request: &Request) -> Option<Response> {
    inner.faults.token_uses?;
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    let mut tokens = inner.tokens.lock().unwrap();
    if tokens.1 > 0 && authorization == Some(format!("Bearer t{}", tokens.0).as_str()) {
        tokens.1 -= 1;
        return None;
    }
    let challenge = format!(
        r#"Bearer realm="http://{}/token",service="fake",scope="repository:app:pull""#,
        inner.address
    );
    Some((StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, challenge)]).into_response())
}

fn blob(inner: &Arc<Inner>, mut content: Vec<u8>, range: Option<&str>) -> Response {
    let faults = &inner.faults;
    if let Some(status) = faults.status {
        return StatusCode::from_u16(status).expect("status").into_response();
    }
    if faults.wrong_byte {
        *content.last_mut().expect("not empty") ^= 1;
    }
    let total = content.len();
    let start = range
        .filter(|_| !faults.no_ranges)
        .and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let mut content = content.split_off(start.unwrap_or(0));
    if faults.one_more {
        content.push(0);
    }
    inner.open.send_modify(|open| *open += 1);
    let open = Open(Arc::clone(inner));
    let mut pieces: Vec<Result<Bytes, std::io::Error>> = Vec::new();
    let mut rest = Vec::new();
    let mut cut_off = false;
    if let Some(cut) = faults.cut_after.filter(|&cut| cut < content.len()) {
        content.truncate(cut);
        pieces.push(Ok(content.into()));
        cut_off = true;
    } else if faults.stall {
        rest = content.split_off(content.len() / 2);
        pieces.push(Ok(content.into()));
    } else {
        pieces.push(Ok(content.into()));
    }
    let mut released = inner.released.subscribe();
    let tail = stream::once(async move {
        let _open = open;
        if cut_off {
            // What was sent before goes out while we are not ready.
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            return Err(std::io::Error::other("cut"));
        }
        if !rest.is_empty() {
            let _ = released.wait_for(|&released| released).await;
        }
        Ok(Bytes::from(rest))
    });
    let body = Body::from_stream(stream::iter(pieces).chain(tail));
    match start {
        Some(start) => {
            let range = format!("bytes {start}-{}/{total}", total - 1);
            (StatusCode::PARTIAL_CONTENT, [(header::CONTENT_RANGE, range)], body).into_response()
        }
        None => body.into_response(),
    }
}
