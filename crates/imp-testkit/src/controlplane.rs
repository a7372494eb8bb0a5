//! A real etcd and kube-apiserver for one test process, gone when the process is.

use std::fs::File;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use camino::{Utf8Path, Utf8PathBuf};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::pki::{Pki, kubeconfig};
use crate::tools;
use crate::wait::wait_for;

/// Environment variable of every process that belongs to a control plane: its directory.
const MARKER: &str = "IMP_TEST_CONTROL_PLANE";

/// Ends processes and removes the directory once the test process is gone, however it went: reads PIDs from its standard
/// input, whose other end only the test process has. A PID alone proves nothing, so the marker is looked for first.
const KEEPER: &str = r#"
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do
  if { tr '\0' '\n' </proc/$pid/environ | grep -qxF "$MARKER=$DIR"; } 2>/dev/null; then kill -9 $pid 2>/dev/null; fi
done
rm -rf "$DIR"
"#;

/// How to start a control plane. The default suits a test: etcd and API server alone, on free ports of 127.0.0.1.
#[derive(Clone, Debug)]
pub struct Options {
    /// Start kube-controller-manager (garbage collection, namespaces, ServiceAccounts).
    pub controller_manager: bool,
    /// Start kube-scheduler.
    pub scheduler: bool,
    /// Network namespace (a name of `ip netns`) in which everything runs; the client must be able to reach `bind`.
    pub netns: Option<String>,
    /// Address that the API server listens on.
    pub bind: Ipv4Addr,
    /// Port that the API server listens on; unset: a free one.
    pub port: Option<u16>,
    /// Address that the API server tells pods to use. It can't be a loopback address; nobody connects to the default,
    /// which is of the documentation range 192.0.2.0/24.
    pub advertise: Ipv4Addr,
    /// Addresses of Services.
    pub service_cidr: String,
    /// Names, besides the usual, that the API server's certificate is valid for.
    pub names: Vec<String>,
    /// Addresses, besides `bind` and `advertise`, that the API server's certificate is valid for.
    pub addresses: Vec<IpAddr>,
    /// More flags for kube-apiserver.
    pub apiserver_flags: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            controller_manager: false,
            scheduler: false,
            netns: None,
            bind: Ipv4Addr::LOCALHOST,
            port: None,
            advertise: Ipv4Addr::new(192, 0, 2, 1),
            service_cidr: "198.19.0.0/24".to_owned(),
            names: Vec::new(),
            addresses: Vec::new(),
            apiserver_flags: Vec::new(),
        }
    }
}

/// A program of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// etcd.
    Etcd,
    /// kube-apiserver.
    ApiServer,
    /// kube-controller-manager.
    ControllerManager,
    /// kube-scheduler.
    Scheduler,
}

impl Component {
    /// Name of the program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
        }
    }
}

/// Ports of one control plane.
#[derive(Clone, Copy, Debug)]
struct Ports {
    etcd: u16,
    peer: u16,
    api: u16,
    controller_manager: u16,
    scheduler: u16,
}

/// A running control plane. Dropping it ends its processes and removes its directory; when the process that holds it
/// dies without dropping, the same happens at once from outside.
#[derive(Debug)]
pub struct ControlPlane {
    options: Options,
    ports: Ports,
    pki: Pki,
    etcd: Utf8PathBuf,
    kubernetes: Utf8PathBuf,
    running: Mutex<Vec<(Component, Child)>>,
    // Dropped in this order: the keeper must find nothing to do.
    keeper: Mutex<Keeper>,
    dir: tempfile::TempDir,
}

#[derive(Debug)]
struct Keeper {
    process: Child,
    pids: Option<ChildStdin>,
}

