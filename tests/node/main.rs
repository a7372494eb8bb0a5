//! Suite `node`.
