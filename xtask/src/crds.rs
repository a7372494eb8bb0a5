//! CustomResourceDefinitions of the chart and the reference in `docs`, made from `imp-api`.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;

use crate::workspace;

fn directory() -> Utf8PathBuf {
    workspace::root().join("charts/imp-crds/templates")
}

fn reference() -> Utf8PathBuf {
    workspace::root().join("docs/api.md")
}

/// Writes them.
///
/// # Errors
/// When a file can't be written.
pub(crate) fn write() -> Result<()> {
    let dir = directory();
    fs::create_dir_all(&dir).with_context(|| format!("make {dir}"))?;
    let wanted = wanted()?;
    for (name, text) in &wanted {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("write {path}"))?;
    }
    for name in present()?.into_keys().filter(|n| !wanted.contains_key(n)) {
        let path = dir.join(name);
        fs::remove_file(&path).with_context(|| format!("remove {path}"))?;
    }
    let reference = reference();
    fs::write(&reference, imp_api::reference(&imp_api::crds()))
        .with_context(|| format!("write {reference}"))?;
    println!("{} definitions in {dir}, and {reference}", wanted.len());
    Ok(())
}

/// Fails when what stands in the tree differs.
///
/// # Errors
/// With the files that differ.
pub(crate) fn check() -> Result<()> {
    let (wanted, present) = (wanted()?, present()?);
    let mut names: Vec<&String> = wanted.keys().chain(present.keys()).collect();
    names.sort();
    names.dedup();
    names.retain(|n| wanted.get(*n) != present.get(*n));
    let reference = reference();
    if fs::read_to_string(&reference).ok() != Some(imp_api::reference(&imp_api::crds())) {
        bail!("{reference} is not what crates/imp-api says: run `cargo xtask crds` and commit");
    }
    if names.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = names.into_iter().map(String::as_str).collect();
    bail!(
        "{} in charts/imp-crds/templates is not what crates/imp-api says: run `cargo xtask crds` and commit",
        names.join(", ")
    )
}

fn wanted() -> Result<BTreeMap<String, String>> {
    Ok(imp_api::crd_yaml().context("write the definitions as YAML")?.into_iter().collect())
}

fn present() -> Result<BTreeMap<String, String>> {
    let dir = directory();
    let mut found = BTreeMap::new();
    for entry in dir.read_dir_utf8().with_context(|| format!("read {dir}"))? {
        let entry = entry.with_context(|| format!("read {dir}"))?;
        let text = fs::read_to_string(entry.path()).with_context(|| format!("read {}", entry.path()))?;
        found.insert(entry.file_name().to_owned(), text);
    }
    Ok(found)
}
