//! Pull secrets: documents of type kubernetes.io/dockerconfigjson, matched to an image as the kubelet does.
//!
//! The rules are those of kubernetes/pkg/credentialprovider (keyring.go): a key is a host, perhaps with a scheme, port, path and `/v1/` or
//! `/v2/` at its end; `*` stands for one part of a host name or a piece of it; the longest path wins.

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;

/// Who we say we are. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Credentials {
    Anonymous,
    Basic {
        user: String,
        password: String,
    },
    /// An OAuth2 refresh token ("identitytoken"), as cloud registries hand them out.
    Identity {
        token: String,
    },
    /// A token to be sent as it is ("registrytoken").
    Bearer {
        token: String,
    },
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Basic { .. } => "Basic(redacted)",
            Self::Identity { .. } => "Identity(redacted)",
            Self::Bearer { .. } => "Bearer(redacted)",
        })
    }
}

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase", default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

impl Entry {
    fn credentials(self) -> Option<Credentials> {
        let text = |value: Option<String>| value.filter(|v| !v.is_empty());
        if let Some(token) = text(self.registrytoken) {
            return Some(Credentials::Bearer { token });
        }
        if let Some(token) = text(self.identitytoken) {
            return Some(Credentials::Identity { token });
        }
        if let Some(auth) = text(self.auth) {
            let decoded = lenient_base64().decode(auth.trim()).ok()?;
            let decoded = String::from_utf8(decoded).ok()?;
            let (user, password) = decoded.split_once(':')?;
            // Docker fills short passwords with NULs.
            let password = password.trim_end_matches('\0').to_owned();
            return Some(Credentials::Basic { user: user.to_owned(), password });
        }
        Some(Credentials::Basic { user: text(self.username)?, password: self.password.unwrap_or_default() })
    }
}

fn lenient_base64() -> GeneralPurpose {
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    GeneralPurpose::new(&base64::alphabet::STANDARD, config)
}

/// The credentials for a repository in the order to be tried: documents as they come, in each the most specific key first.
///
/// `registry` is the reference's host as it is written there ("docker.io" for Docker Hub). Documents that cannot be read are passed over with
/// a warning that shows nothing of them.
pub(crate) fn for_repository(documents: &[Vec<u8>], registry: &str, repository: &str) -> Vec<Credentials> {
    let mut found = Vec::new();
    for (index, document) in documents.iter().enumerate() {
        let Ok(document) = serde_json::from_slice::<Document>(document) else {
            tracing::warn!(index, "a pull secret is no valid dockerconfigjson document and is not used");
            continue;
        };
        let mut matching: Vec<(usize, String, Entry)> = document
            .auths
            .into_iter()
            .filter_map(|(key, entry)| Some((specificity(&key, registry, repository)?, key, entry)))
            .collect();
        matching.sort_by(|(a, _, _), (b, _, _)| b.cmp(a));
        for (_, key, entry) in matching {
            match entry.credentials() {
                Some(credentials) if !found.contains(&credentials) => found.push(credentials),
                Some(_) => {}
                None => tracing::warn!(index, key, "an entry of a pull secret holds no usable credentials"),
            }
        }
    }
    found
}

/// How well a key fits: the length of its path, plus one if its host has no glob; none if it does not fit.
fn specificity(key: &str, registry: &str, repository: &str) -> Option<usize> {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    // The API's version is no part of a repository ("https://index.docker.io/v1/").
    let path = path.trim_matches('/');
    let path = match path.split_once('/').unwrap_or((path, "")) {
        ("v1" | "v2", rest) => rest,
        _ => path,
    };
    if !host_matches(&canonical_host(host), &canonical_host(registry)) {
        return None;
    }
    let below = repository.strip_prefix(path)?;
    if !path.is_empty() && !below.is_empty() && !below.starts_with('/') {
        return None;
    }
    Some(2 * path.len() + usize::from(!host.contains('*')))
}

/// Docker Hub has many names.
fn canonical_host(host: &str) -> String {
    let host = host.to_ascii_lowercase();
    match host.as_str() {
        "index.docker.io" | "registry-1.docker.io" | "registry.hub.docker.com" => "docker.io".into(),
        _ => host,
    }
}

