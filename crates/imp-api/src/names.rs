//! Names on the wire.
