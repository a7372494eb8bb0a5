//! The node's controller: bound ImpVMs to the runtime, status, streams.

fn main() {}
