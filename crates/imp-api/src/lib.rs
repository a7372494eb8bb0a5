//! The API of imp.dev/v1alpha1: kinds, defaults, rules, names.
//!
//! One file a kind. The doc comments of kinds and fields are what `kubectl explain` shows, and every rule that a schema
//! can say (ranges, formats, CEL) stands at the field it is about, so that the API server refuses what could never work.
//! [`crds()`] turns all of it into the CustomResourceDefinitions that the chart `imp-crds` ships.

#![allow(unreachable_pub, reason = "the KubeSchema derive copies each struct, as written, into a function")]
#![allow(clippy::duplicated_attributes, reason = "two printer columns may well have one type")]

mod clusterimpconfig;
mod clusterimpnodeprofile;
mod common;
mod crds;
mod duration;
pub mod effective;
mod field_path;
mod impnetwork;
mod impvm;
mod impvm_status;
mod impvmclass;
mod impvmmigration;
mod impvmrunnerpool;
mod impvmsnapshot;
mod impvmtemplate;
mod impwarmpool;
pub mod names;
mod not_honoured;
mod patterns;
mod probe;
mod reference;
mod restart_policy;

pub use clusterimpconfig::*;
pub use clusterimpnodeprofile::*;
pub use common::*;
pub use crds::{API_VERSION, GROUP, VERSION, crd_yaml, crds};
pub use duration::{DurationString, InvalidDuration};
pub use effective::{EffectiveVm, InvalidVm, effective};
pub use field_path::FieldPath;
pub use impnetwork::*;
pub use impvm::*;
pub use impvm_status::*;
pub use impvmclass::*;
pub use impvmmigration::*;
pub use impvmrunnerpool::*;
pub use impvmsnapshot::*;
pub use impvmtemplate::*;
pub use impwarmpool::*;
pub use not_honoured::{NotHonoured, not_honoured};
pub use probe::*;
pub use reference::reference;
pub use restart_policy::*;
