//! A node with kubelet, containerd and kube-proxy, as a process tree with namespaces of its own.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use camino::{Utf8Path, Utf8PathBuf};
use serde_json::json;

use crate::cgroups;
use crate::cluster::layout::{
    HUB_IP, Layout, POD_CIDR, REGISTRY_HOST, REGISTRY_PORT, SERVICE_CIDR, node_ip, node_name, pod_subnet,
};
use crate::cluster::pki::Pki;
use crate::cluster::{ClusterConfig, MARKER};
use crate::daemon::Daemon;
use crate::node_init::InitConfig;
use crate::services::{Condition, Service};

const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

/// Makes the network namespace of node `index` and hangs it on the hub's bridge. No default route: nothing leaves the machine.
///
/// # Errors
/// With what ip(8) says.
pub fn create_network(layout: &Layout, index: u8, nodes: u8) -> Result<()> {
    let (hub, netns) = (layout.hub(), layout.node_netns(index));
    netns.create()?;
    hub.ip(&[
        &format!("link add v{index} type veth peer name eth0 netns {}", netns.name()),
        &format!("link set v{index} master br0 up"),
    ])?;
    let mut commands = vec![
        format!("addr add {}/24 dev eth0", node_ip(index)),
        "link set eth0 up".into(),
        format!("route add {SERVICE_CIDR} via {HUB_IP}"),
    ];
    let others = (1..=nodes).filter(|other| *other != index);
    commands.extend(others.map(|other| format!("route add {} via {}", pod_subnet(other), node_ip(other))));
    netns.ip(&commands.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Starts node `index` on its data; the network must exist. The process that is returned is the parent of the node's PID 1.
///
/// # Errors
/// When a cgroup or file can't be made.
pub fn start(config: &ClusterConfig, pki: &Pki, index: u8) -> Result<Daemon> {
    let dir = config.layout.node_dir(index);
    let mut init = init_config(config, index);
    init.shared.push(config.programs.kubernetes.clone());
    init.files.extend(configuration_files(pki, index, &dir));
    init.services = services(config, pki, index, &dir);
    launch(config, index, &init)
}

/// Starts node `index` with `services` instead of kubelet, containerd and kube-proxy.
///
/// # Errors
/// When a cgroup or file can't be made.
pub fn start_light(
    config: &ClusterConfig,
    index: u8,
    services: Vec<Service>,
    shared: &[Utf8PathBuf],
) -> Result<Daemon> {
    let mut init = init_config(config, index);
    init.shared.extend_from_slice(shared);
    // The API server's Service has no kube-proxy here, and the operator runs in the hub.
    let operator = format!("{HUB_IP} imp-controller-manager.imp-system.svc\n");
    if let Some((_, hosts)) = init.files.iter_mut().find(|(path, _)| path == "/etc/hosts") {
        hosts.push_str(&operator);
    }
    init.services = services;
    launch(config, index, &init)
}

fn launch(config: &ClusterConfig, index: u8, init: &InitConfig) -> Result<Daemon> {
    let layout = &config.layout;
    let dir = layout.node_dir(index);
    for sub in ["root", "kubelet", "containerd", "log", "imp"] {
        std::fs::create_dir_all(dir.join(sub)).with_context(|| format!("make {dir}/{sub}"))?;
    }
    cgroups::create(&layout.node_cgroup(index))?;
    let file = dir.join("init.json");
    std::fs::write(&file, serde_json::to_vec_pretty(init)?).with_context(|| format!("write {file}"))?;
    power_on(&config.self_program, layout, index)
}

/// Starts node `index` on the data and configuration that it has; its network must exist. `program` has the subcommand
/// `node-init`.
///
/// # Errors
/// When the process can't be started.
pub fn power_on(program: &Utf8Path, layout: &Layout, index: u8) -> Result<Daemon> {
    let (name, file) = (node_name(index), layout.node_dir(index).join("init.json"));
    let mut command = Command::new(program);
    command.args(["node-init", "--stage=network", file.as_str()]).env(MARKER, layout.dir.as_str());
    Daemon::start(&format!("node {name}"), command, &layout.logs().join(format!("{name}.log")))
}

/// Ends a node at once, as a power cut does.
///
/// # Errors
/// When its processes can't be ended.
pub fn power_off(daemon: &Daemon) -> Result<()> {
    // `unshare --kill-child`: PID 1 of the node gets SIGKILL when its parent ends, and the kernel ends the rest.
    daemon.stop(Duration::ZERO)
}

/// Removes the network of node `index`, with everything that the node made in it, as a reboot does.
///
/// # Errors
/// With what ip(8) says.
pub fn delete_network(layout: &Layout, index: u8) -> Result<()> {
    layout.hub().ip(&[&format!("link del v{index}")])?;
    layout.node_netns(index).delete()
}

/// A command that runs `program` on the node that `daemon` is the parent of, in all of its namespaces.
///
/// # Errors
/// When the node does not run.
pub fn command(daemon: &Daemon, program: &str) -> Result<Command> {
    let init = init_pid(daemon)?;
    let mut command = Command::new("nsenter");
    command.args(["--target", &init.to_string(), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]);
    command.args([&format!("--root=/proc/{init}/root"), &format!("--wd=/proc/{init}/root"), program]);
    Ok(command)
}

/// The node's PID 1, as this machine counts it.
///
/// # Errors
/// When the node does not run.
pub fn init_pid(daemon: &Daemon) -> Result<u32> {
    let pid = daemon.pid;
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .with_context(|| format!("{} does not run", daemon.name))?;
    let init = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
    init.with_context(|| format!("{} has no PID 1", daemon.name))
}

/// What every node has in common.
fn init_config(config: &ClusterConfig, index: u8) -> InitConfig {
    let (layout, name) = (&config.layout, node_name(index));
    let dir = layout.node_dir(index);
    let hosts = format!("127.0.0.1 localhost\n{} {name}\n{HUB_IP} {REGISTRY_HOST}\n", node_ip(index));
    let sysctls = [
        ("vm/overcommit_memory", "1"),
        ("vm/panic_on_oom", "0"),
        ("kernel/panic", "10"),
        ("kernel/panic_on_oops", "1"),
    ];
    InitConfig {
        netns: layout.node_netns(index).path(),
        cgroup: layout.node_cgroup(index),
        root: dir.join("root"),
        shared: vec![layout.dir.clone()],
        persistent: [("kubelet", "/var/lib/kubelet"), ("log", "/var/log"), ("imp", "/var/lib/imp")]
            .map(|(outside, inside)| (dir.join(outside), inside.into()))
            .to_vec(),
        files: vec![
            ("/etc/hostname".into(), format!("{name}\n")),
            ("/etc/hosts".into(), hosts),
            ("/etc/resolv.conf".into(), String::new()),
        ],
        masked_sysctls: sysctls.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec(),
        machine_id: format!("{:032x}", u128::from(index)),
        services: Vec::new(),
        hostname: name,
    }
}

fn services(config: &ClusterConfig, pki: &Pki, index: u8, dir: &Utf8Path) -> Vec<Service> {
    let name = node_name(index);
    let log = |service: &str| config.layout.logs().join(format!("{name}-{service}.log"));
    let service = |service: &str, command: &[&str]| Service {
        name: service.to_owned(),
        command: command.iter().map(|s| (*s).to_owned()).collect(),
        log: log(service),
        after: None,
        once: false,
    };
    let mut services =
        vec![service("containerd", &["containerd", "--config", dir.join("containerd.toml").as_str()])];
    let mut socket = Some(Condition::Socket(CONTAINERD_SOCKET.into()));
    for image in &config.images {
        let import = [
            "ctr",
            "--address",
            CONTAINERD_SOCKET,
            "--namespace",
            "k8s.io",
            "images",
            "import",
            image.as_str(),
        ];
        services.push(Service { once: true, after: socket.take(), ..service("image-import", &import) });
    }
    let kubelet = [
        config.programs.kubernetes("kubelet").as_str(),
        &format!("--config={dir}/kubelet.json"),
        &format!("--kubeconfig={}", pki.path(&format!("node-{name}.kubeconfig"))),
        &format!("--node-ip={}", node_ip(index)),
        &format!("--hostname-override={name}"),
        "--node-labels=imp/enabled=true",
    ]
    .map(str::to_owned);
    let kubelet: Vec<&str> = kubelet.iter().map(String::as_str).collect();
    services.push(Service {
        after: Some(Condition::Tcp(config.layout.api_server())),
        ..service("kubelet", &kubelet)
    });
    let proxy = config.programs.kubernetes("kube-proxy");
    services.push(service("kube-proxy", &[proxy.as_str(), &format!("--config={dir}/kube-proxy.json")]));
    services
}

/// Configuration of containerd, CNI, kubelet and kube-proxy.
fn configuration_files(pki: &Pki, index: u8, dir: &Utf8Path) -> Vec<(Utf8PathBuf, String)> {
    let name = node_name(index);
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": {"clientCAFile": pki.path("ca.crt")}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki.path(&format!("serving-{name}.crt")),
        "tlsPrivateKeyFile": pki.path(&format!("serving-{name}.key")),
        "address": node_ip(index).to_string(),
        "healthzBindAddress": "127.0.0.1",
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "resolvConf": "/etc/resolv.conf",
        // Lowering it needs CAP_SYS_RESOURCE, which containers that play a machine often lack.
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": false,
        "nodeStatusUpdateFrequency": "5s",
    });
    let proxy = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": pki.path("kube-proxy.kubeconfig")},
        "clusterCIDR": POD_CIDR,
        "hostnameOverride": name,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        // These are sysctls of the machine, not of the network namespace.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    });
    let cni = json!({
        "cniVersion": "0.4.0", "name": "imp-dev", "plugins": [
            {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
             "ipam": {"type": "host-local", "ranges": [[{"subnet": pod_subnet(index)}]], "routes": [{"dst": "0.0.0.0/0"}]}},
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    let hosts =
        format!("[host.\"http://{HUB_IP}:{REGISTRY_PORT}\"]\n  capabilities = [\"pull\", \"resolve\"]\n");
    vec![
        (dir.join("containerd.toml"), containerd_toml(dir)),
        (dir.join("kubelet.json"), kubelet.to_string()),
        (dir.join("kube-proxy.json"), proxy.to_string()),
        ("/etc/cni/net.d/10-imp-dev.conflist".into(), cni.to_string()),
        (format!("/etc/containerd/certs.d/{REGISTRY_HOST}:{REGISTRY_PORT}/hosts.toml").into(), hosts),
    ]
}

fn containerd_toml(dir: &Utf8Path) -> String {
    format!(
        r#"version = 2
root = "{dir}/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{dir}/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE no pod starts otherwise.
  restrict_oom_score_adj = true
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "/etc/containerd/certs.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"#
    )
}

/// The sandbox container of every pod of the dev cluster.
pub const PAUSE_IMAGE: &str = "imp.dev/pause:dev";
