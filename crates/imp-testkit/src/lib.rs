//! Real parts for tests and the development cluster: control plane, nodes, registry, images.

pub mod boot;
pub mod cgroups;
pub mod cluster;
pub mod controlplane;
pub mod daemon;
pub mod dev;
pub mod files;
pub mod images;
pub mod netns;
pub mod node;
pub mod node_init;
pub mod pki;
pub mod preflight;
pub mod registry;
pub mod relay;
pub mod services;
pub mod tools;
pub mod wait;
pub mod writes;
