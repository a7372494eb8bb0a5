//! The node's controller: bound ImpVMs to the runtime, status, streams.
//!
//! | question | answer |
//! |---|---|
//! | what is the runtime told of a VM? | [`spec`] |
//! | when is it told, when is a VM deleted? | [`vms`] |
//! | what does a status say, and when is it written? | [`status`], decided by `imp_core::phase` |

pub mod config;
pub mod context;
pub mod metrics;
pub mod observe;
pub mod operator;
pub mod references;
pub mod runtime;
pub mod secrets;
pub mod spec;
pub mod status;
pub mod vms;
pub mod writer;

/// An error with its causes in one line, leaving out a cause that the message before it already ends with (kube prints
/// its sources itself).
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let message = next.to_string();
        if !text.ends_with(&message) {
            text = format!("{text}: {message}");
        }
        cause = next.source();
    }
    text
}
