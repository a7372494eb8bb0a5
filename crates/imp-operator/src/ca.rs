//! Imp's own CA: what it signs, and where it is kept.
//!
//! Secret `imp-ca` is made by whoever comes first; everybody else reads it. Certificate and key come in one write, so a
//! crash leaves both or neither.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use imp_api::names;

/// Life of the CA.
const CA_LIFE: Duration = Duration::from_hours(10 * 365 * 24);
/// Life of what the CA signs. Short, since nothing is ever revoked; renewed at two thirds.
pub const LEAF_LIFE: Duration = Duration::from_hours(24);
/// Certificates are valid this long before they are made, for nodes whose clocks are late.
const CLOCK_SKEW: Duration = Duration::from_hours(1);

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// Why there is no CA, or it signs nothing.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The Secret cannot be read.
    #[error("Secret {namespace}/imp-ca, which holds Imp's CA, cannot be {what}")]
    Api {
        /// Its namespace.
        namespace: String,
        /// What failed: read, created.
        what: &'static str,
        /// Why.
        source: Box<kube::Error>,
    },
    /// The Secret is no CA.
    #[error(
        "Secret {namespace}/imp-ca holds no usable CA ({problem}); delete it and restart Deployment {} to have a new one made",
        names::OPERATOR_NAME
    )]
    Unusable {
        /// Its namespace.
        namespace: String,
        /// What is wrong; never what is in it.
        problem: &'static str,
    },
    /// A key or certificate cannot be made.
    #[error("a certificate cannot be made")]
    Make(#[from] rcgen::Error),
    /// A request is none, or its signature is wrong.
    #[error(
        "the certificate request cannot be used; send a PKCS #10 request in PEM, signed with its own key"
    )]
    Request(#[source] rcgen::Error),
}

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A TLS server.
    Server,
    /// A TLS client.
    Client,
}

/// A certificate and its key, for rustls.
#[derive(Debug)]
pub struct Identity {
    /// The certificate alone: who checks it has the CA.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its key; rustls' Debug does not show it.
    pub key: PrivateKeyDer<'static>,
}

/// The CA with its key.
pub struct Authority {
    pem: String,
    der: CertificateDer<'static>,
    not_after: SystemTime,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

impl Authority {
    /// A new CA: certificate and key in PEM.
    fn generate() -> Result<(String, String), rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name("Imp CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        validity(&mut params, CA_LIFE);
        Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
    }

    /// The CA of a certificate and key in PEM.
    ///
    /// # Errors
    /// What is wrong with them.
    fn parse(certificate: &[u8], key: &[u8], now: SystemTime) -> Result<Self, &'static str> {
        let pem = std::str::from_utf8(certificate).map_err(|_| "tls.crt is no PEM certificate")?.to_owned();
        let der = CertificateDer::from_pem_slice(certificate).map_err(|_| "tls.crt is no PEM certificate")?;
        let key = std::str::from_utf8(key).ok().and_then(|key| KeyPair::from_pem(key).ok());
        let key = key.ok_or("tls.key is no PEM private key")?;
        let (not_after, public) = {
            let (_, parsed) =
                X509Certificate::from_der(&der).map_err(|_| "tls.crt is no X.509 certificate")?;
            if !parsed.is_ca() {
                return Err("tls.crt is no CA's certificate");
            }
            let not_after = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or_default();
            (SystemTime::UNIX_EPOCH + Duration::from_secs(not_after), parsed.public_key().raw.to_vec())
        };
        if public != key.subject_public_key_info() {
            return Err("tls.key does not belong to tls.crt");
        }
        if not_after <= now {
            return Err("tls.crt has expired");
        }
        let issuer = Issuer::from_ca_cert_der(&der, key)
            .map_err(|_| "tls.crt is no CA's certificate that can sign")?;
        Ok(Self { pem, der, not_after, issuer })
    }

