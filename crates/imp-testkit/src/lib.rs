//! Real parts for tests and the development cluster: control plane, nodes, registry, images.

pub mod boot;
pub mod cgroups;
pub mod cluster;
pub mod daemon;
pub mod netns;
pub mod node;
pub mod node_init;
pub mod relay;
pub mod services;
