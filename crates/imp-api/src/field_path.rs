//! Paths of `env[].valueFrom.fieldRef`: those of a Pod's downward API that make sense for a VM.

/// A field of the ImpVM that a variable may take its value from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldPath {
    /// `metadata.name`.
    Name,
    /// `metadata.namespace`.
    Namespace,
    /// `metadata.uid`.
    Uid,
    /// `metadata.labels['<key>']`.
    Label(String),
    /// `metadata.annotations['<key>']`.
    Annotation(String),
    /// `spec.nodeName`: the node that the VM is bound to.
    NodeName,
    /// `status.podIP`, or `status.ip`: the VM's address.
    Ip,
}

impl FieldPath {
    /// The field spelled `path`, if it is one of those.
    #[must_use]
    pub fn parse(path: &str) -> Option<Self> {
        Some(match path {
            "metadata.name" => Self::Name,
            "metadata.namespace" => Self::Namespace,
            "metadata.uid" => Self::Uid,
            "spec.nodeName" => Self::NodeName,
            "status.podIP" | "status.ip" => Self::Ip,
            _ => {
                // As `SplitMaybeSubscriptedPath` of k8s.io/kubernetes/pkg/fieldpath: nothing is escaped.
                let (map, key) = path.strip_suffix("']")?.split_once("['")?;
                match map {
                    "metadata.labels" => Self::Label(key.to_owned()),
                    "metadata.annotations" => Self::Annotation(key.to_owned()),
                    _ => return None,
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_paths_are_read_and_others_are_not() {
        assert_eq!(FieldPath::parse("metadata.name"), Some(FieldPath::Name));
        assert_eq!(FieldPath::parse("status.podIP"), FieldPath::parse("status.ip"));
        assert_eq!(FieldPath::parse("metadata.labels['a.b/c']"), Some(FieldPath::Label("a.b/c".to_owned())));
        assert_eq!(
            FieldPath::parse("metadata.annotations['x']"),
            Some(FieldPath::Annotation("x".to_owned()))
        );
        for path in ["", "metadata.labels", "metadata.labels[x]", "status.hostIP", "spec['x']", "metadata"] {
            assert_eq!(FieldPath::parse(path), None, "{path}");
        }
    }
}
