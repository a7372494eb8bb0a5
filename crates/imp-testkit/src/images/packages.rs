//! Images with Debian packages on top of the Debian image, as a Dockerfile's `RUN apt-get install` makes them: one more layer with
//! what was written, and one with whiteouts for what was removed.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use camino::{Utf8Path, Utf8PathBuf};
use serde_json::Value;

use super::debian::run;
use super::{Compression, ImageBuilder, LayerBuilder, Layout};

/// Changes when the same packages would give another image.
pub(super) const RECIPE: &str = "2 apt-get install, gzip";

/// A command in the root that starts no service.
const INSTALL: &str = "set -e; export DEBIAN_FRONTEND=noninteractive
printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d; chmod 755 /usr/sbin/policy-rc.d
apt-get -qq update
apt-get -qq install --no-install-recommends -o Dpkg::Use-Pty=0 \"$@\"
rm -rf /usr/sbin/policy-rc.d /var/cache/apt/archives/*.deb /var/cache/apt/*.bin /var/lib/apt/lists/* /etc/resolv.conf
find /var/log -type f -delete";

/// Writes the layout of `packages` on `base`.
pub(super) fn make(directory: &Utf8Path, base: &Layout, packages: &[&str], config: &Value) -> Result<()> {
    let work = tempfile::Builder::new().prefix("imp-packages-").tempdir().context("make a directory")?;
    let work = Utf8Path::from_path(work.path()).context("the temporary directory's path is not UTF-8")?;
    let (layer, root) = (base.layer_tar()?, work.join("root"));
    std::fs::create_dir(&root).with_context(|| format!("make {root}"))?;
    std::fs::write(work.join("base.tar"), &layer).context("write the base's layer")?;
    tar(&["--xattrs", "--xattrs-include=*", "-C", root.as_str(), "-xpf", work.join("base.tar").as_str()])?;
    let before = names(&root)?;
    std::fs::write(work.join("stamp"), "").context("write the stamp")?;
    std::fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("copy resolv.conf")?;
    let mut install = Command::new("chroot");
    install.arg(&root).args(["sh", "-c", INSTALL, "sh"]).args(packages);
    run(install, "apt-get in a chroot")?;
    let after = names(&root)?;
    let mut find = Command::new("sh");
    // What was changed has a younger change time; that of unchanged files is the extraction's.
    let script = "find . -cnewer ../stamp -print0 | sort -z | tar --null --no-recursion -T - --format=pax \
         --pax-option=delete=atime,delete=ctime --xattrs '--xattrs-include=*' --numeric-owner -cf ../new.tar";
    find.args(["-c", script]).current_dir(&root);
    run(find, "tar of what was installed")?;
    let new = std::fs::read(work.join("new.tar")).context("read the new layer")?;
    let mut image = ImageBuilder::new().config(config.clone()).layer(layer, Compression::Gzip);
    let gone: Vec<&Utf8PathBuf> = before.difference(&after).collect();
    if !gone.is_empty() {
        let mut whiteouts = LayerBuilder::new();
        for path in gone {
            // One for the directory is enough for all below it.
            if path.parent().is_none_or(|parent| after.contains(parent)) {
                let name = format!(".wh.{}", path.file_name().unwrap_or_default());
                whiteouts.whiteout(path.with_file_name(name).as_str());
            }
        }
        image = image.layer(whiteouts.finish(), Compression::Gzip);
    }
    image.layer(new, Compression::Gzip).write(directory, "latest")
}

fn tar(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(arguments);
    run(command, "tar")
}

/// Every path below a root, relative to it.
fn names(root: &Utf8Path) -> Result<BTreeSet<Utf8PathBuf>> {
    let mut names = BTreeSet::from([Utf8PathBuf::new()]);
    let mut todo = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in directory.read_dir_utf8().with_context(|| format!("read {directory}"))? {
            let entry = entry?;
            let path = entry.path();
            names.insert(path.strip_prefix(root).unwrap_or(path).to_owned());
            if entry.file_type()?.is_dir() && !Path::new(path.as_str()).is_symlink() {
                todo.push(path.to_owned());
            }
        }
    }
    Ok(names)
}
