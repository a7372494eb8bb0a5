//! The wire between agent, runtime and guest: messages, services, and how a connection to a guest begins.
//!
//! | proto | client | server |
//! |---|---|---|
//! | `runtime.proto` service `Runtime` | agent, `imp` | runtime, on a unix socket |
//! | `runtime.proto` service `NodeStreams` | operator | agent, over mutual TLS |
//! | `guest.proto` service `Guest` | runtime | `imp-guest`, over the VM's channel |

pub mod channel;
pub mod unix;

/// Generated from `proto/imp/v1/*.proto`.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::use_self,
    clippy::or_fun_call,
    clippy::semicolon_if_nothing_returned,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("imp.v1");
}
