//! Places of the checkout and of the caches.

use anyhow::{Context as _, Result};
use camino::{Utf8Path, Utf8PathBuf};

/// The root of the checkout that this program was built from.
pub(crate) fn root() -> Utf8PathBuf {
    let here = Utf8Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Cargo's target directory.
pub(crate) fn target() -> Utf8PathBuf {
    std::env::var("CARGO_TARGET_DIR").map_or_else(|_| root().join("target"), Utf8PathBuf::from)
}

/// This program.
pub(crate) fn self_program() -> Result<Utf8PathBuf> {
    let path = std::env::current_exe().context("find this program")?;
    Utf8PathBuf::from_path_buf(path).ok().context("the path of this program is not UTF-8")
}
