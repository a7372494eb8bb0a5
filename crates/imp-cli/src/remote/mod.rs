//! `kubectl imp`: into the VMs of a cluster, with nothing but the person's kubeconfig.

mod args;
mod cluster;
mod console;
mod exec;
mod logs;
mod socket;

use anyhow::Context as _;
use clap::Parser as _;

use args::{Cli, Command};

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
pub(crate) fn main(arguments: Vec<String>) -> anyhow::Result<u8> {
    let cli = Cli::parse_from(arguments);
    // Fails only when a provider is installed already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("no asynchronous runtime")?;
    let result = runtime.block_on(async {
        let cluster = cluster::connect(&cli.flags).await?;
        match cli.command {
            Command::Exec(args) => exec::run(&cluster, args).await,
            Command::Logs(args) => logs::run(&cluster, args).await,
            Command::Console(args) => console::run(&cluster, args).await,
        }
    });
    // A read of the terminal may still be blocked; nobody waits for it.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_cluster_is_meant_when_it_is_named() {
        assert!(is_remote(&words("/usr/bin/kubectl-imp exec a -- ls")));
        assert!(is_remote(&words("imp logs --context=dev a")));
        assert!(!is_remote(&words("imp exec a -- ls -n")), "the command's own flag");
        assert!(!is_remote(&words("imp run a")));
    }

    #[test]
    fn flags_stand_where_kubectl_lets_them() {
        let cli = Cli::try_parse_from(words("kubectl-imp exec -it -n web hello -- sh -c ls")).unwrap();
        assert_eq!(cli.flags.namespace.as_deref(), Some("web"));
        let Command::Exec(exec) = cli.command else { panic!("exec") };
        assert!(exec.stdin && exec.tty);
        assert_eq!((exec.name.as_str(), exec.command), ("hello", words("sh -c ls")));
        let cli = Cli::try_parse_from(words("kubectl-imp --context dev logs -f --tail 5 --since 1m hello"))
            .unwrap();
        assert_eq!(cli.flags.context.as_deref(), Some("dev"));
        assert!(Cli::try_parse_from(words("kubectl-imp exec hello")).is_err(), "no command");
        assert!(Cli::try_parse_from(words("kubectl-imp logs --since soon hello")).is_err());
    }
}
