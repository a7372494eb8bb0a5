//! Exit codes: the workload's own, or those that `docker run` uses for our own failures.

use std::process::ExitCode;

/// Something of Imp's failed before or around the workload.
pub(crate) const IMP_FAILED: u8 = 125;
/// The workload's program does not exist.
pub(crate) const NOT_FOUND: u8 = 127;

/// Prints an error with its causes and turns the result into the process's exit code.
pub(crate) fn report(result: anyhow::Result<u8>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("imp: {}", chain(&error));
            ExitCode::from(IMP_FAILED)
        }
    }
}

/// The error and its causes in one line, leaving out a cause that the message before it already ends with (some
/// libraries print their source themselves).
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// A workload's exit status as a process's exit code.
pub(crate) fn code(status: &imp_proto::v1::ExitStatus) -> u8 {
    if status.signal != 0 {
        return u8::try_from(128 + status.signal).unwrap_or(IMP_FAILED);
    }
    u8::try_from(status.code).unwrap_or(IMP_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;
    use imp_proto::v1::ExitStatus;

    #[test]
    fn fr60_a_signal_is_reported_as_shells_do() {
        let segfault = ExitStatus { code: 0, signal: 11, ..Default::default() };
        assert_eq!(code(&segfault), 139);
        assert_eq!(code(&ExitStatus { code: 42, ..Default::default() }), 42);
    }

    #[test]
    fn a_cause_that_was_printed_is_not_printed_again() {
        let error = Err::<(), _>(anyhow::anyhow!("boom")).context("events stream: boom").unwrap_err();
        assert_eq!(chain(&error), "events stream: boom");
    }
}
