//! What a cluster consists of, on disk, so that a later run finds it and `down` ends it.

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use camino::{Utf8Path, Utf8PathBuf};
use serde::{Deserialize, Serialize};

use super::MARKER;
use super::layout::Layout;
use crate::cgroups;
use crate::daemon::{Daemon, start_time};
use crate::netns::NetNs;

/// The record of a cluster, `state.json` in its directory.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct State {
    /// Its name: prefix of network namespaces, parent of cgroups.
    pub name: String,
    /// No kubelet: the node is a network namespace, Imp's programs are plain processes.
    pub light: bool,
    /// Number of nodes.
    pub nodes: u8,
    /// Where a person reaches the API server.
    pub server: SocketAddr,
    /// Whether everything came up; `false` is a start that was cut off.
    pub complete: bool,
    /// Every process that was started, in order.
    pub daemons: Vec<Daemon>,
}

impl State {
    fn file(dir: &Utf8Path) -> Utf8PathBuf {
        dir.join("state.json")
    }

    /// The record in `dir`, if there is one.
    ///
    /// # Errors
    /// When it can't be read or understood.
    pub fn load(dir: &Utf8Path) -> Result<Option<Self>> {
        let file = Self::file(dir);
        match fs::read(&file) {
            Ok(bytes) => Ok(Some(
                serde_json::from_slice(&bytes)
                    .with_context(|| format!("{file} is damaged; run `cargo xtask down`"))?,
            )),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| format!("read {file}")),
        }
    }

    /// Writes the record, whole or not at all.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn save(&self, dir: &Utf8Path) -> Result<()> {
        let file = Self::file(dir);
        let new = file.with_extension("new");
        fs::write(&new, serde_json::to_vec_pretty(self)?).with_context(|| format!("write {new}"))?;
        fs::rename(&new, &file).with_context(|| format!("write {file}"))
    }

    /// The first process that should run and does not.
    #[must_use]
    pub fn dead(&self) -> Option<&Daemon> {
        self.daemons.iter().find(|d| !d.alive())
    }
}

/// Ends everything of the cluster of this layout and removes its data. Also what a start that died half-way left and did not
/// record: processes carry the cluster's directory in their environment, namespaces and cgroups its name.
///
/// # Errors
/// With what is left, after everything was tried.
pub fn remove(layout: &Layout) -> Result<()> {
    let mut problems = Vec::new();
    // A damaged record is no reason to leave the rest.
    let recorded = State::load(&layout.dir).ok().flatten().map(|s| s.daemons).unwrap_or_default();
    for daemon in recorded.iter().rev().chain(&marked(&layout.dir)) {
        if let Err(e) = daemon.stop(Duration::ZERO) {
            problems.push(format!("{e:#}"));
        }
    }
    let prefix = format!("{}-", layout.name);
    for entry in Utf8Path::new("/run/netns").read_dir_utf8().into_iter().flatten().flatten() {
        if entry.file_name().starts_with(&prefix)
            && let Err(e) = NetNs::named(entry.file_name()).delete()
        {
            problems.push(format!("{e:#}"));
        }
    }
    problems.extend(remove_cgroups(layout).into_iter().map(|c| format!("cgroup {c} still holds a process")));
    if layout.dir.exists()
        && let Err(e) = fs::remove_dir_all(&layout.dir)
    {
        problems.push(format!("remove {}: {e}", layout.dir));
    }
    if problems.is_empty() {
        return Ok(());
    }
    bail!("not everything could be removed: {}", problems.join("; "))
}

/// Cgroups are busy for a moment after their last process was told to end.
fn remove_cgroups(layout: &Layout) -> Vec<Utf8PathBuf> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let left = cgroups::remove(Utf8Path::new(&layout.name));
        if left.is_empty() || Instant::now() > end {
            return left;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Processes outside of this one's ancestry that carry the marker of the cluster in `dir`.
fn marked(dir: &Utf8Path) -> Vec<Daemon> {
    let wanted = format!("{MARKER}={dir}");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        if pid == std::process::id() {
            continue;
        }
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        if environment.split(|b| *b == 0).any(|v| v == wanted.as_bytes())
            && let Some(start_time) = start_time(pid)
        {
            found.push(Daemon { name: format!("process {pid}"), pid, start_time, log: Utf8PathBuf::new() });
        }
    }
    found
}
