//! Keys and certificates of a cluster beyond those of every control plane: of nodes, and a person's kubeconfig.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Result;
use serde_json::json;

use super::layout::{HUB_IP, KUBERNETES_SERVICE_IP, Layout, node_ip, node_name};
use crate::files::write_private;
use crate::pki;

/// The directory with everything; made anew for each cluster, readable by its owner alone.
#[derive(Debug)]
pub struct Pki {
    base: pki::Pki,
    server: String,
}

impl Pki {
    /// Makes every key, certificate and kubeconfig of a cluster with `nodes` nodes.
    ///
    /// # Errors
    /// When a file can't be written.
    pub fn create(layout: &Layout, nodes: u8) -> Result<Self> {
        let server = format!("https://{}", layout.api_server());
        let addresses = [HUB_IP.into(), KUBERNETES_SERVICE_IP.into()];
        let pki = Self { base: pki::Pki::create(&layout.pki(), &server, &[], &addresses)?, server };
        pki.issue("kube-proxy", "system:kube-proxy", &[], &[], &[])?;
        pki.write_kubeconfig("kube-proxy")?;
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        for index in 1..=nodes {
            let name = node_name(index);
            let user = format!("system:node:{name}");
            pki.issue(&format!("node-{name}"), &user, &["system:nodes"], &[], &[])?;
            let addresses = [local, node_ip(index).into()];
            pki.issue(&format!("serving-{name}"), &user, &["system:nodes"], &[&name], &addresses)?;
            pki.write_kubeconfig(&format!("node-{name}"))?;
        }
        Ok(pki)
    }

    /// A file of the directory.
    #[must_use]
    pub fn path(&self, file: &str) -> String {
        self.base.path(file).into_string()
    }

    /// A kubeconfig for an administrator: it stands alone, reaches the API server at `server`, and its context is called
    /// `context`.
    ///
    /// # Errors
    /// When a certificate can't be made.
    pub fn person_kubeconfig(&self, server: SocketAddr, context: &str) -> Result<String> {
        self.kubeconfig_of("imp-dev-admin", Some("system:masters"), server, context)
    }

    /// The same for any user, in one group or none.
    ///
    /// # Errors
    /// When a certificate can't be made.
    pub fn kubeconfig_of(
        &self,
        user: &str,
        group: Option<&str>,
        server: SocketAddr,
        context: &str,
    ) -> Result<String> {
        let ca = self.base.ca();
        let identity = ca.issue(user, group.as_slice(), &[], &[])?;
        let text = pki::kubeconfig(&format!("https://{server}"), ca.certificate(), user, &identity);
        let mut config: serde_json::Value = serde_json::from_str(&text)?;
        config["current-context"] = json!(context);
        config["contexts"][0]["name"] = json!(context);
        Ok(serde_json::to_string_pretty(&config)?)
    }

    fn issue(
        &self,
        file: &str,
        user: &str,
        groups: &[&str],
        names: &[&str],
        addresses: &[IpAddr],
    ) -> Result<()> {
        let identity = self.base.ca().issue(user, groups, names, addresses)?;
        write_private(&self.base.path(&format!("{file}.crt")), &identity.certificate)?;
        write_private(&self.base.path(&format!("{file}.key")), &identity.key)
    }

    fn write_kubeconfig(&self, user: &str) -> Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
            "clusters": [{"name": "cluster", "cluster": {"server": self.server, "certificate-authority": self.path("ca.crt")}}],
            "users": [{"name": user, "user": {
                "client-certificate": self.path(&format!("{user}.crt")),
                "client-key": self.path(&format!("{user}.key")),
            }}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user}}],
        });
        write_private(&self.base.path(&format!("{user}.kubeconfig")), &config.to_string())
    }
}
