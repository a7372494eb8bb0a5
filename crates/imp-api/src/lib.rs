//! The API of imp.dev/v1alpha1: kinds, defaults, rules, names.
