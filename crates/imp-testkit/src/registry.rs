//! A real registry: Debian's docker-registry on a free port of the loopback device, with or without a password.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use camino::Utf8Path;

use crate::images::Layout;
use crate::pki::Authority;

/// How long the registry may take to listen.
const START: Duration = Duration::from_secs(30);

/// A running registry. It ends when this is dropped, and when the thread that started it does.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    address: String,
    login: Option<(String, String)>,
    ca_pem: String,
    /// Configuration, passwords and everything pushed.
    directory: tempfile::TempDir,
}

impl Registry {
    /// Starts a registry that anyone may use.
    ///
    /// # Errors
    /// When docker-registry is not installed or does not start.
    pub fn start() -> Result<Self> {
        Self::start_with(None, None)
    }

    /// Starts a registry that anyone may use by HTTPS alone, with a certificate of an authority of its own for 127.0.0.1.
    ///
    /// # Errors
    /// When docker-registry is not installed or does not start.
    pub fn start_with_tls() -> Result<Self> {
        Self::start_with(None, Some(Authority::new("imp-registry-ca")?))
    }

    /// Starts a registry that asks for a user and password (HTTP Basic) for everything.
    ///
    /// # Errors
    /// When docker-registry or htpasswd is not installed, or the registry does not start.
    pub fn start_with_login(user: &str, password: &str) -> Result<Self> {
        Self::start_with(Some((user.to_owned(), password.to_owned())), None)
    }

    fn start_with(login: Option<(String, String)>, authority: Option<Authority>) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("imp-registry-").tempdir().context("make a directory")?;
        let root =
            Utf8Path::from_path(directory.path()).context("the temporary directory's path is not UTF-8")?;
        let mut config = format!(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {root}/data\n\
             http:\n  addr: 127.0.0.1:0\n"
        );
        if let Some(authority) = &authority {
            let identity = authority.issue("registry", &[], &[], &[Ipv4Addr::LOCALHOST.into()])?;
            for (name, pem) in [("tls.crt", &identity.certificate), ("tls.key", &identity.key)] {
                std::fs::write(root.join(name), pem).with_context(|| format!("write {root}/{name}"))?;
            }
            config.push_str(&format!("  tls:\n    certificate: {root}/tls.crt\n    key: {root}/tls.key\n"));
        }
        if let Some((user, password)) = &login {
            let passwords = root.join("htpasswd");
            std::fs::write(&passwords, htpasswd(user, password)?)
                .with_context(|| format!("write {passwords}"))?;
            config.push_str(&format!("auth:\n  htpasswd:\n    realm: test\n    path: {passwords}\n"));
        }
        let config_path = root.join("config.yml");
        std::fs::write(&config_path, config).with_context(|| format!("write {config_path}"))?;
        // setpriv, so that nothing is left when the test is killed.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "docker-registry", "serve", config_path.as_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context(
                "start docker-registry through setpriv (Debian packages docker-registry and util-linux)",
            )?;
        let stderr = child.stderr.take().context("docker-registry has no standard error")?;
        let ca_pem = authority.map(|authority| authority.certificate().to_owned()).unwrap_or_default();
        let mut registry = Self { child, address: String::new(), login, ca_pem, directory };
        registry.address = wait_for_address(stderr)?;
        Ok(registry)
    }

    /// `127.0.0.1:PORT`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// `127.0.0.1:PORT/NAME:TAG`.
    #[must_use]
    pub fn reference(&self, name_and_tag: &str) -> String {
        format!("{}/{name_and_tag}", self.address)
    }

    /// The authority of its certificate; empty unless it was started with TLS.
    #[must_use]
    pub fn ca_pem(&self) -> &[u8] {
        self.ca_pem.as_bytes()
    }

    /// A kubernetes.io/dockerconfigjson document with the right password; `{"auths":{}}` if none is asked for.
    #[must_use]
    pub fn docker_config_json(&self) -> Vec<u8> {
        let auths = self.login.as_ref().map_or_else(
            || serde_json::json!({}),
            |(user, password)| {
                let auth = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
                serde_json::json!({ self.address.as_str(): { "auth": auth } })
            },
        );
        serde_json::json!({ "auths": auths }).to_string().into_bytes()
    }

    /// Pushes a layout's image with all its platforms and returns its reference.
    ///
    /// # Errors
    /// When skopeo is not installed or fails.
    pub fn push(&self, layout: &Layout, name_and_tag: &str) -> Result<String> {
        self.push_with(layout, name_and_tag, &[])
    }

    /// As [`Registry::push`], with more arguments for `skopeo copy`, as `--format` and `v2s2`.
    ///
    /// # Errors
    /// When skopeo is not installed or fails.
    pub fn push_with(&self, layout: &Layout, name_and_tag: &str, arguments: &[&str]) -> Result<String> {
        let auth_file = tempfile::NamedTempFile::new_in(self.directory.path()).context("make a file")?;
        std::fs::write(auth_file.path(), self.docker_config_json()).context("write the login for skopeo")?;
        let output = Command::new("skopeo")
            .args(["copy", "--quiet", "--all", "--dest-tls-verify=false", "--dest-authfile"])
            .arg(auth_file.path())
            .args(arguments)
            .arg(layout.reference())
            .arg(format!("docker://{}", self.reference(name_and_tag)))
            .stdin(Stdio::null())
            .output()
            .context("start skopeo (Debian package skopeo)")?;
        if !output.status.success() {
            bail!(
                "skopeo copy {} to {name_and_tag}: {}",
                layout.reference(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(self.reference(name_and_tag))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One line of a password file, with bcrypt, which is all that docker-registry reads.
fn htpasswd(user: &str, password: &str) -> Result<Vec<u8>> {
    let mut child = Command::new("htpasswd")
        // Cost 4: the registry checks it on each request.
        .args(["-niB", "-C", "4", user])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("start htpasswd (Debian package apache2-utils)")?;
    child.stdin.take().context("htpasswd has no standard input")?.write_all(password.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("htpasswd: {}", output.status);
    }
    Ok(output.stdout)
}

/// Reads the log until it says where the registry listens, and goes on reading so that the registry never blocks.
fn wait_for_address(stderr: impl std::io::Read + Send + 'static) -> Result<String> {
    let (found, address) = mpsc::channel();
    std::thread::spawn(move || {
        let mut seen = Vec::new();
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            if let Some((_, rest)) = line.split_once("listening on ") {
                let end = rest.find(['"', ' ', ',']).unwrap_or(rest.len());
                let _ = found.send(Ok(rest[..end].to_owned()));
            } else if seen.len() < 20 {
                seen.push(line);
            }
        }
        let _ = found.send(Err(seen.join("\n")));
    });
    match address.recv_timeout(START) {
        Ok(Ok(address)) => Ok(address),
        Ok(Err(log)) => bail!("docker-registry ended at once:\n{log}"),
        Err(_) => bail!("docker-registry did not listen within {START:?}"),
    }
}
