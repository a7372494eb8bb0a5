//! Why an attempt failed, in the words and the reasons of the API.

use imp_image::ImageError;
use imp_proto::v1::{Failure, FailureReason};
use std::{error::Error, fmt, io};

/// Most bytes of a message: it becomes a condition's, which people read.
const MAX_MESSAGE: usize = 2048;

/// A reason and a message.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    pub(super) reason: FailureReason,
    pub(super) message: String,
    /// What a shell would exit with, where the workload's program could not be run.
    pub(super) exit_code: i32,
}

impl Fault {
    pub(super) fn new(reason: FailureReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), exit_code: 0 }
    }

    /// With the causes of `error` in one line, each once.
    pub(super) fn of(reason: FailureReason, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(inner) = cause {
            let text = inner.to_string();
            if !message.ends_with(&text) {
                message = format!("{message}: {text}");
            }
            cause = inner.source();
        }
        Self::new(reason, message)
    }

    /// The attempt is over.
    pub(super) fn last(&self) -> Failure {
        self.tell(false)
    }

    /// It is tried again.
    pub(super) fn retrying(&self) -> Failure {
        self.tell(true)
    }

    fn tell(&self, retrying: bool) -> Failure {
        let mut message = self.message.clone();
        if message.len() > MAX_MESSAGE {
            let end = (0..=MAX_MESSAGE).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
            message.truncate(end);
            message.push('…');
        }
        Failure { reason: self.reason.into(), message, retrying, exit_code: self.exit_code }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason.as_str_name().trim_start_matches("FAILURE_REASON_"), self.message)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::new(FailureReason::DiskFailed, format!("cannot write the VM's record: {error}"))
    }
}

/// The reason for an image's error, and whether asking again later makes sense (another push, another secret, the network).
pub(super) fn image(error: &ImageError) -> (Fault, bool) {
    let (reason, again) = match error {
        ImageError::NotFound { .. } => (FailureReason::ImageNotFound, true),
        ImageError::NotCached { .. } => (FailureReason::ImageNotFound, false),
        ImageError::Unauthorized { .. } => (FailureReason::ImagePullUnauthorized, true),
        ImageError::InvalidReference { .. } | ImageError::Invalid { .. } => {
            (FailureReason::ImageInvalid, false)
        }
        _ => (FailureReason::ImagePullFailed, true),
    };
    (Fault::of(reason, error), again)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let fault = Fault::new(FailureReason::Internal, "ä".repeat(2000));
        let told = fault.last().message;
        assert!(told.len() <= MAX_MESSAGE + 4 && told.ends_with('…'));
    }

    #[test]
    fn fr15_a_refusal_is_tried_again_and_nonsense_is_not() {
        let refused =
            ImageError::Unauthorized { registry: "r".into(), image: "i".into(), detail: "401".into() };
        assert!(matches!(image(&refused), (f, true) if f.reason == FailureReason::ImagePullUnauthorized));
        let nonsense = ImageError::InvalidReference { input: "a b".into(), problem: "a space".into() };
        assert!(matches!(image(&nonsense), (f, false) if f.reason == FailureReason::ImageInvalid));
    }
}
