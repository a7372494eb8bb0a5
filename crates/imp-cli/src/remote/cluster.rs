//! The API server, as the person's kubeconfig names it, and what its refusals mean.

use anyhow::{Context as _, anyhow};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};

use super::args::Flags;

/// The API server and the namespace that is meant.
pub(super) struct Cluster {
    pub(super) client: Client,
    namespace: String,
}

/// Reads the kubeconfig.
///
/// # Errors
/// When it cannot be read or names no such context.
pub(super) async fn connect(flags: &Flags) -> anyhow::Result<Cluster> {
    let file = match &flags.kubeconfig {
        Some(path) => Kubeconfig::read_from(path)
            .with_context(|| format!("kubeconfig {} cannot be read", path.display()))?,
        None => Kubeconfig::read().context("no kubeconfig: give --kubeconfig, or set KUBECONFIG")?,
    };
    let options =
        KubeConfigOptions { context: flags.context.clone(), cluster: flags.cluster.clone(), user: None };
    let mut config = kube::Config::from_custom_kubeconfig(file, &options)
        .await
        .context("the kubeconfig cannot be used")?;
    // A stream may be silent for as long as it likes.
    config.read_timeout = None;
    // A node that is away is told at once, not after a minute of trying.
    config.default_retry = false;
    let namespace = flags.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config).context("no client of the API server can be made")?;
    Ok(Cluster { client, namespace })
}

impl Cluster {
    /// A request for a subresource of VM `name`.
    ///
    /// # Errors
    /// When a name makes no URL.
    pub(super) fn request(
        &self,
        name: &str,
        subresource: &str,
        options: &[(&str, String)],
    ) -> anyhow::Result<http::Request<Vec<u8>>> {
        for name in [name, &self.namespace] {
            let fit = !name.is_empty()
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte));
            anyhow::ensure!(
                fit,
                "{name:?} is no name of an object: those have small letters, digits, - and . alone"
            );
        }
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.extend_pairs(options);
        let path = format!(
            "/apis/subresources.imp.dev/v1alpha1/namespaces/{}/impvms/{name}/{subresource}?{}",
            self.namespace,
            query.finish()
        );
        Ok(http::Request::get(path).body(Vec::new())?)
    }

    /// What a refusal means for a person.
    pub(super) fn explain(&self, error: kube::Error, name: &str, verb: &str) -> anyhow::Error {
        let kube::Error::Api(status) = error else {
            return anyhow::Error::new(error).context("the API server cannot be reached");
        };
        let (namespace, message) = (&self.namespace, status.message.trim_end_matches('.').to_owned());
        match status.code {
            401 => anyhow!("the API server does not know you: {message}. Check the user of your kubeconfig"),
            403 => anyhow!(
                "you may not {verb} VM {name} in namespace {namespace}: {message}. Ask for a role with that right, such as imp-edit"
            ),
            404 if message.contains("impvms.imp.dev") => anyhow!(
                "there is no VM {name} in namespace {namespace}: `kubectl get impvm -n {namespace}` lists what there is"
            ),
            404 => anyhow!(
                "the cluster has no API subresources.imp.dev: is Imp installed? `kubectl get apiservice v1alpha1.subresources.imp.dev` tells ({message})"
            ),
            503 => anyhow!(
                "{message}. If this is about the API: `kubectl get apiservice v1alpha1.subresources.imp.dev` tells whether the operator serves it"
            ),
            _ => anyhow!("{message}"),
        }
    }
}
