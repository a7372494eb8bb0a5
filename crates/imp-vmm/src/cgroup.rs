//! A VM's control groups: one directory `<parent>/<uid>` in every hierarchy, on cgroup v2 and on v1 or hybrid hosts.

use crate::VmmError;
use camino::{Utf8Path, Utf8PathBuf};
use std::{collections::BTreeSet, io, time::Duration};

/// How long a group that was killed may take to become empty.
const EMPTY_DEADLINE: Duration = Duration::from_secs(10);

/// What a VM may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Guest memory plus the VMM's own, in bytes.
    pub memory_bytes: u64,
    /// CPU time in thousandths of a CPU.
    pub cpu_millis: u64,
}

/// The control groups of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    dirs: Vec<Utf8PathBuf>,
}

fn io_error(doing: String) -> impl FnOnce(io::Error) -> VmmError {
    move |source| VmmError::Io { doing, source }
}

/// Roots of the hierarchies under `mount` (v2: the mount itself).
fn hierarchies(mount: &Utf8Path) -> Result<Vec<Utf8PathBuf>, VmmError> {
    if mount.join("cgroup.controllers").exists() {
        return Ok(vec![mount.to_owned()]);
    }
    let entries = mount.read_dir_utf8().map_err(io_error(format!("cannot read {mount}")))?;
    // cpu and cpuacct are often links to one hierarchy.
    let roots: BTreeSet<Utf8PathBuf> =
        entries.filter_map(|entry| entry.ok()?.path().canonicalize_utf8().ok()).collect();
    Ok(roots.into_iter().filter(|root| root.join("cgroup.procs").exists()).collect())
}

impl Cgroup {
    /// Makes the groups of a VM under `parent` (one name for each engine on a host) and sets its limits. Idempotent.
    ///
    /// # Errors
    /// When a directory cannot be made or a limit that the hierarchy has cannot be set.
    pub fn create(parent: &str, uid: &str, limits: Limits) -> Result<Self, VmmError> {
        Self::create_under(Utf8Path::new("/sys/fs/cgroup"), parent, uid, limits)
    }

    fn create_under(mount: &Utf8Path, parent: &str, uid: &str, limits: Limits) -> Result<Self, VmmError> {
        let group = Self::of_under(mount, parent, uid)?;
        for dir in &group.dirs {
            let above = dir.parent().unwrap_or(mount);
            std::fs::create_dir_all(above).map_err(io_error(format!("cannot make {above}")))?;
            delegate(above);
            std::fs::create_dir_all(dir).map_err(io_error(format!("cannot make {dir}")))?;
            inherit_cpuset(above.parent(), above)?;
            inherit_cpuset(Some(above), dir)?;
            limit(dir, limits)?;
        }
        Ok(group)
    }

    /// The groups that a VM has or would have.
    ///
    /// # Errors
    /// When the hierarchies cannot be listed.
    pub fn of(parent: &str, uid: &str) -> Result<Self, VmmError> {
        Self::of_under(Utf8Path::new("/sys/fs/cgroup"), parent, uid)
    }

    fn of_under(mount: &Utf8Path, parent: &str, uid: &str) -> Result<Self, VmmError> {
        Ok(Self { dirs: hierarchies(mount)?.iter().map(|root| root.join(parent).join(uid)).collect() })
    }

    /// UIDs of all VMs that have a group under `parent` in any hierarchy.
    ///
    /// # Errors
    /// When the hierarchies cannot be listed.
    pub fn list(parent: &str) -> Result<BTreeSet<String>, VmmError> {
        let mut uids = BTreeSet::new();
        for root in hierarchies(Utf8Path::new("/sys/fs/cgroup"))? {
            let Ok(entries) = root.join(parent).read_dir_utf8() else { continue };
            let names = entries.filter_map(Result::ok).filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
            uids.extend(names.map(|e| e.file_name().to_owned()));
        }
        Ok(uids)
    }

    /// One directory for each hierarchy.
    #[must_use]
    pub fn dirs(&self) -> &[Utf8PathBuf] {
        &self.dirs
    }

    /// Processes in any of the groups.
    #[must_use]
    pub fn pids(&self) -> BTreeSet<i32> {
        let files = self.dirs.iter().filter_map(|dir| std::fs::read_to_string(dir.join("cgroup.procs")).ok());
        files.flat_map(|text| text.lines().filter_map(|l| l.parse().ok()).collect::<Vec<_>>()).collect()
    }

