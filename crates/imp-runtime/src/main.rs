//! The runtime daemon of a node.

fn main() {}
