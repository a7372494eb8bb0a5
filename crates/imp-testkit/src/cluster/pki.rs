//! Keys and certificates of a cluster, and the kubeconfigs that use them.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use camino::{Utf8Path, Utf8PathBuf};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use serde_json::json;

use super::layout::{HUB_IP, KUBERNETES_SERVICE_IP, Layout, node_ip, node_name};

/// The directory with everything; made anew for each cluster, readable by its owner alone.
#[derive(Debug)]
pub struct Pki {
    dir: Utf8PathBuf,
    server: SocketAddr,
}

/// A certificate authority, held in memory while certificates are made.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    /// Makes every key, certificate and kubeconfig of a cluster with `nodes` nodes.
    ///
    /// # Errors
    /// When a file can't be written.
    pub fn create(layout: &Layout, nodes: u8) -> Result<Self> {
        let pki = Self { dir: layout.pki(), server: layout.api_server() };
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&pki.dir)
            .with_context(|| format!("make {}", pki.dir))?;
        let ca = pki.authority("ca", "imp-dev-ca")?;
        let front = pki.authority("front-proxy-ca", "imp-dev-front-proxy-ca")?;
        let accounts = KeyPair::generate()?;
        pki.write("sa.key", &accounts.serialize_pem())?;
        pki.write("sa.pub", &accounts.public_key_pem())?;
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let names = [
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ];
        pki.issue(
            &ca,
            "apiserver",
            "kube-apiserver",
            None,
            &names,
            &[local, HUB_IP.into(), KUBERNETES_SERVICE_IP.into()],
        )?;
        pki.issue(&ca, "admin", "admin", Some("system:masters"), &[], &[])?;
        pki.issue(&ca, "kubelet-client", "kube-apiserver-kubelet-client", Some("system:masters"), &[], &[])?;
        pki.issue(&ca, "kcm", "system:kube-controller-manager", None, &["localhost"], &[local])?;
        pki.issue(&ca, "scheduler", "system:kube-scheduler", None, &["localhost"], &[local])?;
        pki.issue(&ca, "kube-proxy", "system:kube-proxy", None, &[], &[])?;
        pki.issue(&front, "front-proxy-client", "front-proxy-client", None, &[], &[])?;
        for user in ["admin", "kcm", "scheduler", "kube-proxy"] {
            pki.write_kubeconfig(user)?;
        }
        for index in 1..=nodes {
            let name = node_name(index);
            let user = format!("system:node:{name}");
            pki.issue(&ca, &format!("node-{name}"), &user, Some("system:nodes"), &[], &[])?;
            pki.issue(
                &ca,
                &format!("serving-{name}"),
                &user,
                Some("system:nodes"),
                &[&name],
                &[local, node_ip(index).into()],
            )?;
            pki.write_kubeconfig(&format!("node-{name}"))?;
        }
        Ok(pki)
    }

    /// A file of the directory.
    #[must_use]
    pub fn path(&self, file: &str) -> String {
        self.dir.join(file).into_string()
    }

    /// A kubeconfig for a person: it stands alone, reaches the API server at `server`, and its context is called `context`.
    ///
    /// # Errors
    /// When a certificate can't be read.
    pub fn person_kubeconfig(&self, server: SocketAddr, context: &str) -> Result<String> {
        let data = |file: &str| -> Result<String> {
            let path = self.dir.join(file);
            Ok(STANDARD.encode(std::fs::read(&path).with_context(|| format!("read {path}"))?))
        };
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": context,
            "clusters": [{"name": context, "cluster": {"server": format!("https://{server}"), "certificate-authority-data": data("ca.crt")?}}],
            "users": [{"name": context, "user": {"client-certificate-data": data("admin.crt")?, "client-key-data": data("admin.key")?}}],
            "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        });
        Ok(serde_json::to_string_pretty(&config)?)
    }

    fn write_kubeconfig(&self, user: &str) -> Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
            "clusters": [{"name": "cluster", "cluster": {"server": format!("https://{}", self.server), "certificate-authority": self.path("ca.crt")}}],
            "users": [{"name": user, "user": {"client-certificate": self.path(&format!("{user}.crt")), "client-key": self.path(&format!("{user}.key"))}}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user}}],
        });
        self.write(&format!("{user}.kubeconfig"), &config.to_string())
    }

    fn authority(&self, file: &str, name: &str) -> Result<Authority> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let pem = params.self_signed(&key)?.pem();
        self.write(&format!("{file}.crt"), &pem)?;
        self.write(&format!("{file}.key"), &key.serialize_pem())?;
        Ok(Authority { pem, issuer: Issuer::new(params, key) })
    }

    /// Writes `file.crt` (with its CA behind it) and `file.key`, for client and server use.
    fn issue(
        &self,
        ca: &Authority,
        file: &str,
        user: &str,
        group: Option<&str>,
        names: &[&str],
        ips: &[IpAddr],
    ) -> Result<()> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>())?;
        params.subject_alt_names.extend(ips.iter().map(|ip| SanType::IpAddress(*ip)));
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &ca.issuer)?;
        self.write(&format!("{file}.crt"), &format!("{}{}", certificate.pem(), ca.pem))?;
        self.write(&format!("{file}.key"), &key.serialize_pem())
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        write_private(&self.dir.join(file), text)
    }
}

/// Writes a file that only its owner may read.
///
/// # Errors
/// When it can't be written.
pub fn write_private(path: &Utf8Path, text: &str) -> Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("open {path}"))?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {path}"))
}
