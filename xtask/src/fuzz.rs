//! `cargo xtask fuzz`: coverage-guided fuzzing of what reads strangers' bytes, on the stable toolchain.
//!
//! The instrumentation is what `cargo fuzz --sanitizer=none` asks rustc for; safe Rust needs no address sanitizer, which only nightly has.

use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use camino::Utf8PathBuf;
use clap::Args;

use crate::{programs, workspace};

/// As cargo-fuzz sets them.
const RUSTFLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";
/// So that the flags are for the program and not for build scripts.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Memory of the fuzzer in MiB; one input may cost far less.
const MEMORY_MIB: u32 = 1024;
/// Longest that one input may take, in seconds.
const TIMEOUT: u32 = 10;

/// What to fuzz, and for how long.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Only this target; all one after another otherwise.
    #[arg(long)]
    target: Option<String>,
    /// Seconds for each target.
    #[arg(long, default_value_t = 600)]
    seconds: u32,
}

impl Options {
    /// As long as CI can afford.
    pub(crate) fn brief() -> Self {
        Self { target: None, seconds: 15 }
    }
}

/// Builds the fuzzer and runs it. The corpus in the tree is read; what is found beyond is kept in `target/fuzz`.
///
/// # Errors
/// When it can't be built, or an input breaks something: the error says where the input is.
pub(crate) fn run(options: &Options) -> Result<()> {
    let corpora = workspace::root().join("fuzz/corpus");
    let mut targets = Vec::new();
    for entry in corpora.read_dir_utf8().with_context(|| format!("read {corpora}"))? {
        targets.push(entry?.file_name().to_owned());
    }
    targets.sort();
    if let Some(wanted) = &options.target {
        ensure!(targets.contains(wanted), "there is no target {wanted:?}; there are: {}", targets.join(", "));
        targets.retain(|target| target == wanted);
    }
    let program = build()?;
    let mut broken = Vec::new();
    for target in targets {
        eprintln!("fuzzing {target} for {} s", options.seconds);
        if let Err(error) = fuzz(&program, &target, options.seconds) {
            eprintln!("{error:#}");
            broken.push(target);
        }
    }
    if broken.is_empty() { Ok(()) } else { bail!("broken by an input: {}", broken.join(", ")) }
}

fn build() -> Result<Utf8PathBuf> {
    let root = workspace::root().join("fuzz");
    let target_dir = workspace::target().join("fuzz-build");
    let mut command = programs::cargo();
    command
        .args(["build", "--release", "--locked", "--target", TARGET, "--target-dir", target_dir.as_str()])
        .current_dir(root)
        .env("RUSTFLAGS", RUSTFLAGS);
    if !command.status().context("run cargo")?.success() {
        bail!(
            "the fuzzer can't be built; the compiler's messages are above (it needs a C++ compiler: package g++)"
        );
    }
    Ok(target_dir.join(TARGET).join("release/image"))
}

fn fuzz(program: &Utf8PathBuf, target: &str, seconds: u32) -> Result<()> {
    let place = workspace::target().join("fuzz").join(target);
    let (found, artifacts) = (place.join("corpus"), place.join("artifacts"));
    for directory in [&found, &artifacts] {
        std::fs::create_dir_all(directory).with_context(|| format!("make {directory}"))?;
    }
    let status = Command::new(program)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-timeout={TIMEOUT}"))
        .arg(format!("-artifact_prefix={artifacts}/"))
        .args(["-max_len=65536", "-print_final_stats=1", "-verbosity=0"])
        .args([&found, &workspace::root().join("fuzz/corpus").join(target)])
        .env("IMP_FUZZ_TARGET", target)
        .status()
        .with_context(|| format!("run {program}"))?;
    if status.success() {
        return Ok(());
    }
    bail!(
        "target {target} ended with {status}; the input is in {artifacts}. Run it alone: IMP_FUZZ_TARGET={target} {program} FILE; \
         when it is mended, keep it in fuzz/corpus/{target}"
    )
}
