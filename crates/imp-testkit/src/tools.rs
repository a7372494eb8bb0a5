//! The programs of Kubernetes, etcd and Helm: built once from the Go modules that `xtask/go` pins, and kept in a cache.
//!
//! The cache directory of a module is named by the content of its `go.mod` and `go.sum`, so another version is another
//! directory and the whole cache may be deleted at any time.

use std::fs::File;
use std::io::Write as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use camino::{Utf8Path, Utf8PathBuf};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};

/// Where the programs are.
#[derive(Clone, Debug)]
pub struct GoTools {
    /// The program etcd.
    pub etcd: Utf8PathBuf,
    /// The directory with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy and kubectl.
    pub kubernetes: Utf8PathBuf,
    /// The program helm.
    pub helm: Utf8PathBuf,
}

impl GoTools {
    /// A program of Kubernetes.
    #[must_use]
    pub fn kubernetes(&self, program: &str) -> Utf8PathBuf {
        self.kubernetes.join(program)
    }
}

/// One module of `xtask/go`.
struct Module {
    /// Its directory in `xtask/go`, and the first part of its directory in the cache.
    name: &'static str,
    /// The Go module whose version goes into the programs.
    path: &'static str,
    /// Package of each program, and the name of the program.
    programs: &'static [(&'static str, &'static str)],
}

const ETCD: Module = Module {
    name: "etcd",
    path: "go.etcd.io/etcd/server/v3",
    programs: &[("go.etcd.io/etcd/server/v3", "etcd")],
};

const KUBERNETES: Module = Module {
    name: "kubernetes",
    path: "k8s.io/kubernetes",
    programs: &[
        ("k8s.io/kubernetes/cmd/kube-apiserver", "kube-apiserver"),
        ("k8s.io/kubernetes/cmd/kube-controller-manager", "kube-controller-manager"),
        ("k8s.io/kubernetes/cmd/kube-proxy", "kube-proxy"),
        ("k8s.io/kubernetes/cmd/kube-scheduler", "kube-scheduler"),
        ("k8s.io/kubernetes/cmd/kubectl", "kubectl"),
        ("k8s.io/kubernetes/cmd/kubelet", "kubelet"),
    ],
};

const HELM: Module =
    Module { name: "helm", path: "helm.sh/helm/v3", programs: &[("helm.sh/helm/v3/cmd/helm", "helm")] };

/// The cache directory: `$IMP_CACHE_DIR`, else `$XDG_CACHE_HOME/imp`, else `~/.cache/imp`.
///
/// # Errors
/// When none of the variables says where.
pub fn cache_dir() -> Result<Utf8PathBuf> {
    let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty()).map(Utf8PathBuf::from);
    var("IMP_CACHE_DIR")
        .or_else(|| var("XDG_CACHE_HOME").map(|dir| dir.join("imp")))
        .or_else(|| var("HOME").map(|dir| dir.join(".cache/imp")))
        .context("no cache directory: set IMP_CACHE_DIR or HOME")
}

/// All programs; builds what is missing, which takes about ten minutes the first time. Says on standard error what it builds.
///
/// # Errors
/// When Go is missing, or a build fails.
pub fn ensure_go_tools() -> Result<GoTools> {
    Ok(GoTools { etcd: ensure_etcd()?, kubernetes: ensure(&KUBERNETES)?, helm: ensure(&HELM)?.join("helm") })
}

/// What a control plane needs: etcd, and the directory of Kubernetes' programs.
///
/// # Errors
/// When Go is missing, or a build fails.
pub fn ensure_control_plane_tools() -> Result<(Utf8PathBuf, Utf8PathBuf)> {
    Ok((ensure_etcd()?, ensure(&KUBERNETES)?))
}

/// kubectl.
///
/// # Errors
/// When Go is missing, or a build fails.
pub fn kubectl() -> Result<Utf8PathBuf> {
    Ok(ensure(&KUBERNETES)?.join("kubectl"))
}

fn ensure_etcd() -> Result<Utf8PathBuf> {
    Ok(ensure(&ETCD)?.join("etcd"))
}

/// `xtask/go` of this checkout.
fn sources() -> Utf8PathBuf {
    Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../xtask/go")
}

