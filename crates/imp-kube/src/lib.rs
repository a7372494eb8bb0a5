//! The small kit over kube-rs that operator and agent share.

pub mod lease;
pub mod server;
pub mod shutdown;
pub mod telemetry;
