use super::*;
use imp_testkit::images;
use imp_testkit::registry::Registry;

/// A repository of a registry on this machine by HTTPS, which loopback addresses are otherwise not asked by.
fn by_https(registry: &Registry, options: &RegistryOptions) -> Repository {
    let reference: Reference = registry.reference("busybox:v1").parse().expect("a reference");
    let mut repository = RegistryClient::new(options).expect("a client").repository(&reference, None, &[]);
    repository.base = repository.base.replace("http://", "https://");
    repository
}

#[tokio::test]
async fn https_trusts_the_configured_authority_and_no_stranger() {
    let registry = Registry::start_with_tls().expect("a registry");
    registry.push(&images::busybox().expect("an image"), "busybox:v1").expect("pushed");
    let limits = Limits::default();
    let trusting =
        RegistryOptions { extra_ca_pem: vec![registry.ca_pem().to_vec()], ..RegistryOptions::default() };
    let (bytes, digest) = by_https(&registry, &trusting).manifest("v1", &limits).await.expect("a manifest");
    assert_eq!(Digest::of(&bytes), digest);
    // An authority may also be one registry's own.
    let ca = Some(String::from_utf8(registry.ca_pem().to_vec()).expect("PEM"));
    let own = |host: &str| {
        let host = RegistryHost {
            host: host.to_owned(),
            mirrors: Vec::new(),
            mirrors_only: false,
            plain_http: false,
            ca: ca.clone(),
            ca_file: None,
        };
        RegistryOptions { hosts: vec![host], ..RegistryOptions::default() }
    };
    by_https(&registry, &own(registry.address())).manifest("v1", &limits).await.expect("a manifest");
    by_https(&registry, &own("other.example.com")).manifest("v1", &limits).await.expect_err("another's");
    match by_https(&registry, &RegistryOptions::default()).manifest("v1", &limits).await {
        Err(FetchError::Passing(Passing { problem, .. })) => {
            assert!(problem.to_lowercase().contains("certificate"), "{problem}");
        }
        other => panic!("a stranger was trusted: {other:?}"),
    }
}

#[test]
fn plain_http_is_for_loopback_and_configured_hosts_only() {
    let options = RegistryOptions {
        plain_http_hosts: vec!["registry.lan:5000".into(), "10.0.0.1".into()],
        ..Default::default()
    };
    let client = RegistryClient::new(&options).expect("a client");
    for (host, plain) in [
        ("localhost", true),
        ("localhost:5000", true),
        ("127.0.0.1:5000", true),
        ("127.1.2.3", true),
        ("registry.lan:5000", true),
        ("registry.lan", false),
        ("registry.lan:5001", false),
        ("10.0.0.1:80", true),
        ("10.0.0.2", false),
        ("localhost.example.com", false),
        ("registry-1.docker.io", false),
    ] {
        assert_eq!(client.hosts.plain_http(host), plain, "{host}");
    }
}

#[tokio::test]
async fn credentials_never_go_to_a_token_server_without_https() {
    let client = RegistryClient::new(&RegistryOptions::default()).expect("a client");
    let document = br#"{"auths":{"registry.example.com":{"username":"u","password":"hush"}}}"#.to_vec();
    let reference: Reference = "registry.example.com/app:v1".parse().expect("a reference");
    let repository = client.repository(&reference, None, &[document]);
    for realm in ["http://auth.example.com/token", "http://127.0.0.1:1/token", "ftp://x", "no url"] {
        match repository.token(realm, None, None, &repository.credentials[0]).await {
            Err(FetchError::Image(error @ ImageError::Unauthorized { .. })) => {
                assert!(!error.to_string().contains("hush"), "{error}");
            }
            other => panic!("{realm}: {:?}", other.map(|_| "a token")),
        }
    }
}
