//! The control plane: etcd, API server, controller-manager and scheduler as processes in a network namespace of their own.

use std::process::Command;

use anyhow::Result;

use super::layout::{API_PORT, HUB_IP, Layout, MAX_NODES, SERVICE_CIDR, node_ip, pod_subnet};
use super::pki::Pki;
use super::{ClusterConfig, MARKER};
use crate::daemon::Daemon;

/// Makes the network namespace with the bridge that the nodes hang on.
pub(super) fn create_network(layout: &Layout, nodes: u8) -> Result<()> {
    let hub = layout.hub();
    hub.create()?;
    let address = format!("addr add {HUB_IP}/24 dev br0");
    let routes: Vec<String> = (1..=nodes.min(MAX_NODES))
        .map(|i| format!("route add {} via {}", pod_subnet(i), node_ip(i)))
        .collect();
    let mut commands = vec!["link add br0 type bridge", &address, "link set br0 up"];
    commands.extend(routes.iter().map(String::as_str));
    hub.ip(&commands)?;
    hub.sysctl("net.ipv4.ip_forward", "1")
}

/// A command in the hub, marked as this cluster's.
pub(super) fn hub_command(layout: &Layout, program: &str) -> Command {
    let mut command = layout.hub().command(program);
    command.env(MARKER, layout.dir.as_str());
    command
}

fn start(config: &ClusterConfig, name: &str, program: &str, args: Vec<String>) -> Result<Daemon> {
    let mut command = hub_command(&config.layout, program);
    command.args(args);
    Daemon::start(name, command, &config.layout.logs().join(format!("{name}.log")))
}

/// Starts etcd and the API server.
pub(super) fn start_api(config: &ClusterConfig, pki: &Pki) -> Result<Vec<Daemon>> {
    Ok(vec![start_etcd(config)?, start_apiserver(config, pki)?])
}

/// Starts etcd. Its data is not synced to disk: a dev cluster does not outlive its machine.
pub(super) fn start_etcd(config: &ClusterConfig) -> Result<Daemon> {
    let args = [
        "--name=imp-dev",
        &format!("--data-dir={}", config.layout.dir.join("etcd")),
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=imp-dev=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ];
    start(config, "etcd", config.programs.etcd.as_str(), args.map(str::to_owned).to_vec())
}

/// Starts the API server. Aggregated APIs are called by pod address: no kube-proxy runs in the hub.
pub(super) fn start_apiserver(config: &ClusterConfig, pki: &Pki) -> Result<Daemon> {
    let file = |flag: &str, name: &str| format!("--{flag}={}", pki.path(name));
    let args = vec![
        "--etcd-servers=http://127.0.0.1:2379".into(),
        "--bind-address=0.0.0.0".into(),
        format!("--advertise-address={HUB_IP}"),
        format!("--secure-port={API_PORT}"),
        format!("--service-cluster-ip-range={SERVICE_CIDR}"),
        "--authorization-mode=Node,RBAC".into(),
        "--enable-admission-plugins=NodeRestriction".into(),
        "--allow-privileged=true".into(),
        file("client-ca-file", "ca.crt"),
        file("tls-cert-file", "apiserver.crt"),
        file("tls-private-key-file", "apiserver.key"),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
        file("service-account-key-file", "sa.pub"),
        file("service-account-signing-key-file", "sa.key"),
        file("kubelet-client-certificate", "kubelet-client.crt"),
        file("kubelet-client-key", "kubelet-client.key"),
        file("kubelet-certificate-authority", "ca.crt"),
        "--kubelet-preferred-address-types=InternalIP,Hostname".into(),
        file("requestheader-client-ca-file", "front-proxy-ca.crt"),
        "--requestheader-allowed-names=front-proxy-client".into(),
        "--requestheader-username-headers=X-Remote-User".into(),
        "--requestheader-group-headers=X-Remote-Group".into(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".into(),
        file("proxy-client-cert-file", "front-proxy-client.crt"),
        file("proxy-client-key-file", "front-proxy-client.key"),
        "--enable-aggregator-routing=true".into(),
    ];
    start(config, "kube-apiserver", config.programs.kubernetes("kube-apiserver").as_str(), args)
}

/// Starts controller-manager and scheduler, once the API server is ready.
pub(super) fn start_controllers(config: &ClusterConfig, pki: &Pki) -> Result<Vec<Daemon>> {
    let common = |user: &str| -> Vec<String> {
        ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
            .map(|f| format!("--{f}={}", pki.path(&format!("{user}.kubeconfig"))))
            .into_iter()
            .chain([
                "--bind-address=127.0.0.1".into(),
                format!("--tls-cert-file={}", pki.path(&format!("{user}.crt"))),
                format!("--tls-private-key-file={}", pki.path(&format!("{user}.key"))),
                "--leader-elect=false".into(),
            ])
            .collect()
    };
    let mut manager = common("kcm");
    manager.extend([
        format!("--root-ca-file={}", pki.path("ca.crt")),
        format!("--service-account-private-key-file={}", pki.path("sa.key")),
        format!("--cluster-signing-cert-file={}", pki.path("ca.crt")),
        format!("--cluster-signing-key-file={}", pki.path("ca.key")),
        "--use-service-account-credentials=true".into(),
        "--allocate-node-cidrs=false".into(),
        // With the default of 20 requests a second, the first ServiceAccounts take seconds.
        "--kube-api-qps=300".into(),
        "--kube-api-burst=600".into(),
    ]);
    let name = "kube-controller-manager";
    let manager = start(config, name, config.programs.kubernetes(name).as_str(), manager)?;
    let name = "kube-scheduler";
    let scheduler = start(config, name, config.programs.kubernetes(name).as_str(), common("scheduler"))?;
    Ok(vec![manager, scheduler])
}
