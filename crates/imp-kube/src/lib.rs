//! The small kit over kube-rs that operator and agent share.