    /// How often the kernel killed something in the group for memory.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        let files = self.dirs.iter().flat_map(|d| [d.join("memory.events"), d.join("memory.oom_control")]);
        files
            .filter_map(|file| std::fs::read_to_string(file).ok())
            .filter_map(|text| text.lines().find_map(|l| l.strip_prefix("oom_kill ")?.parse().ok()))
            .max()
            .unwrap_or(0)
    }

    /// SIGKILL for all: on v2 by the kernel, which no fork escapes and no PID's reuse deceives.
    fn kill(&self, dir: &Utf8Path) {
        if std::fs::write(dir.join("cgroup.kill"), "1").is_ok() {
            return;
        }
        for pid in self.pids().into_iter().filter_map(rustix::process::Pid::from_raw) {
            // It may be gone by now, which is what we want.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    /// Removes the groups; what is left in them is killed. Idempotent.
    ///
    /// # Errors
    /// When a group does not become empty within ten seconds.
    pub async fn remove(&self) -> Result<(), VmmError> {
        let deadline = tokio::time::Instant::now() + EMPTY_DEADLINE;
        for dir in &self.dirs {
            loop {
                let error = match std::fs::remove_dir(dir) {
                    Ok(()) => break,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                    Err(e) => e,
                };
                self.kill(dir);
                if tokio::time::Instant::now() >= deadline {
                    return Err(VmmError::Io { doing: format!("cannot remove {dir}"), source: error });
                }
                // The kernel tells of an empty v1 group only through a release agent of the whole machine.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        Ok(())
    }
}

/// On v2 a controller must be handed down before a child has its files. A refusal shows when the limit is set.
fn delegate(parent: &Utf8Path) {
    for dir in parent.parent().into_iter().chain([parent]) {
        if dir.join("cgroup.subtree_control").exists() {
            let _ = std::fs::write(dir.join("cgroup.subtree_control"), "+cpu +memory");
        }
    }
}

/// A new v1 cpuset is empty, and nothing may join it then.
fn inherit_cpuset(parent: Option<&Utf8Path>, dir: &Utf8Path) -> Result<(), VmmError> {
    let Some(parent) = parent else { return Ok(()) };
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let path = dir.join(file);
        let Ok(own) = std::fs::read_to_string(&path) else { continue };
        if !own.trim().is_empty() || dir.join("cgroup.controllers").exists() {
            continue;
        }
        let value = std::fs::read_to_string(parent.join(file)).unwrap_or_default();
        if !value.trim().is_empty() {
            std::fs::write(&path, value.trim()).map_err(io_error(format!("cannot write {path}")))?;
        }
    }
    Ok(())
}

/// CFS period in microseconds, the kernel's default.
const PERIOD_US: u64 = 100_000;

fn limit(dir: &Utf8Path, limits: Limits) -> Result<(), VmmError> {
    let quota = (limits.cpu_millis * PERIOD_US / 1000).max(1000);
    let settings = [
        ("memory.max", limits.memory_bytes.to_string()),
        ("memory.limit_in_bytes", limits.memory_bytes.to_string()),
        ("cpu.max", format!("{quota} {PERIOD_US}")),
        ("cpu.cfs_quota_us", quota.to_string()),
    ];
    for (file, value) in settings {
        let path = dir.join(file);
        // Which of them exist depends on the hierarchy and its version.
        if path.exists() {
            std::fs::write(&path, &value).map_err(io_error(format!("cannot write {value} to {path}")))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory_bytes: 320 << 20, cpu_millis: 1500 };

    #[test]
    fn fr57_each_layout_gets_its_own_files() {
        let dir = tempfile::tempdir().unwrap();
        let v1 = Utf8Path::from_path(dir.path()).unwrap();
        for (controller, file) in [("memory", "memory.limit_in_bytes"), ("cpu", "cpu.cfs_quota_us")] {
            let group = v1.join(controller).join("imp/u1");
            std::fs::create_dir_all(&group).unwrap();
            std::fs::write(v1.join(controller).join("cgroup.procs"), "").unwrap();
            std::fs::write(group.join(file), "").unwrap();
        }
        let group = Cgroup::create_under(v1, "imp", "u1", LIMITS).unwrap();
        assert_eq!(group.dirs().len(), 2);
        let read = |p: &str| std::fs::read_to_string(v1.join(p)).unwrap();
        assert_eq!(read("memory/imp/u1/memory.limit_in_bytes"), "335544320");
        assert_eq!(read("cpu/imp/u1/cpu.cfs_quota_us"), "150000");

        let dir = tempfile::tempdir().unwrap();
        let v2 = Utf8Path::from_path(dir.path()).unwrap();
        std::fs::create_dir_all(v2.join("imp/u1")).unwrap();
        std::fs::write(v2.join("cgroup.controllers"), "cpu memory").unwrap();
        std::fs::write(v2.join("imp/u1/cpu.max"), "").unwrap();
        let group = Cgroup::create_under(v2, "imp", "u1", LIMITS).unwrap();
        assert_eq!(group.dirs(), [v2.join("imp/u1")]);
        assert_eq!(std::fs::read_to_string(v2.join("imp/u1/cpu.max")).unwrap(), "150000 100000");
    }

    #[tokio::test]
    async fn fr51_a_real_group_is_made_and_leaves_nothing() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let uid = format!("test-{}", std::process::id());
        let group = Cgroup::create("imp-test", &uid, LIMITS).unwrap();
        assert!(group.dirs().iter().all(|d| d.exists()));
        assert!(Cgroup::list("imp-test").unwrap().contains(&uid));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        for dir in group.dirs() {
            std::fs::write(dir.join("cgroup.procs"), child.id().to_string()).unwrap();
        }
        assert!(group.pids().contains(&i32::try_from(child.id()).unwrap()));
        let reaper = std::thread::spawn(move || child.wait());
        group.remove().await.unwrap();
        group.remove().await.unwrap();
        assert!(group.dirs().iter().all(|d| !d.exists()));
        assert!(!reaper.join().unwrap().unwrap().success());
    }
}
