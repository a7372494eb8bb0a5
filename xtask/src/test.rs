//! Every check and every suite.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use camino::Utf8PathBuf;
use clap::ValueEnum;
use imp_testkit::{netns, preflight, tools};

use crate::{crds, fuzz, programs, workspace};

/// The version of cargo-deny that the checks are made with.
const CARGO_DENY: &str = "0.20.2";

/// A suite of tests.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Suite {
    /// Tests of each crate.
    Unit,
    /// Parsers of strangers' bytes, by a coverage-guided fuzzer, briefly.
    Fuzz,
    /// The API, against a real API server.
    Api,
    /// The runtime with real VMs, no cluster.
    Node,
    /// All programs under a light cluster.
    E2e,
    /// kubelet, chart, commands as a person uses them.
    Cluster,
}

impl Suite {
    const ALL: [Self; 6] = [Self::Unit, Self::Fuzz, Self::Api, Self::Node, Self::E2e, Self::Cluster];

    fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Fuzz => "fuzz",
            Self::Api => "api",
            Self::Node => "node",
            Self::E2e => "e2e",
            Self::Cluster => "cluster",
        }
    }
}

/// What was run, for the summary.
struct Outcome {
    name: String,
    time: Duration,
    error: Option<String>,
}

/// Runs one suite, or every check and all suites. What fails does not keep the rest from being run.
///
/// # Errors
/// With the names of what failed.
pub(crate) fn run(suite: Option<Suite>) -> Result<()> {
    preflight::root()?;
    preflight::go()?;
    let missing = preflight::missing_packages(&[
        preflight::VM_PACKAGES,
        preflight::CLUSTER_PACKAGES,
        preflight::TEST_PACKAGES,
    ]);
    if !missing.is_empty() {
        eprintln!("installing {}", missing.join(" "));
        preflight::install_packages(&missing)?;
    }
    let mut outcomes = Vec::new();
    let mut step = |name: &str, work: &dyn Fn() -> Result<()>| {
        eprintln!("\n=== {name}");
        let start = Instant::now();
        let error = work().err().map(|e| format!("{e:#}"));
        if let Some(error) = &error {
            eprintln!("{name}: {error}");
        }
        outcomes.push(Outcome { name: name.to_owned(), time: start.elapsed(), error });
    };
    if suite.is_none() {
        step("formatting", &|| cargo(&["fmt", "--all", "--check"]));
        step("clippy", &|| cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]));
        step("documentation", &documentation);
        step("dependencies", &dependencies);
        step("definitions", &crds::check);
    }
    let suites = suite.map_or_else(|| Suite::ALL.to_vec(), |s| vec![s]);
    for suite in suites {
        step(&format!("suite {}", suite.name()), &|| run_suite(suite));
    }
    summary(&outcomes)
}

fn summary(outcomes: &[Outcome]) -> Result<()> {
    eprintln!("\n=== summary");
    for outcome in outcomes {
        let mark = if outcome.error.is_none() { "ok" } else { "FAILED" };
        eprintln!("{:<16} {mark:<7} {:>7.1} s", outcome.name, outcome.time.as_secs_f64());
    }
    let failed: Vec<&str> = outcomes.iter().filter(|o| o.error.is_some()).map(|o| o.name.as_str()).collect();
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed: {}", failed.join(", "))
}

/// Runs cargo with its output on the terminal.
fn cargo(args: &[&str]) -> Result<()> {
    status(programs::cargo().args(args), args)
}

fn status(command: &mut Command, args: &[&str]) -> Result<()> {
    let status = command.status().context("run cargo")?;
    if !status.success() {
        bail!("`cargo {}` failed ({status})", args.join(" "));
    }
    Ok(())
}

fn documentation() -> Result<()> {
    let args = ["doc", "--workspace", "--no-deps", "--document-private-items"];
    status(programs::cargo().args(args).env("RUSTDOCFLAGS", "-D warnings"), &args)
}

/// Licences, sources and doubles of the dependencies. Advisories need the network and change by themselves, so they are no part of
/// a check that must give the same answer twice.
fn dependencies() -> Result<()> {
    let root = tools::cache_dir()?.join(format!("cargo-deny-{CARGO_DENY}"));
    let program = root.join("bin/cargo-deny");
    if !program.exists() {
        let version = format!("={CARGO_DENY}");
        let args = ["install", "cargo-deny", "--locked", "--version", &version, "--root", root.as_str()];
        cargo(&args)?;
    }
    eprintln!(
        "note: advisories are not checked here: `{program} check advisories` does, with network access"
    );
    netns::run(
        Command::new(&program).current_dir(workspace::root()).args(["check", "bans", "licenses", "sources"]),
    )
}

fn run_suite(suite: Suite) -> Result<()> {
    if suite == Suite::Fuzz {
        return fuzz::run(&fuzz::Options::brief());
    }
    let mut command = programs::cargo();
    // The whole workspace for every suite, so that dependencies are built once: with the features that all crates want.
    let args = match suite {
        Suite::Unit => vec!["test", "--no-fail-fast", "--workspace", "--exclude", "imp-tests"],
        _ => vec!["test", "--workspace", "--test", suite.name()],
    };
    command.args(&args);
    tools::ensure_go_tools()?;
    if suite != Suite::Api {
        // VMs, images and light clusters are made of the programs as they are shipped.
        let programs = programs::build()?;
        command.env("IMP_PROGRAMS", programs.path(""));
        command.env("IMP_XTASK", self_copy()?);
    }
    status(&mut command, &args)
}

/// A copy of this program for suites that run it: cargo may replace the original while they do.
fn self_copy() -> Result<Utf8PathBuf> {
    let copy = workspace::target().join("xtask-under-test");
    let new = copy.with_extension("new");
    std::fs::copy(workspace::self_program()?, &new).with_context(|| format!("copy this program to {new}"))?;
    std::fs::rename(&new, &copy).with_context(|| format!("copy this program to {copy}"))?;
    Ok(copy)
}
