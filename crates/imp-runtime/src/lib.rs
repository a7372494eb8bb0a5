//! Owns the VMs of a node: drivers, journal, adoption, garbage collection.
//!
//! | task | reads | writes |
//! |---|---|---|
//! | one driver for each VM ([`driver`](self)) | wishes and secrets, the guest, the VMM | the VM's record and status, its log |
//! | the server | requests | wishes |
//! | a watcher for each client | statuses | events |
//!
//! VMMs are no tasks of ours: they outlive this process, and [`Engine::start`] takes them up again.

mod config;
mod console;
mod driver;
mod engine;
pub mod http;
mod hub;
mod journal;
mod logs;
mod node_info;
pub mod server;
mod service;
mod shared;
mod vm;

pub use config::Config;
pub use engine::{Engine, PutError, StartError};
pub use journal::Unreadable;
pub use service::RuntimeService;
