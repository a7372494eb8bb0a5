//! Suite `e2e`.
