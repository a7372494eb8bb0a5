//! Files that must not be found half written or by others.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, Result};
use camino::Utf8Path;

/// Writes a file that only its owner may read.
///
/// # Errors
/// When it can't be written.
pub fn write_private(path: &Utf8Path, text: &str) -> Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("open {path}"))?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {path}"))
}

/// Writes a file under another name first, so that nobody finds half of it.
///
/// # Errors
/// When it can't be written.
pub fn write_whole(path: &Utf8Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, bytes).with_context(|| format!("write {new}"))?;
    std::fs::rename(&new, path).with_context(|| format!("rename {new} to {path}"))
}
