//! `up` and `down`: the development cluster.

mod full;
mod hello;
mod light;
mod profiles;
mod registry;

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;
use imp_testkit::cluster::layout::Layout;
use imp_testkit::cluster::{self, Cluster, ClusterConfig, State};
use imp_testkit::{boot, files, preflight, tools};
use rustix::fs::{FlockOperation, flock};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::UpArgs;
use crate::images::{self, Images};
use crate::programs::{self, Programs};
use crate::progress::Progress;
use crate::workspace;

/// Where the development cluster is; environment variables move it, so that tests can have one of their own.
struct Place {
    layout: Layout,
    /// What people use: kubeconfig, programs.
    dev: Utf8PathBuf,
    /// Where a person's kubectl reaches the API server.
    server: SocketAddr,
}

impl Place {
    fn from_environment() -> Result<Self> {
        let var = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
        let port = var("IMP_DEV_PORT", "26443");
        let port: u16 = port.parse().with_context(|| format!("IMP_DEV_PORT={port} is no port"))?;
        let layout = Layout {
            name: var("IMP_DEV_NAME", "imp-dev"),
            dir: var("IMP_DEV_DIR", "/var/tmp/imp-dev").into(),
        };
        let dev = workspace::target().join(layout.name.strip_prefix("imp-").unwrap_or(&layout.name));
        Ok(Self { layout, dev, server: ([127, 0, 0, 1], port).into() })
    }

    /// Two `up` or `down` at a time would undo each other's work.
    fn lock(&self) -> Result<Lock> {
        let path = self.layout.dir.with_extension("lock");
        loop {
            let file = File::create(&path).with_context(|| format!("open {path}"))?;
            flock(&file, FlockOperation::NonBlockingLockExclusive).with_context(|| {
                format!("another `cargo xtask up` or `down` is at work ({path} is locked)")
            })?;
            // Its last holder may have removed the file between our opening and our locking it.
            let ours = file.metadata().with_context(|| format!("look at {path}"))?.ino();
            if fs::metadata(&path).is_ok_and(|m| m.ino() == ours) {
                return Ok(Lock { path, _file: file });
            }
        }
    }
}

/// Held while a cluster is started or stopped; the file goes with it.
struct Lock {
    path: Utf8PathBuf,
    _file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Nothing depends on its being gone.
        let _ = fs::remove_file(&self.path);
    }
}

/// Everything that is built before a cluster is started.
struct Built {
    programs: Programs,
    images: Images,
    boot: boot::BootFiles,
    tools: tools::GoTools,
}

/// `cargo xtask up`.
pub(crate) fn up(args: &UpArgs) -> Result<()> {
    let place = Place::from_environment()?;
    preflight::root()?;
    let lock = place.lock()?;
    if let Some(state) = State::load(&place.layout.dir)? {
        return found(&place, &state, args);
    }
    check(&place, args)?;
    let progress = Progress::new();
    let built = build(&progress)?;
    let config = ClusterConfig {
        layout: place.layout.clone(),
        nodes: args.nodes,
        light: args.light,
        server: place.server,
        programs: built.tools.clone(),
        self_program: workspace::self_program()?,
        images: built.images.node.clone(),
    };
    let runtime = tokio::runtime::Runtime::new().context("start the async runtime")?;
    let progress = Progress::new();
    // Listened for before anything is started: until then a signal simply ends this program.
    let mut signals = runtime.block_on(async { Signals::listen() })?;
    let started = runtime.block_on(async {
        tokio::select! {
            started = start(&progress, &place, &built, config) => started,
            () = signals.asked() => bail!("interrupted"),
        }
    });
    if let Err(e) = started {
        if args.detach {
            return Err(e.context("what was started is left for a look, `cargo xtask down` removes it"));
        }
        keep_logs(&place);
        remove(&place).context("clean up")?;
        return Err(e);
    }
    eprintln!("\nRunning after {:.1} s.", progress.total());
    explain(&place);
    if args.detach {
        return Ok(());
    }
    eprintln!("Ctrl-C stops all of it.");
    // So that `down` works from another terminal.
    drop(lock);
    match runtime.block_on(attend(&place, &mut signals))? {
        Ending::Asked => down(),
        Ending::Removed => Ok(()),
    }
}

/// Why a foreground `up` ends.
enum Ending {
    /// Ctrl-C or SIGTERM.
    Asked,
    /// Somebody ran `down`.
    Removed,
}

/// Ctrl-C and SIGTERM.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn listen() -> Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).context("listen for SIGINT")?,
            terminate: signal(SignalKind::terminate()).context("listen for SIGTERM")?,
        })
    }

    /// Returns once one has come, also before this was called.
    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Waits for a signal or the cluster's end.
async fn attend(place: &Place, signals: &mut Signals) -> Result<Ending> {
    let mut look = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            () = signals.asked() => return Ok(Ending::Asked),
            _ = look.tick() => match State::load(&place.layout.dir)? {
                None => return Ok(Ending::Removed),
                Some(state) => if let Some(dead) = state.dead() {
                    // `down` ends processes first and removes the record last.
                    if place.lock().is_ok() {
                        bail!("{} ended: `cargo xtask down` removes the rest. The end of its log:\n{}", dead.name, dead.log_tail(10));
                    }
                },
            },
        }
    }
}

