//! The cgroup hierarchies of this machine, version 1, 2 or both, as a node of the cluster gets its share of them.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use rustix::process::{Pid, Signal, kill_process};

/// One mounted hierarchy.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub mount_point: Utf8PathBuf,
    /// `cgroup` (version 1) or `cgroup2`.
    pub fs_type: String,
    /// Version 1: what to pass to mount(2) to get the same hierarchy again: controllers, or `none,name=systemd`.
    pub options: String,
}

/// Every cgroup hierarchy mounted below `/sys/fs/cgroup`, in the order of mounting.
///
/// # Errors
/// When `/proc/self/mountinfo` can't be read.
pub fn hierarchies() -> Result<Vec<Hierarchy>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    Ok(parse_mountinfo(&text))
}

/// proc_pid_mountinfo(5): fields before ` - ` are of the mount, after it file system type, source, super options.
fn parse_mountinfo(text: &str) -> Vec<Hierarchy> {
    text.lines()
        .filter_map(|line| {
            let (mount, fs) = line.split_once(" - ")?;
            let mount_point = mount.split(' ').nth(4)?;
            let mut fs = fs.split(' ');
            let (fs_type, options) = (fs.next()?, fs.nth(1)?);
            (matches!(fs_type, "cgroup" | "cgroup2") && mount_point.starts_with("/sys/fs/cgroup")).then(
                || Hierarchy {
                    mount_point: mount_point.into(),
                    fs_type: fs_type.into(),
                    options: version_1_options(options),
                },
            )
        })
        .collect()
}

/// The super options that select a version 1 hierarchy.
fn version_1_options(super_options: &str) -> String {
    let wanted: Vec<&str> = super_options
        .split(',')
        .filter(|o| {
            !matches!(*o, "rw" | "ro" | "xattr" | "nsdelegate" | "memory_recursiveprot")
                && !o.starts_with("release_agent=")
        })
        .collect();
    if wanted.iter().any(|o| o.starts_with("name=")) && wanted.len() == 1 {
        return format!("none,{}", wanted[0]);
    }
    wanted.join(",")
}

/// Makes the cgroup `path` (relative, as `imp-dev/n1`) in every hierarchy.
///
/// # Errors
/// When a directory can't be made.
pub fn create(path: &Utf8Path) -> Result<()> {
    for h in hierarchies()? {
        let mut dir = h.mount_point.clone();
        for part in path.components() {
            let parent = dir.clone();
            dir.push(part);
            fs::create_dir_all(&dir).with_context(|| format!("make cgroup {dir}"))?;
            if h.fs_type == "cgroup2" {
                delegate(&parent)?;
            } else if dir.join("cpuset.cpus").exists() {
                // Version 1: a new cpuset has no CPUs and takes no process before it gets some.
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let value =
                        fs::read(parent.join(file)).with_context(|| format!("read {parent}/{file}"))?;
                    fs::write(dir.join(file), value).with_context(|| format!("write {dir}/{file}"))?;
                }
            }
        }
    }
    Ok(())
}

/// Version 2: lets the children of `dir` use every controller that it has itself.
///
/// # Errors
/// When the kernel refuses, as it does for a cgroup other than the root that holds processes itself.
pub fn delegate(dir: &Utf8Path) -> Result<()> {
    let file = dir.join("cgroup.controllers");
    let controllers = fs::read_to_string(&file).with_context(|| format!("read {file}"))?;
    let wanted: String = controllers.split_whitespace().map(|c| format!("+{c} ")).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let file = dir.join("cgroup.subtree_control");
    fs::write(&file, wanted.trim_end()).with_context(|| format!("write {file}"))
}

/// Moves the calling process into the cgroup `path` of every hierarchy.
///
/// # Errors
/// When a hierarchy refuses it.
pub fn join(path: &Utf8Path) -> Result<()> {
    for h in hierarchies()? {
        let file = h.mount_point.join(path).join("cgroup.procs");
        fs::write(&file, "0").with_context(|| format!("write {file}"))?;
    }
    Ok(())
}

/// Ends every process in the cgroup `path` and below, in every hierarchy, by SIGKILL, and waits until they are gone.
///
/// # Errors
/// When some are still there after ten seconds.
pub fn kill(path: &Utf8Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let mut pids = Vec::new();
        for h in hierarchies()? {
            processes(&h.mount_point.join(path), &mut pids);
        }
        if pids.is_empty() {
            return Ok(());
        }
        for pid in &pids {
            // Gone already, or about to be: the next look tells.
            let _ = kill_process(*pid, Signal::KILL);
        }
        ensure!(Instant::now() < deadline, "processes in cgroup {path} survive SIGKILL: {pids:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn processes(dir: &Utf8Path, pids: &mut Vec<Pid>) {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    pids.extend(text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)));
    for entry in dir.read_dir_utf8().into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            processes(entry.path(), pids);
        }
    }
}

/// Removes the cgroup `path` with all its children from every hierarchy; returns those that still hold a process.
#[must_use]
pub fn remove(path: &Utf8Path) -> Vec<Utf8PathBuf> {
    let mut left = Vec::new();
    for h in hierarchies().unwrap_or_default() {
        let dir = h.mount_point.join(path);
        if dir.exists() && !remove_tree(&dir) {
            left.push(dir);
        }
    }
    left
}

fn remove_tree(dir: &Utf8Path) -> bool {
    for entry in dir.read_dir_utf8().into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_tree(entry.path());
        }
    }
    fs::remove_dir(dir).is_ok() || !dir.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_recognised() {
        let text = "26 22 0:21 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n\
                    31 30 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n\
                    32 30 0:27 / /sys/fs/cgroup/systemd rw shared:9 - cgroup cgroup rw,xattr,name=systemd\n\
                    33 30 0:28 / /home rw - ext4 /dev/vda rw\n";
        let found = parse_mountinfo(text);
        let options: Vec<_> =
            found.iter().map(|h| (h.mount_point.as_str(), h.fs_type.as_str(), h.options.as_str())).collect();
        assert_eq!(
            options,
            [
                ("/sys/fs/cgroup", "cgroup2", ""),
                ("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct"),
                ("/sys/fs/cgroup/systemd", "cgroup", "none,name=systemd"),
            ]
        );
    }
}
