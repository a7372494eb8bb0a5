//! How each registry is reached: mirrors, plain HTTP, authorities, proxies.

use super::{CONNECT_TIMEOUT, READ_TIMEOUT, chain, redirect};
use crate::error::ImageError;
use camino::{Utf8Path, Utf8PathBuf};
use reqwest::Client;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::net::IpAddr;

/// Stands for every registry that has no entry of its own.
const ANY: &str = "*";

/// How registries are reached.
#[derive(Clone, Debug, Default)]
pub struct RegistryOptions {
    /// `HOST` or `HOST:PORT` of registries that speak plain HTTP. Loopback addresses and `localhost` always may, as for Docker.
    pub plain_http_hosts: Vec<String>,
    /// PEM certificates to trust beside the system's, for every registry.
    pub extra_ca_pem: Vec<Vec<u8>>,
    /// What is particular to single registries; the first entry of a host counts.
    pub hosts: Vec<RegistryHost>,
}

/// One registry, or a mirror of one, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RegistryHost {
    /// `HOST` or `HOST:PORT` as in references (`docker.io`, `registry.lan:5000`); `*`: every registry without an entry.
    pub host: String,
    /// Asked in this order before the registry: `HOST[:PORT][/PREFIX]`, the prefix in front of the repository's name. A mirror gets the
    /// pull secrets of its own host, never those of the registry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mirrors: Vec<String>,
    /// Never ask the registry itself, only its mirrors.
    #[serde(default)]
    pub mirrors_only: bool,
    /// Speak plain HTTP.
    #[serde(default)]
    pub plain_http: bool,
    /// PEM certificates to trust for this host, beside the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// The same in a file; [`RegistryHost::read`] reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<Utf8PathBuf>,
}

impl RegistryHost {
    /// Where programs look for the file, see [`RegistryHost::read`].
    pub const DEFAULT_FILE: &str = "/etc/imp/registries.yaml";

    /// Reads a file of them if it is there; see [`RegistryHost::read`].
    ///
    /// # Errors
    /// When it is there and cannot be used.
    pub fn read_if_there(path: &Utf8Path) -> Result<Vec<Self>, ImageError> {
        if path.exists() { Self::read(path) } else { Ok(Vec::new()) }
    }

    /// Reads a file of them: a list in YAML. The files of certificates that it names are read too, into `ca`.
    ///
    /// # Errors
    /// When a file cannot be read or is none.
    pub fn read(path: &Utf8Path) -> Result<Vec<Self>, ImageError> {
        let failed = |problem: String| ImageError::Configuration(format!("{path}: {problem}"));
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        let mut hosts: Vec<Self> =
            serde_saphyr::from_str(&text).map_err(|error| failed(error.to_string()))?;
        for host in &mut hosts {
            if let Some(file) = &host.ca_file {
                let pem = std::fs::read_to_string(file)
                    .map_err(|error| failed(format!("caFile {file} of {}: {error}", host.host)))?;
                host.ca = Some(host.ca.take().unwrap_or_default() + &pem);
            }
        }
        Ok(hosts)
    }
}

/// Clients and rules of the configured hosts.
#[derive(Debug)]
pub(super) struct Hosts {
    configured: Vec<(RegistryHost, Option<Clients>)>,
    plain_http: HashSet<String>,
    others: Clients,
}

#[derive(Clone, Debug)]
struct Clients {
    /// By the proxies of HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY.
    outside: Client,
    /// Loopback is never behind a proxy.
    loopback: Client,
}

impl Clients {
    fn new(pems: &[Vec<u8>]) -> Result<Self, ImageError> {
        Ok(Self { outside: client(pems, true)?, loopback: client(pems, false)? })
    }

    fn of(&self, host: &str) -> &Client {
        if is_loopback(host) { &self.loopback } else { &self.outside }
    }
}