/// `cargo xtask down`.
pub(crate) fn down() -> Result<()> {
    let place = Place::from_environment()?;
    preflight::root()?;
    let _lock = place.lock()?;
    remove(&place)
}

fn remove(place: &Place) -> Result<()> {
    cluster::remove(&place.layout)?;
    if place.dev.exists() {
        fs::remove_dir_all(&place.dev).with_context(|| format!("remove {}", place.dev))?;
    }
    Ok(())
}

/// A second `up`: says what is there.
fn found(place: &Place, state: &State, args: &UpArgs) -> Result<()> {
    if let Some(dead) = state.dead() {
        bail!(
            "an earlier cluster is in {} and its {} has ended: `cargo xtask down` removes it. The end of its log:\n{}",
            place.layout.dir,
            dead.name,
            dead.log_tail(10)
        );
    }
    if !state.complete {
        bail!(
            "an earlier `up` in {} did not come to its end: `cargo xtask down` removes what it left",
            place.layout.dir
        );
    }
    if state.light != args.light || (!args.light && state.nodes != args.nodes) {
        let kind =
            if state.light { "a light one".to_owned() } else { format!("one with {} node(s)", state.nodes) };
        bail!("a cluster runs already, and it is {kind}: `cargo xtask down` first");
    }
    eprintln!("It runs already.");
    explain(place);
    Ok(())
}

/// What can be told before anything is started.
fn check(place: &Place, args: &UpArgs) -> Result<()> {
    preflight::port_free(place.server)?;
    preflight::tun()?;
    preflight::disk(&place.layout.dir, 6 << 10)?;
    preflight::real_file_system(&place.layout.dir)?;
    preflight::memory(if args.light { 1500 } else { 2000 + 500 * u64::from(args.nodes) })?;
    preflight::go()?;
    if let Some(note) = preflight::kvm_note() {
        eprintln!("note: {note}");
    }
    Ok(())
}

/// Packages, control plane, programs, kernel, images: all of it is quick when nothing has changed.
fn build(progress: &Progress) -> Result<Built> {
    let missing = preflight::missing_packages(&[preflight::VM_PACKAGES, preflight::CLUSTER_PACKAGES]);
    if !missing.is_empty() {
        progress.step(&format!("install {}", missing.join(" ")), || preflight::install_packages(&missing))?;
    }
    let tools = progress.step("control plane programs", tools::ensure_go_tools)?;
    let programs = progress.step("Imp's programs", programs::build)?;
    let boot = progress.step("guest kernel and initramfs", || boot::ensure(&programs.path("imp-guest")))?;
    let images = progress.step("container images", || images::build(&programs, &boot))?;
    Ok(Built { programs, images, boot, tools })
}

async fn start(progress: &Progress, place: &Place, built: &Built, config: ClusterConfig) -> Result<()> {
    let light = config.light;
    let mut cluster = progress.step("start etcd and API server", || Cluster::create(config))?;
    people(place, built, &cluster)?;
    registry::start(&mut cluster)?;
    if light {
        light::start(progress, place, built, &mut cluster).await?;
    } else {
        full::start(progress, place, built, &mut cluster).await?;
    }
    cluster.complete()
}

/// Kubeconfig and programs for people.
fn people(place: &Place, built: &Built, cluster: &Cluster) -> Result<()> {
    let bin = place.dev.join("bin");
    fs::create_dir_all(&bin).with_context(|| format!("make {bin}"))?;
    files::write_private(&place.dev.join("kubeconfig"), &cluster.kubeconfig()?)?;
    let imp = built.programs.path("imp");
    let links = [
        ("kubectl", built.tools.kubernetes("kubectl")),
        ("helm", built.tools.helm.clone()),
        ("imp", imp.clone()),
        ("kubectl-imp", imp),
    ];
    for (name, target) in links {
        let link = bin.join(name);
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&target, &link).with_context(|| format!("link {link} to {target}"))?;
    }
    Ok(())
}

fn keep_logs(place: &Place) {
    let kept = workspace::target().join("dev-logs");
    let _ = fs::remove_dir_all(&kept);
    if fs::rename(place.layout.logs(), &kept).is_ok()
        || imp_testkit::netns::run(std::process::Command::new("cp").args([
            "-r",
            place.layout.logs().as_str(),
            kept.as_str(),
        ]))
        .is_ok()
    {
        eprintln!("The programs' logs are kept in {kept}.");
    }
}

fn explain(place: &Place) {
    let dev = place.dev.strip_prefix(workspace::root()).unwrap_or(&place.dev);
    eprintln!(
        "
  export KUBECONFIG=$PWD/{dev}/kubeconfig PATH=$PWD/{dev}/bin:$PATH
  kubectl --context imp-dev get impvm -A      what runs
  kubectl describe impvm hello                its story
  kubectl imp logs -f hello                   what it prints
  kubectl imp exec -it hello -- sh            a shell in it
  cargo xtask down                            stop everything
"
    );
}
