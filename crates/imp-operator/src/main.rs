//! The operator: binding, lifecycle and the aggregated API.

fn main() {}
