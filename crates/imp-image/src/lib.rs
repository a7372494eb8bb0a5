//! OCI image to immutable root disk.
//!
//! [`ImageStore::ensure`] resolves a reference to a digest, pulls what is missing (once, whoever asks), checks every byte,
//! and lays the layers out as one read-only disk image that all VMs of that digest share. No file of an image is ever
//! created on the host, none is executed, no path of it is resolved there.

mod cancel;
mod config;
pub mod converter;
mod digest;
mod erofs;
mod error;
mod flight;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod healthcheck;
mod layer;
mod limits;
mod local;
mod manifest;
mod registry;
mod source;
mod store;

pub use config::{RuntimeConfig, WorkloadOverrides, runtime_config};
pub use converter::Converter;
pub use error::{ImageError, InvalidImage};
pub use healthcheck::Healthcheck;
pub use limits::Limits;
pub use oci_spec::image::ImageConfiguration;
pub use registry::{RegistryHost, RegistryOptions};
pub use source::ImageSource;
pub use store::{
    Collected, EnsureRequest, ImageStore, Progress, PullPolicy, RootDisk, StoreOptions, StoredImage,
    host_architecture,
};
