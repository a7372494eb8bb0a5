//! Suite `cluster`.
