//! Suite `api`.
