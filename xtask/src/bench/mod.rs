//! Figures: measured, compared with a baseline of the same run, written as JSON to `target/bench`.

mod bare;
mod figures;
mod image;
mod startup;
mod steps;

use anyhow::{Context as _, Result};
use clap::Subcommand;
use serde::Serialize;

use crate::workspace;

/// What is measured.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Bench {
    /// From the creation of an ImpVM to its workload, one VM after another, against the bare boot of the same kernel.
    Startup(startup::Options),
    /// From an image in a registry to a root disk, against skopeo, umoci, mke2fs and mkfs.erofs.
    Image(image::Options),
}

/// Runs one benchmark.
///
/// # Errors
/// When it can't be measured.
pub(crate) fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Startup(options) => startup::run(options),
        Bench::Image(options) => image::run(options),
    }
}

/// Writes a report and prints it.
fn report(name: &str, report: &impl Serialize) -> Result<()> {
    let path = workspace::target().join("bench").join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(report).context("write the report")?;
    std::fs::create_dir_all(path.parent().unwrap_or(&path)).with_context(|| format!("make {path}"))?;
    std::fs::write(&path, &text).with_context(|| format!("write {path}"))?;
    println!("{text}");
    eprintln!("written to {path}");
    Ok(())
}
