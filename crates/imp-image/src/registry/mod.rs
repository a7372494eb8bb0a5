//! A pulling client of the distribution API (OCI distribution specification 1.1).
//!
//! Own, on reqwest, and not oci-client: that reads a manifest of any size into memory, verifies a blob only when it is fetched in one piece
//! (so not when it is resumed), and tries one set of credentials where a VM may bring several. Pulling needs two requests.

mod challenge;
pub(crate) mod credentials;
mod hosts;

pub use hosts::{RegistryHost, RegistryOptions};

use crate::digest::Digest;
use crate::error::{ImageError, InvalidImage};
use crate::limits::Limits;
use crate::manifest::{Blob, DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST};
use bytes::Bytes;
use challenge::Challenge;
use credentials::Credentials;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use hosts::Hosts;
use oci_spec::distribution::Reference;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue, RANGE, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Without a byte for this long a connection is given up (and resumed).
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_REDIRECTS: usize = 10;
/// A registry that asks for more is not waited for: the next try is its caller's.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);
/// Bytes of a token server's answer.
const MAX_TOKEN_ANSWER: u64 = 1 << 20;
/// Bytes of an error's text that are shown.
const MAX_ERROR_TEXT: usize = 300;

/// What is common to all pulls.
#[derive(Clone, Debug)]
pub(crate) struct RegistryClient {
    hosts: Arc<Hosts>,
}

impl RegistryClient {
    pub(crate) fn new(options: &RegistryOptions) -> Result<Self, ImageError> {
        // The programs choose a provider first thing; tests and tools may not have.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        Ok(Self { hosts: Arc::new(Hosts::new(options)?) })
    }

    /// Where an image may be had, with the credentials to try there: the registry's mirrors, then the registry.
    pub(crate) fn repositories(&self, reference: &Reference, documents: &[Vec<u8>]) -> Vec<Repository> {
        let endpoints = self.hosts.endpoints(reference.registry());
        endpoints.into_iter().map(|mirror| self.repository(reference, mirror, documents)).collect()
    }

    fn repository(
        &self,
        reference: &Reference,
        mirror: Option<(String, String)>,
        documents: &[Vec<u8>],
    ) -> Repository {
        let registry = reference.registry();
        // Pull-through caches learn by `ns` which registry is meant, as from containerd.
        let namespace = mirror.is_some().then(|| registry.to_owned());
        let (named, host, repository) = match mirror {
            Some((host, prefix)) => {
                let slash = if prefix.is_empty() { "" } else { "/" };
                (host.clone(), host, format!("{prefix}{slash}{}", reference.repository()))
            }
            None => {
                let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
                (registry.to_owned(), host.to_owned(), reference.repository().to_owned())
            }
        };
        let mut credentials = credentials::for_repository(documents, &named, &repository);
        if credentials.is_empty() {
            credentials.push(Credentials::Anonymous);
        }
        let scheme = if self.hosts.plain_http(&host) { "http" } else { "https" };
        Repository {
            registry: self.clone(),
            client: self.hosts.client(if namespace.is_some() { &host } else { registry }).clone(),
            base: format!("{scheme}://{host}/v2/{repository}"),
            name: format!("{named}/{repository}"),
            namespace,
            repository,
            host,
            credentials,
            session: Arc::new(Mutex::new(Session { index: 0, authorization: None, proven: false })),
        }
    }
}

/// Follows a redirect, but never from HTTPS to plain HTTP. reqwest drops the Authorization header when the host changes.
fn redirect(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    let was_secure = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
    if was_secure && attempt.url().scheme() != "https" {
        return attempt.error("the registry redirects from HTTPS to plain HTTP");
    }
    if attempt.previous().len() > MAX_REDIRECTS {
        return attempt.error("the registry redirects without end");
    }
    attempt.follow()
}

/// What the registry wants to see with each request, once it told us.
#[derive(Debug)]
struct Session {
    /// Which credentials are in use.
    index: usize,
    authorization: Option<HeaderValue>,
    /// The registry has accepted it before.
    proven: bool,
}

/// One repository of one registry.
#[derive(Clone, Debug)]
pub(crate) struct Repository {
    registry: RegistryClient,
    client: Client,
    base: String,
    /// As people write it.
    name: String,
    /// A mirror's word for the registry that it mirrors.
    namespace: Option<String>,
    repository: String,
    host: String,
    credentials: Vec<Credentials>,
    session: Arc<Mutex<Session>>,
}

/// Why a part of an image could not be had.
#[derive(Debug)]
pub(crate) enum FetchError {
    /// Final.
    Image(ImageError),
    /// May work the next time.
    Passing(Passing),
}

