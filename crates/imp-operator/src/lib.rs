//! The operator: binding, lifecycle and the aggregated API.

pub mod subresources;
