//! The operator: binding, lifecycle and the aggregated API.

pub mod metrics;
pub mod subresources;