impl ControlPlane {
    /// Starts a control plane and waits until it is ready, about two seconds. The programs are built first where they are
    /// missing (see [`tools`]).
    ///
    /// # Errors
    /// When a program can't be built or started, or ends, or is not ready in a minute; with the end of its log.
    pub async fn start(options: Options) -> Result<Self> {
        let (etcd, kubernetes) = tokio::task::spawn_blocking(tools::ensure_control_plane_tools)
            .await
            .context("build Kubernetes")??;
        let mut attempt = 1;
        loop {
            let plane = Self::prepare(options.clone(), etcd.clone(), kubernetes.clone())?;
            match plane.start_all().await {
                Ok(()) => return Ok(plane),
                // A port that was free a moment ago may have been taken by somebody else.
                Err(error) if attempt < 3 && format!("{error:#}").contains("address already in use") => {
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn prepare(options: Options, etcd: Utf8PathBuf, kubernetes: Utf8PathBuf) -> Result<Self> {
        let dir =
            tempfile::Builder::new().prefix("imp-control-plane-").tempdir().context("make a directory")?;
        let path = Utf8Path::from_path(dir.path()).context("the temporary directory's name is no UTF-8")?;
        let ports = free_ports(options.port)?;
        let mut addresses = vec![
            options.bind.into(),
            options.advertise.into(),
            first_service_address(&options.service_cidr)?,
        ];
        addresses.extend(&options.addresses);
        let names: Vec<&str> = options.names.iter().map(String::as_str).collect();
        let server = format!("https://{}", SocketAddr::new(options.bind.into(), ports.api));
        let pki = Pki::create(&path.join("pki"), &server, &names, &addresses)?;
        let mut keeper = Command::new("sh");
        keeper.args(["-c", KEEPER]).env("DIR", path).env("MARKER", MARKER);
        let mut process = detached(&mut keeper).stdin(Stdio::piped()).spawn().context("start sh")?;
        let pids = process.stdin.take();
        Ok(Self {
            options,
            ports,
            pki,
            etcd,
            kubernetes,
            running: Mutex::default(),
            keeper: Mutex::new(Keeper { process, pids }),
            dir,
        })
    }

    async fn start_all(&self) -> Result<()> {
        self.spawn(Component::Etcd)?;
        self.spawn(Component::ApiServer)?;
        self.wait_ready().await?;
        if self.options.controller_manager {
            self.spawn(Component::ControllerManager)?;
        }
        if self.options.scheduler {
            self.spawn(Component::Scheduler)?;
        }
        self.check_alive()
    }

    /// The directory with everything: `pki`, `etcd`, a log of each program.
    ///
    /// # Panics
    /// Never: the name was looked at when the directory was made.
    #[must_use]
    pub fn dir(&self) -> &Utf8Path {
        Utf8Path::from_path(self.dir.path()).expect("looked at when it was made")
    }

    /// URL of the API server.
    #[must_use]
    pub fn server(&self) -> String {
        format!("https://{}", SocketAddr::new(self.options.bind.into(), self.ports.api))
    }

    /// Keys and certificates.
    #[must_use]
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// kubeconfig file of an administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> Utf8PathBuf {
        self.pki.path("admin.kubeconfig")
    }

    /// A client with an administrator's rights. A client belongs to the runtime that it was made in, so every
    /// `#[tokio::test]` makes its own.
    ///
    /// # Errors
    /// When the kubeconfig can't be read.
    pub async fn client(&self) -> Result<Client> {
        let path = self.kubeconfig();
        client(&std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?).await
    }

    /// kubeconfig of `user`, a member of `group` if given.
    ///
    /// # Errors
    /// When a name cannot stand in a certificate.
    pub fn kubeconfig_of(&self, user: &str, group: Option<&str>) -> Result<String> {
        let groups: Vec<&str> = group.into_iter().collect();
        let identity = self.pki.ca().issue(user, &groups, &[], &[])?;
        Ok(kubeconfig(&self.server(), self.pki.ca().certificate(), user, &identity))
    }

    /// A client of `user`, a member of `group` if given, with no other rights than RBAC gives.
    ///
    /// # Errors
    /// When a name cannot stand in a certificate.
    pub async fn client_of(&self, user: &str, group: Option<&str>) -> Result<Client> {
        client(&self.kubeconfig_of(user, group)?).await
    }

    /// kubectl as an administrator.
    #[must_use]
    pub fn kubectl(&self) -> Command {
        let mut command = Command::new(self.kubernetes.join("kubectl"));
        // A cache of discovery for each: an older one does not know the kinds that were defined meanwhile.
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let cache = self.dir().join(format!("kubectl-cache/{}", CALLS.fetch_add(1, Ordering::Relaxed)));
        command.arg("--cache-dir").arg(cache).arg("--kubeconfig").arg(self.kubeconfig());
        command
    }

    /// Waits until the API server says that it is ready.
    ///
    /// # Errors
    /// When a program has ended, or after a minute.
    pub async fn wait_ready(&self) -> Result<()> {
        let client = self.client().await?;
        let ready = wait_for(Duration::from_secs(60), "the API server to be ready", async || {
            // A dead program ends the wait: it is told below.
            if self.check_alive().is_err() {
                return Ok(());
            }
            let request =
                http::Request::get("/readyz").body(Vec::new()).map_err(|error| error.to_string())?;
            client.request_text(request).await.map(drop).map_err(|error| error.to_string())
        })
        .await;
        self.check_alive()?;
        ready.with_context(|| format!("the end of its log:\n{}", self.log_tail(Component::ApiServer)))
    }

    /// Ends a program at once, as a crash would.
    ///
    /// # Errors
    /// When it does not run.
    pub fn kill(&self, component: Component) -> Result<()> {
        let mut running = lock(&self.running);
        let index = running.iter().position(|(which, _)| *which == component);
        let (_, mut child) =
            running.swap_remove(index.with_context(|| format!("{} does not run", component.program()))?);
        child.kill().with_context(|| format!("end {}", component.program()))?;
        child.wait().with_context(|| format!("end {}", component.program()))?;
        Ok(())
    }

    /// Starts a program (again), on the same data and ports. See [`ControlPlane::wait_ready`].
    ///
    /// # Errors
    /// When it can't be started.
    pub fn spawn(&self, component: Component) -> Result<()> {
        let program = match component {
            Component::Etcd => self.etcd.clone(),
            other => self.kubernetes.join(other.program()),
        };
        let log_path = self.log_path(component);
        let log = File::options()
            .create(true)
            .append(true)
            .open(&log_path)
            .with_context(|| format!("open {log_path}"))?;
        let mut command = match &self.options.netns {
            Some(name) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/run/netns/{name}")).arg(&program);
                command
            }
            None => Command::new(&program),
        };
        command.args(self.flags(component)).env(MARKER, self.dir());
        let errors = log.try_clone().with_context(|| format!("open {log_path}"))?;
        let child = detached(&mut command)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .with_context(|| format!("start {program}"))?;
        let pid = child.id();
        // First into our hands, so that it is ended whatever happens next.
        lock(&self.running).push((component, child));
        let mut keeper = lock(&self.keeper);
        let pids = keeper.pids.as_mut().context("the keeper has ended")?;
        writeln!(pids, "{pid}").context("tell the keeper")
    }

    /// Fails when a program has ended by itself, with the end of its log.
    ///
    /// # Errors
    /// When there is one.
    pub fn check_alive(&self) -> Result<()> {
        for (component, child) in lock(&self.running).iter_mut() {
            if let Some(status) = child.try_wait().context("look after a process")? {
                bail!(
                    "{} ended ({status}); the end of its log:\n{}",
                    component.program(),
                    self.log_tail(*component)
                );
            }
        }
        Ok(())
    }

    /// The end of a program's log.
    #[must_use]
    pub fn log_tail(&self, component: Component) -> String {
        let text = std::fs::read(self.log_path(component)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    fn log_path(&self, component: Component) -> Utf8PathBuf {
        self.dir().join(format!("{}.log", component.program()))
    }

    fn flags(&self, component: Component) -> Vec<String> {
        match component {
            Component::Etcd => self.etcd_flags(),
            Component::ApiServer => self.apiserver_flags(),
            Component::ControllerManager => {
                let mut flags = self.client_flags("kcm", self.ports.controller_manager);
                flags.extend([
                    format!("--root-ca-file={}", self.pki.path("ca.crt")),
                    format!("--service-account-private-key-file={}", self.pki.path("sa.key")),
                    "--use-service-account-credentials=true".to_owned(),
                    "--allocate-node-cidrs=false".to_owned(),
                    // With the default of 20 requests a second, the first ServiceAccounts take seconds.
                    "--kube-api-qps=300".to_owned(),
                    "--kube-api-burst=600".to_owned(),
                ]);
                flags
            }
            Component::Scheduler => self.client_flags("scheduler", self.ports.scheduler),
        }
    }

    /// Its data is not synced to disk: it does not outlive the test.
    fn etcd_flags(&self) -> Vec<String> {
        let Ports { etcd, peer, .. } = self.ports;
        vec![
            "--name=imp-test".to_owned(),
            format!("--data-dir={}", self.dir().join("etcd")),
            format!("--listen-client-urls=http://127.0.0.1:{etcd}"),
            format!("--advertise-client-urls=http://127.0.0.1:{etcd}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-cluster=imp-test=http://127.0.0.1:{peer}"),
            "--unsafe-no-fsync".to_owned(),
            "--log-level=warn".to_owned(),
        ]
    }

    fn apiserver_flags(&self) -> Vec<String> {
        let file = |flag: &str, name: &str| format!("--{flag}={}", self.pki.path(name));
        let mut flags = vec![
            format!("--etcd-servers=http://127.0.0.1:{}", self.ports.etcd),
            format!("--bind-address={}", self.options.bind),
            format!("--advertise-address={}", self.options.advertise),
            format!("--secure-port={}", self.ports.api),
            format!("--service-cluster-ip-range={}", self.options.service_cidr),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--allow-privileged=true".to_owned(),
            file("client-ca-file", "ca.crt"),
            file("tls-cert-file", "apiserver.crt"),
            file("tls-private-key-file", "apiserver.key"),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
            file("service-account-key-file", "sa.pub"),
            file("service-account-signing-key-file", "sa.key"),
            file("kubelet-client-certificate", "kubelet-client.crt"),
            file("kubelet-client-key", "kubelet-client.key"),
            file("requestheader-client-ca-file", "front-proxy-ca.crt"),
            "--requestheader-allowed-names=front-proxy-client".to_owned(),
            "--requestheader-username-headers=X-Remote-User".to_owned(),
            "--requestheader-group-headers=X-Remote-Group".to_owned(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
            file("proxy-client-cert-file", "front-proxy-client.crt"),
            file("proxy-client-key-file", "front-proxy-client.key"),
            // No kube-proxy runs beside the API server: aggregated APIs are called at their endpoints.
            "--enable-aggregator-routing=true".to_owned(),
        ];
        flags.extend(self.options.apiserver_flags.iter().cloned());
        flags
    }

    fn client_flags(&self, user: &str, port: u16) -> Vec<String> {
        let config = self.pki.path(&format!("{user}.kubeconfig"));
        vec![
            format!("--kubeconfig={config}"),
            format!("--authentication-kubeconfig={config}"),
            format!("--authorization-kubeconfig={config}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            format!("--tls-cert-file={}", self.pki.path(&format!("{user}.crt"))),
            format!("--tls-private-key-file={}", self.pki.path(&format!("{user}.key"))),
            "--leader-elect=false".to_owned(),
        ]
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let mut running = std::mem::take(&mut *lock(&self.running));
        // API server before etcd, so that it does not complain to the log of its last moments.
        running.sort_by_key(|(component, _)| std::cmp::Reverse(*component));
        for (_, child) in &mut running {
            // It may have ended by itself; there is nobody to tell.
            let _ = child.kill();
            let _ = child.wait();
        }
        let mut keeper = lock(&self.keeper);
        keeper.pids = None;
        let _ = keeper.process.wait();
    }
}

/// In a process group of its own, so that Ctrl-C reaches the test alone and the order of ending is ours.
fn detached(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt as _;
    command.process_group(0)
}

async fn client(kubeconfig: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).context("read the kubeconfig")?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic elsewhere leaves nothing half done that would matter for ending processes.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Ports that are free now; all are held at once so that they differ.
fn free_ports(api: Option<u16>) -> Result<Ports> {
    let mut listeners = Vec::new();
    let mut free = || -> Result<u16> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("find a free port of 127.0.0.1")?;
        let port = listener.local_addr().context("find a free port of 127.0.0.1")?.port();
        listeners.push(listener);
        Ok(port)
    };
    Ok(Ports {
        etcd: free()?,
        peer: free()?,
        api: match api {
            Some(port) => port,
            None => free()?,
        },
        controller_manager: free()?,
        scheduler: free()?,
    })
}

/// The address of Service `default/kubernetes`: the first of the range.
fn first_service_address(cidr: &str) -> Result<IpAddr> {
    let network = cidr.split_once('/').and_then(|(address, _)| address.parse::<Ipv4Addr>().ok());
    let network = network.with_context(|| format!("{cidr:?} is no IPv4 network such as 198.19.0.0/24"))?;
    Ok(Ipv4Addr::from_bits(network.to_bits().wrapping_add(1)).into())
}
