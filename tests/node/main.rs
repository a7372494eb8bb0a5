//! The runtime with real VMs and no cluster: what a VM does, how it ends, and what survives the runtime's death.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and nobody uses these modules"
)]

mod ends;
mod environment;
mod failures;
mod harness;
mod kill_points;
mod kinds;
mod life;
mod secrets;
mod streams;
mod survival;
