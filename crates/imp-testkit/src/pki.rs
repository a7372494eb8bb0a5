//! Certificates and kubeconfigs.

use std::net::IpAddr;
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

/// A certificate authority.
pub struct Authority {
    pem: String,
    key_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("pem", &self.pem).finish_non_exhaustive()
    }
}

/// A certificate and its key, in PEM.
#[derive(Clone)]
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// The private key (PKCS #8).
    pub key: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a self-signed authority.
    ///
    /// # Errors
    /// When `name` cannot stand in a certificate.
    pub fn new(name: &str) -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { pem, key_pem: key.serialize_pem(), issuer: Issuer::new(params, key) })
    }

    /// Its certificate in PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.pem
    }

    /// Makes a certificate for client and server use. Kubernetes takes `user` as the user name and `groups` as the
    /// groups; `names` are what the certificate is valid for as a server.
    ///
    /// # Errors
    /// When a name cannot stand in a certificate.
    pub fn issue(
        &self,
        user: &str,
        groups: &[&str],
        names: &[&str],
        addresses: &[IpAddr],
    ) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let mut params =
            CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
        params.subject_alt_names.extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
        params.distinguished_name.push(DnType::CommonName, user);
        // A distinguished name holds one value of a kind; several groups need several certificates.
        if let [group, more @ ..] = groups {
            anyhow::ensure!(more.is_empty(), "a certificate carries one group, not {groups:?}");
            params.distinguished_name.push(DnType::OrganizationName, *group);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Identity { certificate, key: key.serialize_pem() })
    }
}

/// Keys and certificates of a control plane, as files of one directory that only its owner can read.
#[derive(Debug)]
pub struct Pki {
    dir: Utf8PathBuf,
    ca: Authority,
}

impl Pki {
    /// Makes everything that a control plane needs: `ca`, `apiserver` (valid for `names` and `addresses` besides the
    /// usual ones), `admin`, `kubelet-client`, `kcm`, `scheduler`, `front-proxy-ca`, `front-proxy-client` as `.crt` and
    /// `.key`; `sa.key` and `sa.pub`; kubeconfigs of `admin`, `kcm` and `scheduler` that reach the API server at `server`.
    ///
    /// # Errors
    /// When a file can't be written or a name cannot stand in a certificate.
    pub fn create(dir: &Utf8Path, server: &str, names: &[&str], addresses: &[IpAddr]) -> Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .with_context(|| format!("make {dir}"))?;
        let pki = Self { dir: dir.to_owned(), ca: Authority::new("imp-test-ca")? };
        let front = Authority::new("imp-test-front-proxy-ca")?;
        for (file, authority) in [("ca", &pki.ca), ("front-proxy-ca", &front)] {
            pki.write_identity(
                file,
                &Identity { certificate: authority.pem.clone(), key: authority.key_pem.clone() },
            )?;
        }
        let accounts = KeyPair::generate()?;
        pki.write("sa.key", &accounts.serialize_pem())?;
        pki.write("sa.pub", &accounts.public_key_pem())?;

        let usual = [
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ];
        let local = [IpAddr::from([127, 0, 0, 1])];
        let issue = |file: &str, user: &str, groups: &[&str], names: &[&str], addresses: &[IpAddr]| {
            pki.write_identity(file, &pki.ca.issue(user, groups, names, addresses)?)
        };
        issue("apiserver", "kube-apiserver", &[], &[&usual, names].concat(), &[&local, addresses].concat())?;
        issue("admin", "admin", &["system:masters"], &[], &[])?;
        issue("kubelet-client", "kube-apiserver-kubelet-client", &["system:masters"], &[], &[])?;
        issue("kcm", "system:kube-controller-manager", &[], &["localhost"], &local)?;
        issue("scheduler", "system:kube-scheduler", &[], &["localhost"], &local)?;
        pki.write_identity("front-proxy-client", &front.issue("front-proxy-client", &[], &[], &[])?)?;
        for user in ["admin", "kcm", "scheduler"] {
            let identity = Identity {
                certificate: pki.read(&format!("{user}.crt"))?,
                key: pki.read(&format!("{user}.key"))?,
            };
            pki.write(&format!("{user}.kubeconfig"), &kubeconfig(server, &pki.ca.pem, user, &identity))?;
        }
        Ok(pki)
    }

    /// Path of a file.
    #[must_use]
    pub fn path(&self, file: &str) -> Utf8PathBuf {
        self.dir.join(file)
    }

    /// The authority that the API server believes.
    #[must_use]
    pub fn ca(&self) -> &Authority {
        &self.ca
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.path(file);
        std::fs::read_to_string(&path).with_context(|| format!("read {path}"))
    }

    fn write_identity(&self, file: &str, identity: &Identity) -> Result<()> {
        self.write(&format!("{file}.crt"), &identity.certificate)?;
        self.write(&format!("{file}.key"), &identity.key)
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        use std::io::Write as _;
        let path = self.path(file);
        std::fs::OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("write {path}"))
    }
}

/// A kubeconfig that stands alone (JSON, which is YAML): context `imp` as `user` at `server`.
#[must_use]
pub fn kubeconfig(server: &str, ca: &str, user: &str, identity: &Identity) -> String {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "imp",
        "clusters": [{"name": "imp", "cluster": {"server": server, "certificate-authority-data": STANDARD.encode(ca)}}],
        "users": [{"name": user, "user": {
            "client-certificate-data": STANDARD.encode(&identity.certificate),
            "client-key-data": STANDARD.encode(&identity.key),
        }}],
        "contexts": [{"name": "imp", "context": {"cluster": "imp", "user": user}}],
    })
    .to_string()
}
