//! The kinds of imp.dev/v1alpha1 in a real API server: what is admitted and what is refused, defaults, columns, selectors,
//! ownership of fields, scaling, and what kubectl makes of it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod admission;
mod columns;
mod control_plane;
mod environment;
mod kubectl;
mod names;
mod ownership;
mod rights;
mod scale;
mod selectors;
mod updates;
