//! Every decision of Imp as a pure function.

pub mod env;
pub mod expiry;
pub mod ipam;
pub mod nodeloss;
pub mod phase;
pub mod placement;
pub mod quantity;
pub mod request_queue;
pub mod restart;