/// Trouble that may be over soon.
#[derive(Debug)]
pub(crate) struct Passing {
    pub(crate) problem: String,
    /// How long the registry asks us to stay away (Retry-After, RFC 9110 10.2.3).
    pub(crate) retry_after: Option<Duration>,
}

impl Passing {
    /// How long to wait before the next try when `pause` is due; none if the registry wants to be left alone for longer than anybody
    /// should wait here.
    pub(crate) fn pause(&self, pause: Duration) -> Option<Duration> {
        match self.retry_after {
            Some(asked) if asked > MAX_RETRY_AFTER => None,
            Some(asked) => Some(asked.max(pause)),
            None => Some(pause),
        }
    }
}

impl FetchError {
    pub(crate) fn passing(problem: impl Into<String>) -> Self {
        Self::Passing(Passing { problem: problem.into(), retry_after: None })
    }
}

impl From<ImageError> for FetchError {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}

impl FetchError {
    pub(crate) fn into_image(self, image: &str) -> ImageError {
        match self {
            Self::Image(error) => error,
            Self::Passing(passing) => ImageError::Failed { image: image.to_owned(), detail: passing.problem },
        }
    }
}

impl Repository {
    /// Fetches a manifest by tag or digest: its bytes, verified if a digest was asked for, and their digest.
    pub(crate) async fn manifest(
        &self,
        reference: &str,
        limits: &Limits,
    ) -> Result<(Bytes, Digest), FetchError> {
        let url = format!("{}/manifests/{reference}", self.base);
        let response = self.get(&url, None, true).await?;
        let announced =
            response.headers().get("docker-content-digest").and_then(|v| v.to_str().ok()).map(str::to_owned);
        let limit = limits.manifest_bytes;
        let body =
            bounded_body(response, limit).await.map_err(|problem| self.body_problem(&url, problem, limit))?;
        let digest = Digest::of(&body);
        let asked = reference.starts_with("sha256:").then(|| reference.to_owned());
        for expected in asked.into_iter().chain(announced.filter(|d| d.starts_with("sha256:"))) {
            if expected != digest.to_string() {
                let what = "the digest of its manifest".to_owned();
                let source = InvalidImage::Mismatch { what, expected, actual: digest.to_string() };
                return Err(ImageError::invalid(&self.name, source).into());
            }
        }
        Ok((body, digest))
    }

    /// A blob's bytes from `offset` on, not verified yet. The registry may begin earlier: the first number says where it did.
    pub(crate) async fn blob(
        &self,
        blob: &Blob,
        offset: u64,
    ) -> Result<(u64, BoxStream<'static, Result<Bytes, String>>), FetchError> {
        let url = format!("{}/blobs/{}", self.base, blob.digest);
        let response = self.get(&url, Some(offset).filter(|&o| o > 0), false).await?;
        let start = if response.status() == StatusCode::PARTIAL_CONTENT {
            range_start(&response).unwrap_or(0)
        } else {
            0
        };
        let host = self.host.clone();
        let stream = response.bytes_stream().map_err(move |error| format!("{host}: {}", chain(&error)));
        Ok((start, stream.boxed()))
    }

    /// GETs with whatever authentication is needed, trying all credentials.
    async fn get(&self, url: &str, offset: Option<u64>, manifest: bool) -> Result<Response, FetchError> {
        let mut refused = None;
        // Each set of credentials once, and once more for a token that ran out.
        for _ in 0..=self.credentials.len() + 1 {
            let authorization = self.session.lock().await.authorization.clone();
            let response = self.send(url, offset, manifest, authorization.clone()).await?;
            let status = response.status();
            if status != StatusCode::UNAUTHORIZED && status != StatusCode::FORBIDDEN {
                let mut session = self.session.lock().await;
                session.proven |= session.authorization == authorization;
                drop(session);
                return self.check(url, response).await;
            }
            let challenges: Vec<String> = response
                .headers()
                .get_all(WWW_AUTHENTICATE)
                .iter()
                .filter_map(|value| value.to_str().ok().map(str::to_owned))
                .collect();
            let text = error_text(response).await;
            refused = Some(format!("{status}{text}"));
            if !self.authenticate(&challenges, authorization.as_ref(), &mut refused).await? {
                break;
            }
        }
        Err(self.unauthorized(&refused.unwrap_or_default()).into())
    }

    async fn send(
        &self,
        url: &str,
        offset: Option<u64>,
        manifest: bool,
        authorization: Option<HeaderValue>,
    ) -> Result<Response, FetchError> {
        let mut request = self.client.get(url);
        if manifest {
            request =
                request.header(ACCEPT, [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST].join(", "));
        }
        if let Some(namespace) = &self.namespace {
            request = request.query(&[("ns", namespace)]);
        }
        if let Some(offset) = offset {
            request = request.header(RANGE, format!("bytes={offset}-"));
        }
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.send().await.map_err(|error| FetchError::passing(format!("GET {url}: {}", chain(&error))))
    }

