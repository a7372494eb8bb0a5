//! Owns the VMs of a node: drivers, journal, adoption, garbage collection.