    fn of_secret(secret: &Secret, namespace: &str) -> Result<Self, CaError> {
        let data = |key: &str| secret.data.as_ref().and_then(|data| data.get(key)).map(|bytes| &*bytes.0);
        let unusable = |problem| CaError::Unusable { namespace: namespace.to_owned(), problem };
        let certificate = data(CERTIFICATE).ok_or_else(|| unusable("tls.crt is missing"))?;
        let key = data(KEY).ok_or_else(|| unusable("tls.key is missing"))?;
        Self::parse(certificate, key, SystemTime::now()).map_err(unusable)
    }

    /// Its certificate in PEM; public.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Its certificate.
    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// A certificate with common name `name`, valid for `dns`, and a new key that only memory holds.
    ///
    /// # Errors
    /// When a name cannot stand in a certificate.
    pub fn issue(&self, name: &str, dns: &[String], purpose: Purpose) -> Result<Identity, CaError> {
        let key = KeyPair::generate()?;
        let certificate = leaf(name, dns, purpose)?.signed_by(&key, &self.issuer)?;
        Ok(Identity {
            chain: vec![certificate.der().clone()],
            key: PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
        })
    }

    /// Signs the public key of a request (PKCS #10 in PEM) for a server with common name `name`, valid for `dns`. What
    /// the request asks for otherwise counts for nothing, but it must be signed with its key.
    ///
    /// # Errors
    /// When the request cannot be used, or a name cannot stand in a certificate.
    pub fn sign(&self, request: &str, name: &str, dns: &[String]) -> Result<String, CaError> {
        // Checks the signature.
        let request = CertificateSigningRequestParams::from_pem(request).map_err(CaError::Request)?;
        Ok(leaf(name, dns, Purpose::Server)?.signed_by(&request.public_key, &self.issuer)?.pem())
    }
}

fn leaf(name: &str, dns: &[String], purpose: Purpose) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(dns)?;
    params.distinguished_name = common_name(name);
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match purpose {
        Purpose::Server => ExtendedKeyUsagePurpose::ServerAuth,
        Purpose::Client => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    validity(&mut params, LEAF_LIFE);
    Ok(params)
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn validity(params: &mut CertificateParams, life: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + life).into();
}

/// Secret `imp-ca` of one namespace.
#[derive(Clone)]
pub struct Store {
    api: Api<Secret>,
    namespace: String,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl Store {
    /// The Secret in `namespace`.
    #[must_use]
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), namespace: namespace.to_owned() }
    }

    /// The CA of the Secret. If there is none, it is made: of `known` if given (somebody deleted what is still in
    /// use), else anew. Of several that make it at once, all get the same.
    ///
    /// # Errors
    /// When the Secret cannot be read or made, or holds no usable CA.
    pub async fn load_or_create(&self, known: Option<&Authority>) -> Result<Authority, CaError> {
        if let Some(secret) = self.get().await? {
            return Authority::of_secret(&secret, &self.namespace);
        }
        let (certificate, key) = match known {
            Some(known) => (known.pem.clone(), known.issuer.key().serialize_pem()),
            None => Authority::generate()?,
        };
        match self.api.create(&PostParams::default(), &secret(certificate, key)).await {
            Ok(secret) => {
                tracing::info!(namespace = self.namespace, again = known.is_some(), "made Secret imp-ca");
                imp_killpoint::operator("ca-made");
                Authority::of_secret(&secret, &self.namespace)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let gone = || CaError::Unusable {
                    namespace: self.namespace.clone(),
                    problem: "it was deleted as soon as it was made",
                };
                Authority::of_secret(&self.get().await?.ok_or_else(gone)?, &self.namespace)
            }
            Err(error) => Err(self.failed("created", error)),
        }
    }

    async fn get(&self) -> Result<Option<Secret>, CaError> {
        self.api.get_opt(names::CA_NAME).await.map_err(|error| self.failed("read", error))
    }

    fn failed(&self, what: &'static str, source: kube::Error) -> CaError {
        CaError::Api { namespace: self.namespace.clone(), what, source: Box::new(source) }
    }
}