/// The directory with the programs of `module`.
fn ensure(module: &Module) -> Result<Utf8PathBuf> {
    let source = sources().join(module.name);
    let go_mod = read(&source.join("go.mod"))?;
    let go_sum = read(&source.join("go.sum"))?;
    let key = Sha256::new().chain_update(&go_mod).chain_update(&go_sum).finalize();
    let cache = cache_dir()?.join("go");
    let dir = cache.join(format!("{}-{}", module.name, hex::encode(&key[..8])));
    if complete(module, &dir) {
        return Ok(dir);
    }
    fs_dir(&cache)?;
    // Held until the process has the programs or dies; whoever waits finds them built.
    let lock_path = cache.join(format!(".{}.lock", module.name));
    let lock = File::create(&lock_path).with_context(|| format!("open {lock_path}"))?;
    flock(&lock, FlockOperation::LockExclusive).with_context(|| format!("lock {lock_path}"))?;
    if !complete(module, &dir) {
        build(module, &source, &version(module, &String::from_utf8_lossy(&go_mod))?, &cache, &dir)?;
    }
    Ok(dir)
}

/// Whether every program is there. An etcd under the name of its package is given its own name.
fn complete(module: &Module, dir: &Utf8Path) -> bool {
    module.programs.iter().all(|(_, program)| {
        let path = dir.join(program);
        // A link leaves the other name in place for whoever uses it; a second process that was quicker is no error.
        path.is_file()
            || (*program == "etcd" && std::fs::hard_link(dir.join("server"), &path).is_ok())
            || path.is_file()
    })
}

/// The version that go.mod requires.
fn version(module: &Module, go_mod: &str) -> Result<String> {
    go_mod
        .lines()
        .filter_map(|line| line.trim().trim_start_matches("require ").split_once(' '))
        .find(|(path, _)| *path == module.path)
        .and_then(|(_, version)| version.split_whitespace().next().map(str::to_owned))
        .with_context(|| format!("xtask/go/{}/go.mod does not require {}", module.name, module.path))
}

fn build(module: &Module, source: &Utf8Path, version: &str, cache: &Utf8Path, dir: &Utf8Path) -> Result<()> {
    // Under the lock nobody else builds: what is there was left by a build that was killed.
    for entry in cache.read_dir_utf8().with_context(|| format!("read {cache}"))?.flatten() {
        if entry.file_name().starts_with(&format!(".{}-", module.name)) {
            std::fs::remove_dir_all(entry.path()).with_context(|| format!("remove {}", entry.path()))?;
        }
    }
    let temporary = tempfile::Builder::new()
        .prefix(&format!(".{}-", module.name))
        .tempdir_in(cache)
        .with_context(|| format!("make a directory in {cache}"))?;
    let (major, minor) = major_minor(version);
    for (package, program) in module.programs {
        // Standard error may be closed; the build goes on without the notice.
        let _ = writeln!(std::io::stderr(), "building {program} {version} (once; kept in {cache})");
        let mut command = Command::new("go");
        command.current_dir(source).env("CGO_ENABLED", "0").args(["build", "-ldflags"]);
        command.arg(format!(
            "-s -w -X k8s.io/component-base/version.gitVersion={version} \
             -X k8s.io/component-base/version.gitMajor={major} -X k8s.io/component-base/version.gitMinor={minor}"
        ));
        command.arg("-o").arg(temporary.path().join(program)).arg(package);
        let output = command.output().map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => anyhow::anyhow!(
                "{program} must be built and there is no `go`: install Go 1.26 or newer (https://go.dev/dl) and put it on PATH"
            ),
            _ => anyhow::Error::new(error).context("start go"),
        })?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = text.lines().collect();
            bail!(
                "build {program} in {source}: {}\n{}",
                output.status,
                lines[lines.len().saturating_sub(20)..].join("\n")
            );
        }
    }
    // An incomplete directory of an earlier layout stands in the way of the rename.
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("remove the incomplete {dir}"))?;
    }
    let made = temporary.keep();
    std::fs::rename(&made, dir).with_context(|| format!("rename {} to {dir}", made.display()))
}

fn major_minor(version: &str) -> (&str, &str) {
    let mut parts = version.trim_start_matches('v').split('.');
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
}

fn read(path: &Utf8Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("read {path}"))
}

fn fs_dir(path: &Utf8Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("make {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_pins_the_version_that_goes_into_its_programs() {
        for module in [ETCD, KUBERNETES, HELM] {
            let go_mod = std::fs::read_to_string(sources().join(module.name).join("go.mod")).unwrap();
            let version = version(&module, &go_mod).unwrap();
            assert!(version.starts_with('v'), "{version}");
            for (package, _) in module.programs {
                assert!(go_mod.contains(package), "xtask/go/{}/go.mod has no tool {package}", module.name);
            }
        }
    }

    #[test]
    fn an_etcd_under_its_packages_name_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let dir = Utf8Path::from_path(dir.path()).unwrap();
        assert!(!complete(&ETCD, dir));
        std::fs::write(dir.join("server"), "").unwrap();
        assert!(complete(&ETCD, dir));
        assert!(dir.join("etcd").is_file() && dir.join("server").is_file());
    }
}
