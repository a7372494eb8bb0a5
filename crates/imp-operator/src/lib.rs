//! The operator: binding, lifecycle and the aggregated API.

pub mod ca;
pub mod certificates;
pub mod client;
pub mod metrics;
pub mod node_api;
pub mod publish;
pub mod runtime;
pub mod subresources;
pub mod vm_controller;
