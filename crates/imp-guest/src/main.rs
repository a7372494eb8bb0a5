//! PID 1 of the guest: init, workload supervisor, agent.

fn main() {}