    async fn check(&self, url: &str, response: Response) -> Result<Response, FetchError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let retry_after = retry_after(&response);
        let mut detail = format!("GET {url}: {status}{}", error_text(response).await);
        if let Some(asked) = retry_after {
            detail = format!("{detail} (it asks to be left alone for {} s)", asked.as_secs());
        }
        let passing = Err(FetchError::Passing(Passing { problem: detail.clone(), retry_after }));
        match status {
            StatusCode::NOT_FOUND => Err(ImageError::NotFound { image: self.name.clone(), detail }.into()),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => passing,
            _ if status.is_server_error() => passing,
            _ => Err(ImageError::Failed { image: self.name.clone(), detail }.into()),
        }
    }

    /// Prepares another try after a refusal; false when there is nothing left to try.
    async fn authenticate(
        &self,
        challenges: &[String],
        used: Option<&HeaderValue>,
        refused: &mut Option<String>,
    ) -> Result<bool, FetchError> {
        let mut session = self.session.lock().await;
        if session.authorization.as_ref() != used {
            // Somebody else got new ones in the meantime.
            return Ok(true);
        }
        let challenge = challenge::parse(challenges.iter().map(String::as_str));
        // What was never accepted will not be now; a token that was may just have run out.
        if used.is_some() && !session.proven {
            session.index += 1;
        }
        (session.authorization, session.proven) = (None, false);
        while let Some(credentials) = self.credentials.get(session.index) {
            match self.authorization(challenge.as_ref(), credentials).await {
                Ok(Some(value)) if Some(&value) != used => {
                    session.authorization = Some(value);
                    return Ok(true);
                }
                Ok(_) => session.index += 1,
                Err(FetchError::Image(ImageError::Unauthorized { detail, .. })) => {
                    *refused = Some(detail);
                    session.index += 1;
                }
                Err(other) => return Err(other),
            }
        }
        session.index = 0;
        Ok(false)
    }

    /// The header that answers a challenge with these credentials; none if they cannot.
    async fn authorization(
        &self,
        challenge: Option<&Challenge>,
        credentials: &Credentials,
    ) -> Result<Option<HeaderValue>, FetchError> {
        let value = match (challenge, credentials) {
            (_, Credentials::Bearer { token }) => bearer(token),
            (Some(Challenge::Basic), Credentials::Basic { user, password }) => basic(user, password),
            (Some(Challenge::Bearer { realm, service, scope }), _) => {
                let token = self.token(realm, service.as_deref(), scope.as_deref(), credentials).await?;
                bearer(&token)
            }
            _ => None,
        };
        Ok(value)
    }

    /// Asks the token server (distribution specification, token authentication and OAuth2).
    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: Option<&str>,
        credentials: &Credentials,
    ) -> Result<String, FetchError> {
        let scope = scope.map_or_else(|| format!("repository:{}:pull", self.repository), str::to_owned);
        let refuse = |detail: String| -> FetchError { self.unauthorized(&detail).into() };
        let mut url = Url::parse(realm)
            .map_err(|error| refuse(format!("its token server \"{realm}\" is no URL: {error}")))?;
        let realm_host = url
            .host_str()
            .map(|host| url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")));
        let hosts = &self.registry.hosts;
        let plain_allowed =
            self.base.starts_with("http:") && realm_host.as_ref().is_some_and(|host| hosts.plain_http(host));
        if url.scheme() != "https" && !plain_allowed {
            return Err(refuse(format!(
                "its token server {realm} does not use HTTPS; credentials are not sent there"
            )));
        }
        let client = realm_host.as_ref().map_or(&self.client, |host| hosts.client(host));
        let mut query: Vec<(&str, &str)> = vec![("scope", &scope)];
        query.extend(service.map(|service| ("service", service)));
        let request = if let Credentials::Identity { token } = credentials {
            query.extend([("grant_type", "refresh_token"), ("client_id", "imp"), ("refresh_token", token)]);
            let body = Url::parse_with_params("http://form.invalid/", &query)
                .ok()
                .and_then(|u| u.query().map(str::to_owned));
            client
                .post(url.clone())
                .header(reqwest::header::CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(body.unwrap_or_default())
        } else {
            url.query_pairs_mut().extend_pairs(&query);
            let mut request = client.get(url.clone());
            if let Credentials::Basic { user, password } = credentials
                && let Some(value) = basic(user, password)
            {
                request = request.header(AUTHORIZATION, value);
            }
            request
        };
        let passing =
            |error: &reqwest::Error| FetchError::passing(format!("token server {realm}: {}", chain(error)));
        let response = request.send().await.map_err(|error| passing(&error.without_url()))?;
        let status = response.status();
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            let retry_after = retry_after(&response);
            let problem = format!("token server {realm}: {status}{}", error_text(response).await);
            return Err(FetchError::Passing(Passing { problem, retry_after }));
        }
        if !status.is_success() {
            return Err(refuse(format!(
                "its token server {realm} says {status}{}",
                error_text(response).await
            )));
        }
        let body = bounded_body(response, MAX_TOKEN_ANSWER).await.map_err(|problem| match problem {
            BodyProblem::TooLarge => {
                refuse(format!("its token server {realm} answers more than {MAX_TOKEN_ANSWER} bytes"))
            }
            BodyProblem::Transport(problem) => {
                FetchError::passing(format!("token server {realm}: {problem}"))
            }
        })?;
        let answer: TokenAnswer = serde_json::from_slice(&body)
            .map_err(|_| refuse(format!("its token server {realm} does not answer with a token")))?;
        answer
            .token
            .or(answer.access_token)
            .ok_or_else(|| refuse(format!("its token server {realm} gave no token")))
    }

    fn unauthorized(&self, detail: &str) -> ImageError {
        let tried = match self.credentials.as_slice() {
            [Credentials::Anonymous] => {
                "it does not exist there or is private, and no pull secret matches it".to_owned()
            }
            [_] => "the matching pull secret was not accepted".to_owned(),
            all => format!("none of {} matching pull secrets was accepted", all.len()),
        };
        let registry = self.host.clone();
        ImageError::Unauthorized { registry, image: self.name.clone(), detail: format!("{tried} ({detail})") }
    }

    fn body_problem(&self, url: &str, problem: BodyProblem, limit: u64) -> FetchError {
        match problem {
            BodyProblem::TooLarge => {
                let source = InvalidImage::Limit { at: "manifest".into(), limit, what: "bytes".into() };
                ImageError::invalid(&self.name, source).into()
            }
            BodyProblem::Transport(problem) => FetchError::passing(format!("GET {url}: {problem}")),
        }
    }
}

