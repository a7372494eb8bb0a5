//! imp, also installed as kubectl-imp.

fn main() {}
