//! Which step takes the time: a spinner on a terminal, plain lines elsewhere.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

/// The steps of one command.
#[derive(Debug)]
pub(crate) struct Progress {
    start: Instant,
    terminal: bool,
}

impl Progress {
    /// Starts the clock.
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), terminal: std::io::stderr().is_terminal() }
    }

    /// Runs a step and shows how long it took; a step that fails is shown as such.
    ///
    /// # Errors
    /// The step's own.
    pub(crate) fn step<T>(&self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let shown = self.begin(name);
        let result = work();
        shown.end(result.is_ok());
        result
    }

    /// The same for a step that waits.
    ///
    /// # Errors
    /// The step's own.
    pub(crate) async fn wait<T>(&self, name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let shown = self.begin(name);
        let result = work.await;
        shown.end(result.is_ok());
        result
    }

    /// Seconds since the start.
    pub(crate) fn total(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    fn begin(&self, name: &str) -> Shown {
        let bar = self.terminal.then(|| {
            let bar = ProgressBar::new_spinner().with_message(name.to_owned());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Shown { name: name.to_owned(), start: Instant::now(), bar }
    }
}

struct Shown {
    name: String,
    start: Instant,
    bar: Option<ProgressBar>,
}

impl Shown {
    fn end(self, good: bool) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
        let mark = if good { "✓" } else { "✗" };
        eprintln!("{mark} {:<44} {:>6.1} s", self.name, self.start.elapsed().as_secs_f64());
    }
}
