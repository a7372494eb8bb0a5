//! Names of images: registry references as Docker reads them, and the local transports of containers-transports(5).

use crate::error::ImageError;
use camino::Utf8PathBuf;
use oci_spec::distribution::{ParseError, Reference};
use std::fmt;
use std::str::FromStr;

/// Where an image comes from (containers-transports(5)).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ImageSource {
    /// A registry reference, normalised as Docker does (`busybox` → `docker.io/library/busybox:latest`).
    Registry(String),
    /// `oci:DIR[:TAG]`.
    OciLayout(Utf8PathBuf, Option<String>),
    /// `oci-archive:FILE[:TAG]`.
    OciArchive(Utf8PathBuf, Option<String>),
    /// `docker-archive:FILE[:TAG]`, as `docker save` writes it.
    DockerArchive(Utf8PathBuf, Option<String>),
}

impl ImageSource {
    /// Whether it names one exact image for ever (`name@sha256:…`).
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        matches!(self, Self::Registry(reference) if reference.contains('@'))
    }

    /// Kubernetes' rule for a Pod without imagePullPolicy: Always for `:latest` (also implied), else IfNotPresent.
    #[must_use]
    pub fn default_pull_policy(&self) -> crate::PullPolicy {
        match self {
            Self::Registry(reference) if reference.ends_with(":latest") => crate::PullPolicy::Always,
            _ => crate::PullPolicy::IfNotPresent,
        }
    }
}

impl FromStr for ImageSource {
    type Err = ImageError;

    fn from_str(input: &str) -> Result<Self, ImageError> {
        let refuse = |problem: String| Err(ImageError::InvalidReference { input: input.to_owned(), problem });
        for (transport, make) in [
            ("oci:", Self::OciLayout as fn(Utf8PathBuf, Option<String>) -> Self),
            ("oci-archive:", Self::OciArchive),
            ("docker-archive:", Self::DockerArchive),
        ] {
            let Some(rest) = input.strip_prefix(transport) else { continue };
            let (path, tag) = match rest.split_once(':') {
                Some((path, tag)) => (path, Some(tag.to_owned())),
                None => (rest, None),
            };
            if path.is_empty() || tag.as_ref().is_some_and(String::is_empty) {
                return refuse(format!("expected {transport}PATH or {transport}PATH:TAG"));
            }
            return Ok(make(path.into(), tag));
        }
        let reference = input.strip_prefix("docker://").unwrap_or(input);
        if reference.trim() != reference || reference.is_empty() {
            return refuse("it is empty or has spaces around it; expected for instance \"debian:12\"".into());
        }
        if reference.contains("://") {
            return refuse("expected [HOST[:PORT]/]NAME[:TAG][@DIGEST] without a scheme".into());
        }
        match reference.parse::<Reference>() {
            Ok(parsed) => {
                if let Some(digest) = parsed.digest()
                    && let Err(problem) = digest.parse::<crate::digest::Digest>()
                {
                    return refuse(problem);
                }
                // With a capital in what is not taken for a host after all, it would not be read again.
                if parsed.repository().chars().any(char::is_uppercase) {
                    return refuse("the repository's name must be in lower case".into());
                }
                Ok(Self::Registry(parsed.whole()))
            }
            Err(error) => refuse(explain(reference, &error)),
        }
    }
}

fn explain(reference: &str, error: &ParseError) -> String {
    let name = reference.split_once('@').map_or(reference, |(name, _)| name);
    let path = name.split_once('/').map_or(name, |(_, path)| path);
    if path.chars().any(char::is_uppercase) {
        return "the repository's name must be in lower case".into();
    }
    match error {
        ParseError::ReferenceInvalidFormat => {
            "expected [HOST[:PORT]/]NAME[:TAG][@DIGEST], for instance \"debian:12\" or \"registry.example.com/team/app:v1\"".into()
        }
        other => other.to_string(),
    }
}

impl fmt::Display for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (transport, path, tag) = match self {
            Self::Registry(reference) => return f.write_str(reference),
            Self::OciLayout(path, tag) => ("oci", path, tag),
            Self::OciArchive(path, tag) => ("oci-archive", path, tag),
            Self::DockerArchive(path, tag) => ("docker-archive", path, tag),
        };
        write!(f, "{transport}:{path}")?;
        tag.as_ref().map_or(Ok(()), |tag| write!(f, ":{tag}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_normalised_as_docker_does() {
        for (input, normal) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("index.docker.io/library/busybox", "docker.io/library/busybox:latest"),
            ("docker://team/app", "docker.io/team/app:latest"),
            ("localhost/app", "localhost/app:latest"),
            ("localhost:5000/app:v1", "localhost:5000/app:v1"),
            ("127.0.0.1:5000/a/b/c", "127.0.0.1:5000/a/b/c:latest"),
            ("registry.example.com/app", "registry.example.com/app:latest"),
            ("oci:/a/b", "oci:/a/b"),
            ("oci:/a/b:v1", "oci:/a/b:v1"),
            ("oci-archive:x.tar:latest", "oci-archive:x.tar:latest"),
            ("docker-archive:x.tar:app:v1", "docker-archive:x.tar:app:v1"),
        ] {
            let source: ImageSource = input.parse().expect(input);
            assert_eq!(source.to_string(), normal, "{input}");
            assert_eq!(normal.parse::<ImageSource>().expect(normal), source, "{input} again");
        }
        let pinned = format!("docker.io/library/busybox@sha256:{}", "0".repeat(64));
        assert!(pinned.parse::<ImageSource>().expect("pinned").is_pinned());
    }

    #[test]
    fn bad_references_are_refused_with_advice() {
        let sha512 = format!("a@sha512:{}", "0".repeat(128));
        for (input, word) in [
            ("", "empty"),
            (" busybox", "spaces"),
            ("Busybox", "lower case"),
            ("registry.example.com/Team/app", "lower case"),
            ("myHost/a/b:t", "lower case"),
            ("https://registry.example.com/app", "scheme"),
            ("a b", "expected"),
            ("a:", "expected"),
            ("a@sha256:123", "expected"),
            (&sha512, "sha256"),
            ("oci:", "oci:PATH"),
            ("docker-archive:x:", "PATH:TAG"),
        ] {
            let error = input.parse::<ImageSource>().expect_err(input).to_string();
            assert!(error.contains(word), "{input}: {error}");
            assert!(error.contains(&format!("\"{input}\"")), "{error}");
        }
    }

    #[test]
    fn pull_policy_defaults_as_kubernetes() {
        use crate::PullPolicy;
        for (input, policy) in [
            ("busybox", PullPolicy::Always),
            ("busybox:latest", PullPolicy::Always),
            ("busybox:1", PullPolicy::IfNotPresent),
            ("oci:/a", PullPolicy::IfNotPresent),
        ] {
            assert_eq!(input.parse::<ImageSource>().expect(input).default_pull_policy(), policy, "{input}");
        }
    }
}