fn secret(certificate: String, key: String) -> Secret {
    Secret {
        metadata: ObjectMeta {
            name: Some(names::CA_NAME.to_owned()),
            labels: Some(BTreeMap::from([("app.kubernetes.io/part-of".to_owned(), "imp".to_owned())])),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(BTreeMap::from([
            (CERTIFICATE.to_owned(), ByteString(certificate.into_bytes())),
            (KEY.to_owned(), ByteString(key.into_bytes())),
        ])),
        ..Secret::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authority() -> Authority {
        let (certificate, key) = Authority::generate().unwrap();
        Authority::parse(certificate.as_bytes(), key.as_bytes(), SystemTime::now()).unwrap()
    }

    fn request(key: &KeyPair) -> String {
        let mut params = CertificateParams::new(vec!["imp-controller-manager".to_owned()]).unwrap();
        params.distinguished_name = common_name("imp-controller-manager");
        params.serialize_request(key).unwrap().pem().unwrap()
    }

    #[test]
    fn what_a_request_asks_for_counts_for_nothing() {
        let key = KeyPair::generate().unwrap();
        let signed = authority().sign(&request(&key), "node:n1", &["n1".to_owned()]).unwrap();
        let der = CertificateDer::from_pem_slice(signed.as_bytes()).unwrap();
        let (_, parsed) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(parsed.subject().to_string(), "CN=node:n1");
        let names = parsed.subject_alternative_name().unwrap().unwrap();
        assert_eq!(names.value.general_names, [x509_parser::extensions::GeneralName::DNSName("n1")]);
        assert_eq!(parsed.public_key().raw, key.subject_public_key_info());
        let usage = parsed.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.server_auth && !usage.client_auth && !usage.any && !parsed.is_ca());
    }

    #[test]
    fn a_request_must_be_signed_with_its_own_key() {
        let key = KeyPair::generate().unwrap();
        let pem = request(&key);
        let der = rustls::pki_types::CertificateSigningRequestDer::from_pem_slice(pem.as_bytes()).unwrap();
        let other = KeyPair::generate().unwrap().subject_public_key_info();
        let (mut forged, own) = (der.to_vec(), key.subject_public_key_info());
        let at = forged.windows(own.len()).position(|window| window == own).unwrap();
        forged[at..at + own.len()].copy_from_slice(&other);
        let forged = forged.into();
        assert!(matches!(
            CertificateSigningRequestParams::from_der(&forged),
            Err(rcgen::Error::InvalidCertificationRequestSignature)
        ));
        let error = authority().sign("nonsense", "node:n1", &["n1".to_owned()]).unwrap_err();
        assert!(matches!(error, CaError::Request(_)), "{error}");
    }

    #[test]
    fn what_is_no_ca_is_refused_with_its_reason() {
        let (certificate, key) = Authority::generate().unwrap();
        let (_, other) = Authority::generate().unwrap();
        let now = SystemTime::now();
        let problem = |certificate: &str, key: &str, now| {
            Authority::parse(certificate.as_bytes(), key.as_bytes(), now).unwrap_err()
        };
        assert_eq!(problem(&certificate, &other, now), "tls.key does not belong to tls.crt");
        assert_eq!(problem("", &key, now), "tls.crt is no PEM certificate");
        assert_eq!(problem(&certificate, "", now), "tls.key is no PEM private key");
        assert_eq!(problem(&certificate, &key, now + CA_LIFE + CA_LIFE), "tls.crt has expired");
        let leaf_key = KeyPair::generate().unwrap();
        let leaf = authority().sign(&request(&leaf_key), "node:n1", &[]).unwrap();
        assert_eq!(problem(&leaf, &leaf_key.serialize_pem(), now), "tls.crt is no CA's certificate");
    }

    #[test]
    fn debug_output_has_no_key() {
        let authority = authority();
        let text = format!("{authority:?} {:?}", authority.issue("a", &[], Purpose::Client).unwrap());
        assert!(!text.contains("PRIVATE") && text.len() < 4000, "{text}");
    }
}
