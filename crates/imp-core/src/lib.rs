//! Every decision of Imp as a pure function.

pub mod phase;
pub mod request_queue;
