//! Lays images out in a process of its own, which can do nothing else.
//!
//! What reads a stranger's layers (decompressors, tar, the merge) runs where a fault in it is one image's error: as another user, with seccomp and
//! resource limits, with no file open but the layers and the disk, and no way to open one.
//!
//! ```text
//!  store                                    converter (the same program, started anew)
//!    │── Hello: limits, number of layers, + disk ──>│  drops privileges, starts the decompressing thread, closes itself in
//!    │── Next: digests, + layer ───────────────────>│  lays out …
//!    │── Next: digests, + layer ───────────────────>│  … as they come
//!    │── (end of the stream)                        │
//!    │<─────────────────────────────── Outcome ─────│  ends
//! ```
//! Each arrow is one message of JSON on a socket, a file beside it (`SCM_RIGHTS`, unix(7)).

mod child;
mod parent;
mod sandbox;
mod wire;

use crate::cancel::Cancel;
use crate::layer::{self, BuildError, Layer};
use crate::limits::Limits;
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

pub use child::run_if_asked;

/// Where layers are laid out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Converter {
    /// In this process. For tests and tools whose images are their own.
    #[default]
    InProcess,
    /// In a process of its own, for which this program is started anew: its `main` must begin with [`run_if_asked`].
    Process {
        /// The user and group that it becomes, when this process is root's.
        user: u32,
    },
}

impl Converter {
    /// Lays `count` layers out in `disk`, see [`layer::build`].
    pub(crate) fn build(
        &self,
        layers: Receiver<Layer>,
        count: usize,
        disk: &File,
        limits: &Limits,
        cancel: &Arc<Cancel>,
    ) -> Result<u64, BuildError> {
        match self {
            Self::InProcess => layer::build(layers.into_iter(), count, disk, limits, cancel),
            Self::Process { user } => parent::build(*user, layers, count, disk, limits, cancel),
        }
    }
}
