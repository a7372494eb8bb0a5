//! Real parts for tests and the development cluster: control plane, nodes, registry, images.
