//! Every decision of Imp as a pure function.

pub mod phase;
