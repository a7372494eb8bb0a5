//! Mirrors and proxies: how a registry is reached.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;

use common::{Dir, chain, ensure, request};
use imp_image::{EnsureRequest, ImageError, ImageStore, RegistryHost, RegistryOptions, StoreOptions};
use imp_testkit::images;
use imp_testkit::registry::Registry;
use serde_json::json;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

/// A host that does not exist (RFC 6761).
const NOWHERE: &str = "registry.invalid";
/// Set in the process that is behind a proxy: where its store is.
const BEHIND_PROXY: &str = "IMP_IMAGE_TEST_PROXY";

fn store(dir: &Dir, hosts: serde_json::Value) -> ImageStore {
    let hosts: Vec<RegistryHost> = serde_json::from_value(hosts).unwrap();
    let registry = RegistryOptions { hosts, ..Default::default() };
    ImageStore::open_with(dir.path(), StoreOptions { registry, ..Default::default() }).unwrap()
}

/// An address at which nobody listens.
fn nobody() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[tokio::test]
async fn a_mirror_is_asked_before_the_registry() {
    let mirror = Registry::start().unwrap();
    mirror.push(&images::busybox().unwrap(), "hub/team/app:v1").unwrap();
    let reference = format!("{NOWHERE}/team/app:v1");
    let dir = Dir::new();
    let mirrored = store(&dir, json!([{"host": NOWHERE, "mirrors": [format!("{}/hub", mirror.address())]}]));
    let disk = ensure(&mirrored, &request(&reference)).await.unwrap_or_else(|e| panic!("{}", chain(&e)));
    common::fsck(&disk.path);
    // It is known by the registry's name.
    assert_eq!(mirrored.list().await.unwrap()[0].references, std::slice::from_ref(&reference));
    // Without the mirror there is nothing.
    let dir = Dir::new();
    let error = ensure(&store(&dir, json!([])), &request(&reference)).await.expect_err("no such host");
    assert!(error.retryable(), "{error}");
}

#[tokio::test]
async fn the_registry_is_asked_when_its_mirrors_fail() {
    let registry = Registry::start().unwrap();
    let reference = registry.push(&images::busybox().unwrap(), "app:v1").unwrap();
    let empty = Registry::start().unwrap();
    let (host, gone) = (registry.address(), nobody());
    let mirrors = json!([gone, empty.address()]);
    let dir = Dir::new();
    let falling_back = store(&dir, json!([{"host": host, "mirrors": mirrors}]));
    ensure(&falling_back, &request(&reference)).await.unwrap_or_else(|e| panic!("{}", chain(&e)));
    // An image that nobody has: the registry's word, and what the mirrors said.
    let error = ensure(&falling_back, &request(&reference.replace(":v1", ":v2"))).await.expect_err("no v2");
    assert!(matches!(error, ImageError::NotFound { .. }), "{error}");
    for said in ["before that", gone.as_str(), empty.address()] {
        assert!(error.to_string().contains(said), "{error}");
    }
    let dir = Dir::new();
    let only = store(&dir, json!([{"host": host, "mirrors": [empty.address()], "mirrorsOnly": true}]));
    let error = ensure(&only, &request(&reference)).await.expect_err("the registry itself is not asked");
    assert!(matches!(error, ImageError::NotFound { .. }), "{error}");
}

#[tokio::test]
async fn a_mirror_gets_its_own_secrets_only() {
    let mirror = Registry::start_with_login("imp", "mirror's").unwrap();
    mirror.push(&images::busybox().unwrap(), "app:v1").unwrap();
    let secret = |host: &str, password: &str| {
        json!({"auths": {host: {"username": "imp", "password": password}}}).to_string().into_bytes()
    };
    let hosts = json!([{"host": NOWHERE, "mirrors": [mirror.address()], "mirrorsOnly": true}]);
    for (secrets, let_in) in [
        (vec![secret(NOWHERE, "mirror's")], false),
        (vec![secret(NOWHERE, "x"), secret(mirror.address(), "mirror's")], true),
    ] {
        let dir = Dir::new();
        let wanted = EnsureRequest { docker_config_json: secrets, ..request(&format!("{NOWHERE}/app:v1")) };
        let result = ensure(&store(&dir, hosts.clone()), &wanted).await;
        assert_eq!(result.is_ok(), let_in, "{result:?}");
    }
}

/// A proxy that passes every request on to one address, and counts them by their target.
struct Proxy {
    address: String,
    targets: std::sync::Arc<std::sync::Mutex<Vec<String>>>,
}

impl Proxy {
    /// For plain HTTP requests in absolute form (RFC 9112 3.2.2), which Go's servers take as they are.
    fn start(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let targets = std::sync::Arc::<std::sync::Mutex<Vec<String>>>::default();
        let (seen, to) = (targets.clone(), to.to_owned());
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (seen, to) = (seen.clone(), to.clone());
                std::thread::spawn(move || relay(near.unwrap(), &to, &seen));
            }
        });
        Self { address, targets }
    }
}

fn relay(near: TcpStream, to: &str, seen: &std::sync::Mutex<Vec<String>>) {
    let mut far = TcpStream::connect(to).unwrap();
    let (mut back, mut answers) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
    for line in BufReader::new(near).split(b'\n') {
        let Ok(line) = line else { return };
        if line.starts_with(b"GET ") {
            seen.lock().unwrap().push(String::from_utf8_lossy(&line).into_owned());
        }
        if far.write_all(&[line.as_slice(), b"\n"].concat()).is_err() {
            return;
        }
    }
}

/// Not a test by itself: the other one runs it in a process with a proxy in its environment.
#[tokio::test]
async fn behind_proxy() {
    let Ok(place) = std::env::var(BEHIND_PROXY) else { return };
    let (root, references) = place.split_once('|').unwrap();
    let registry = RegistryOptions { plain_http_hosts: vec![NOWHERE.into()], ..Default::default() };
    let options = StoreOptions { registry, ..Default::default() };
    let store = ImageStore::open_with(root.into(), options).unwrap();
    for reference in references.split('|') {
        ensure(&store, &request(reference)).await.unwrap_or_else(|e| panic!("{reference}: {}", chain(&e)));
    }
}

#[tokio::test]
async fn proxies_of_the_environment_are_used_but_not_for_loopback() {
    let registry = Registry::start().unwrap();
    let local = registry.push(&images::busybox().unwrap(), "app:v1").unwrap();
    let proxy = Proxy::start(registry.address());
    let proxied = format!("{NOWHERE}/app:v1");
    for (no_proxy, works) in [("", true), (NOWHERE, false)] {
        let dir = Dir::new();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "behind_proxy"])
            .env(BEHIND_PROXY, format!("{}|{local}|{proxied}", dir.path()))
            .env("http_proxy", format!("http://{}", proxy.address))
            .env("no_proxy", no_proxy)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.success(), works, "no_proxy={no_proxy}");
    }
    let targets = proxy.targets.lock().unwrap().clone();
    assert!(!targets.is_empty() && targets.iter().all(|line| line.contains(NOWHERE)), "{targets:?}");
}