fn host_matches(pattern: &str, host: &str) -> bool {
    let (pattern, pattern_port) = split_port(pattern);
    let (host, port) = split_port(host);
    if pattern_port != port {
        return false;
    }
    let (patterns, parts): (Vec<&str>, Vec<&str>) = (pattern.split('.').collect(), host.split('.').collect());
    patterns.len() == parts.len() && patterns.iter().zip(&parts).all(|(pattern, part)| glob(pattern, part))
}

fn split_port(host: &str) -> (&str, Option<&str>) {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => (name, Some(port)),
        _ => (host, None),
    }
}

/// `*` matches any run of characters, as in Go's filepath.Match; the parts have no dots in them.
fn glob(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let pieces: Vec<&str> = pieces.collect();
    let Some((last, middle)) = pieces.split_last() else { return rest.is_empty() };
    for piece in middle {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(key: &str) -> Vec<u8> {
        let auth = base64::engine::general_purpose::STANDARD.encode("user:pass:word");
        serde_json::json!({"auths": {key: {"auth": auth}}}).to_string().into_bytes()
    }

    #[test]
    fn fr15_keys_match_as_docker_and_the_kubelet_do() {
        for (key, registry, repository, fits) in [
            ("https://index.docker.io/v1/", "docker.io", "library/busybox", true),
            ("index.docker.io", "docker.io", "team/app", true),
            ("docker.io", "docker.io", "team/app", true),
            ("https://registry-1.docker.io/v2/", "docker.io", "team/app", true),
            ("https://index.docker.io/v1/", "registry.example.com", "team/app", false),
            ("registry.example.com", "registry.example.com", "team/app", true),
            ("http://registry.example.com/v2/", "registry.example.com", "app", true),
            ("registry.example.com", "registry.example.com:5000", "team/app", false),
            ("registry.example.com:5000", "registry.example.com:5000", "team/app", true),
            ("registry.example.com/team", "registry.example.com", "team/app", true),
            ("registry.example.com/team/", "registry.example.com", "team", true),
            ("registry.example.com/te", "registry.example.com", "team/app", false),
            ("registry.example.com/other", "registry.example.com", "team/app", false),
            ("*.example.com", "registry.example.com", "app", true),
            ("reg*.example.com", "registry.example.com", "app", true),
            ("*.example.com", "a.b.example.com", "app", false),
            ("*.example.com", "example.com", "app", false),
            ("*.*.example.com", "a.b.example.com", "app", true),
            ("*", "localhost", "app", true),
            ("evil.com", "registry.example.com", "app", false),
        ] {
            let found = for_repository(&[secret(key)], registry, repository);
            assert_eq!(!found.is_empty(), fits, "{key} for {registry}/{repository}");
            if fits {
                let expected = Credentials::Basic { user: "user".into(), password: "pass:word".into() };
                assert_eq!(found, [expected]);
            }
        }
    }

    #[test]
    fn fr15_the_most_specific_key_is_tried_first() {
        let document = serde_json::json!({"auths": {
            "r.example.com": {"username": "host", "password": "p"},
            "*.example.com": {"username": "glob", "password": "p"},
            "r.example.com/a": {"username": "short", "password": "p"},
            "r.example.com/a/b": {"username": "long", "password": "p"},
        }});
        let users: Vec<String> =
            for_repository(&[document.to_string().into_bytes()], "r.example.com", "a/b/c")
                .into_iter()
                .map(|c| match c {
                    Credentials::Basic { user, .. } => user,
                    other => format!("{other:?}"),
                })
                .collect();
        assert_eq!(users, ["long", "short", "host", "glob"]);
    }

    #[test]
    fn all_forms_of_credentials_are_read_and_none_is_shown() {
        let document = serde_json::json!({"auths": {
            "a.example.com": {"identitytoken": "hush"},
            "b.example.com": {"registrytoken": "hush"},
            "c.example.com": {"username": "hush", "password": "hush"},
            "d.example.com": {"auth": "%%%"},
            "e.example.com": {},
        }});
        let documents = [b"no json".to_vec(), document.to_string().into_bytes()];
        for (host, shown) in [
            ("a.example.com", "[Identity(redacted)]"),
            ("b.example.com", "[Bearer(redacted)]"),
            ("c.example.com", "[Basic(redacted)]"),
            ("d.example.com", "[]"),
            ("e.example.com", "[]"),
        ] {
            assert_eq!(format!("{:?}", for_repository(&documents, host, "app")), shown);
        }
    }
}
