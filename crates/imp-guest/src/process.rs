//! Processes of the workload's root: how they are started, as whom, with what, and what becomes of them.

pub(crate) mod cgroup;
pub(crate) mod environment;
pub(crate) mod launch;
pub(crate) mod reaper;
pub(crate) mod signal;
pub(crate) mod stream;
pub(crate) mod user;
