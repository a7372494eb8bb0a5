//! The person's terminal: raw mode, size, and what the window and signals say.

use rustix::termios::{self, OptionalActions, Termios};
use std::io::IsTerminal as _;

/// Puts standard input into raw mode until dropped.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Raw mode for standard input.
    ///
    /// # Errors
    /// When standard input is no terminal.
    pub(crate) fn enter() -> anyhow::Result<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            anyhow::bail!("the input device is not a terminal: leave out -t, or run from a terminal");
        }
        let before = termios::tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // Nothing better can be done when the terminal is gone.
        let _ = termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Width and height in character cells; `None` when standard output is no terminal.
pub(crate) fn size() -> Option<(u32, u32)> {
    let size = termios::tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((u32::from(size.ws_col), u32::from(size.ws_row)))
}