/// Never shown: it has no Debug.
#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
}

fn secret_header(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn bearer(token: &str) -> Option<HeaderValue> {
    secret_header(&format!("Bearer {token}"))
}

fn basic(user: &str, password: &str) -> Option<HeaderValue> {
    use base64::Engine as _;
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
    secret_header(&format!("Basic {encoded}"))
}

enum BodyProblem {
    TooLarge,
    Transport(String),
}

async fn bounded_body(response: Response, limit: u64) -> Result<Bytes, BodyProblem> {
    if response.content_length().is_some_and(|length| length > limit) {
        return Err(BodyProblem::TooLarge);
    }
    let mut stream = response.bytes_stream();
    let mut body = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| BodyProblem::Transport(chain(&error)))?;
        if (body.len() + chunk.len()) as u64 > limit {
            return Err(BodyProblem::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.into())
}

/// The registry's own words, if it has any: ": CODE message".
async fn error_text(response: Response) -> String {
    #[derive(Deserialize)]
    struct Errors {
        errors: Vec<OneError>,
    }
    #[derive(Deserialize)]
    struct OneError {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let Ok(body) = bounded_body(response, 64 << 10).await else { return String::new() };
    let Ok(Errors { errors }) = serde_json::from_slice(&body) else { return String::new() };
    let words: Vec<String> = errors.into_iter().map(|e| format!("{} {}", e.code, e.message)).collect();
    let text: String = words.join("; ").chars().filter(|c| !c.is_control()).take(MAX_ERROR_TEXT).collect();
    if text.is_empty() { text } else { format!(": {text}") }
}

/// How long a registry asks us to stay away: seconds, or a date (RFC 9110 10.2.3).
fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    let left = at.duration_since(jiff::Timestamp::now());
    Some(Duration::try_from(left).unwrap_or_default())
}

/// Where a partial answer begins.
fn range_start(response: &Response) -> Option<u64> {
    let range = response.headers().get(reqwest::header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// An error with its causes on one line; reqwest tells the cause only there.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
        cause = inner.source();
    }
    text
}

/// What fuzz targets may reach.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing {
    pub(crate) fn credentials(document: &[u8]) {
        let documents = [document.to_vec()];
        for (registry, repository) in [("docker.io", "library/a"), ("registry.lan:5000", "a/b/c")] {
            let found = super::credentials::for_repository(&documents, registry, repository);
            assert!(!format!("{found:?}").contains("password"));
        }
    }

    pub(crate) fn challenge(header: &str) {
        let _ = super::challenge::parse(std::iter::once(header));
    }
}

#[cfg(test)]
mod tests;