fn client(pems: &[Vec<u8>], proxies: bool) -> Result<Client, ImageError> {
    let mut certificates = Vec::new();
    for pem in pems {
        let bundle = reqwest::Certificate::from_pem_bundle(pem).map_err(|error| {
            ImageError::Configuration(format!(
                "a configured CA certificate cannot be read: {}",
                chain(&error)
            ))
        })?;
        certificates.extend(bundle);
    }
    let mut builder = Client::builder()
        .user_agent(concat!("imp/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .redirect(reqwest::redirect::Policy::custom(redirect))
        .tls_certs_merge(certificates);
    if !proxies {
        builder = builder.no_proxy();
    }
    builder
        .build()
        .map_err(|error| ImageError::Configuration(format!("cannot set up HTTPS: {}", chain(&error))))
}

impl Hosts {
    /// # Errors
    /// When an entry names no host, or a certificate cannot be read.
    pub(super) fn new(options: &RegistryOptions) -> Result<Self, ImageError> {
        let mut plain_http: HashSet<String> = options.plain_http_hosts.iter().cloned().collect();
        let mut configured = Vec::new();
        for host in &options.hosts {
            check(host)?;
            if host.plain_http {
                plain_http.insert(host.host.clone());
            }
            let clients = match &host.ca {
                Some(pem) => Some(Clients::new(
                    &[options.extra_ca_pem.clone(), vec![pem.clone().into_bytes()]].concat(),
                )?),
                None => None,
            };
            configured.push((host.clone(), clients));
        }
        Ok(Self { configured, plain_http, others: Clients::new(&options.extra_ca_pem)? })
    }

    fn entry(&self, host: &str) -> Option<&(RegistryHost, Option<Clients>)> {
        let named = |name: &str| self.configured.iter().find(|(entry, _)| entry.host == name);
        named(host).or_else(|| named(ANY))
    }

    /// The client for a host, `HOST` or `HOST:PORT`.
    pub(super) fn client(&self, host: &str) -> &Client {
        let clients = self.configured.iter().find(|(entry, _)| entry.host == host);
        clients.and_then(|(_, clients)| clients.as_ref()).unwrap_or(&self.others).of(host)
    }

    /// Where a registry's images are asked for, in order: mirrors as (host, prefix), then, as `None`, the registry itself.
    pub(super) fn endpoints(&self, registry: &str) -> Vec<Option<(String, String)>> {
        let Some((entry, _)) = self.entry(registry) else { return vec![None] };
        let split = |mirror: &String| {
            let (host, prefix) = mirror.split_once('/').unwrap_or((mirror, ""));
            Some((host.to_owned(), prefix.trim_matches('/').to_owned()))
        };
        let mut endpoints: Vec<_> = entry.mirrors.iter().map(split).collect();
        if !entry.mirrors_only {
            endpoints.push(None);
        }
        endpoints
    }

    /// Whether a host is spoken to over plain HTTP.
    pub(super) fn plain_http(&self, host: &str) -> bool {
        is_loopback(host) || self.plain_http.contains(host) || self.plain_http.contains(name_of(host))
    }
}

fn check(host: &RegistryHost) -> Result<(), ImageError> {
    let bad = |text: &str| text.is_empty() || text.contains("://") || text.contains(char::is_whitespace);
    if bad(&host.host) || host.host.contains('/') {
        return Err(ImageError::Configuration(format!(
            "the registry {:?} of the configuration is no host: write HOST or HOST:PORT, with no scheme",
            host.host
        )));
    }
    if let Some(mirror) = host.mirrors.iter().find(|mirror| bad(mirror)) {
        return Err(ImageError::Configuration(format!(
            "the mirror {mirror:?} of registry {} is none: write HOST[:PORT][/PREFIX], with no scheme",
            host.host
        )));
    }
    if host.mirrors_only && host.mirrors.is_empty() {
        return Err(ImageError::Configuration(format!(
            "registry {} has mirrorsOnly but no mirrors: nothing is asked",
            host.host
        )));
    }
    Ok(())
}

fn name_of(host: &str) -> &str {
    host.rsplit_once(':').map_or(host, |(name, _)| name).trim_matches(['[', ']'])
}

fn is_loopback(host: &str) -> bool {
    let name = name_of(host);
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn host(host: &str, mirrors: &[&str]) -> RegistryHost {
        RegistryHost {
            host: host.to_owned(),
            mirrors: mirrors.iter().map(ToString::to_string).collect(),
            mirrors_only: false,
            plain_http: false,
            ca: None,
            ca_file: None,
        }
    }

    fn hosts(hosts: Vec<RegistryHost>) -> Result<Hosts, ImageError> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        Hosts::new(&RegistryOptions { hosts, ..Default::default() })
    }

    #[test]
    fn mirrors_come_before_the_registry_in_their_order() {
        let mut only = host("ghcr.io", &["c"]);
        only.mirrors_only = true;
        let all = hosts(vec![host("docker.io", &["a:5000/hub/", "b"]), only, host("*", &["any"])]).unwrap();
        let mirror = |host: &str, prefix: &str| Some((host.to_owned(), prefix.to_owned()));
        assert_eq!(all.endpoints("docker.io"), [mirror("a:5000", "hub"), mirror("b", ""), None]);
        assert_eq!(all.endpoints("ghcr.io"), [mirror("c", "")]);
        assert_eq!(all.endpoints("quay.io"), [mirror("any", ""), None]);
        assert_eq!(hosts(vec![]).unwrap().endpoints("quay.io"), [None]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_host() {
        let mut only = host("ghcr.io", &[]);
        only.mirrors_only = true;
        let mut no_ca = host("docker.io", &[]);
        no_ca.ca = Some("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n".into());
        for (wrong, says) in [
            (host("https://docker.io", &[]), "https://docker.io"),
            (host("docker.io/library", &[]), "docker.io/library"),
            (host("docker.io", &["https://mirror"]), "https://mirror"),
            (only, "mirrorsOnly"),
            (no_ca, "CA certificate"),
        ] {
            let error = hosts(vec![wrong]).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn the_file_is_yaml_and_its_faults_are_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = Utf8Path::from_path(file.path()).unwrap();
        let read = |text: &str| {
            std::fs::write(path, text).unwrap();
            RegistryHost::read(path)
        };
        let hosts =
            read("- host: docker.io\n  mirrors: [a, b/c]\n- {host: x:5000, plainHttp: true}\n").unwrap();
        assert_eq!(hosts[0].mirrors, ["a", "b/c"]);
        assert!(hosts[1].plain_http && !hosts[1].mirrors_only);
        for (text, says) in [
            ("- host: a\n  mirror: [b]\n", "mirror"),
            ("- mirrors: []\n", "host"),
            ("- host: a\n  caFile: /nonexistent/ca.pem\n", "/nonexistent/ca.pem"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(path.as_str()), "{error}");
        }
    }
}
