//! Every decision of Imp as a pure function.
