//! `kubectl imp`: into the VMs of a cluster, with nothing but the person's kubeconfig.

/// Flags that only make sense with a cluster.
const CLUSTER_FLAGS: &[&str] = &["--context", "--kubeconfig", "--namespace", "-n", "--cluster"];

/// Whether a command line is meant for a cluster: the program was called as kubectl's plugin, or a flag before `--`
/// names a cluster.
pub(crate) fn is_remote(arguments: &[String]) -> bool {
    let program = arguments.first().map_or("", |a| a.rsplit('/').next().unwrap_or(a));
    program.starts_with("kubectl-imp")
        || arguments.iter().skip(1).take_while(|a| *a != "--").any(|a| {
            CLUSTER_FLAGS
                .iter()
                .any(|flag| a == flag || a.strip_prefix(flag).is_some_and(|rest| rest.starts_with('=')))
        })
}

/// Runs the command line of `kubectl imp`; the result is the process's exit code.
///
/// # Errors
/// When the command cannot be carried out.
pub(crate) fn main(_arguments: Vec<String>) -> anyhow::Result<u8> {
    anyhow::bail!("exec, logs and console of a cluster are being written")
}
