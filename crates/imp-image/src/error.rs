//! What can go wrong with an image, told so that a person knows what to do and the runtime knows what it is.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io;
use std::sync::Arc;

/// What went wrong with an image.
///
/// Clonable, because everyone who waits for the same image gets the same answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ImageError {
    /// The store's files failed, for instance because the disk is full. What was begun is undone.
    #[error("{doing}")]
    Io {
        /// What we were doing, with the path.
        doing: String,
        /// Why it failed.
        #[source]
        source: Arc<io::Error>,
    },
    /// What an administrator wrote about registries makes no sense.
    #[error("the configuration of registries cannot be used: {0}")]
    Configuration(String),
    /// The text names no image.
    #[error("image reference \"{input}\": {problem}")]
    InvalidReference {
        /// What was given.
        input: String,
        /// What is wrong with it and how it should look.
        problem: String,
    },
    /// The registry (or directory) has no such image, or none for the architecture.
    #[error("image {image} not found: {detail}")]
    NotFound {
        /// The image.
        image: String,
        /// Who said so.
        detail: String,
    },
    /// [`crate::PullPolicy::Never`], and it is not in the store.
    #[error(
        "image {image} is not on this node and its pull policy is Never; pull it first or choose IfNotPresent"
    )]
    NotCached {
        /// The image.
        image: String,
    },
    /// The registry refused our credentials, or wants some. Trying again without other credentials does not help.
    #[error("registry {registry} refused to hand out image {image}: {detail}")]
    Unauthorized {
        /// The registry's host.
        registry: String,
        /// The image.
        image: String,
        /// Which credentials were tried, never what is in them, and the answer.
        detail: String,
    },
    /// It is no image, one that we do not support, a hostile one, or larger than a limit.
    #[error("image {image} cannot be used")]
    Invalid {
        /// The image.
        image: String,
        /// What is wrong with it.
        #[source]
        source: InvalidImage,
    },
    /// Something passing: the network, the registry. Trying again may help.
    #[error("could not fetch image {image}: {detail}")]
    Failed {
        /// The image.
        image: String,
        /// What failed, with the address.
        detail: String,
    },
    /// The caller gave up.
    #[error("the work on image {image} was cancelled")]
    Cancelled {
        /// The image.
        image: String,
    },
}

impl ImageError {
    /// Whether the same request may succeed later though nobody changed anything: network, registry or disk trouble.
    #[must_use]
    pub const fn retryable(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Io { .. } | Self::Cancelled { .. })
    }

    /// Whether somebody else with other credentials or another registry might not have had this.
    pub(crate) const fn depends_on_who_asks(&self) -> bool {
        matches!(
            self,
            Self::Unauthorized { .. } | Self::NotFound { .. } | Self::Failed { .. } | Self::Cancelled { .. }
        )
    }

    /// Adds what was tried before somebody else was asked.
    pub(crate) fn after(mut self, earlier: &[String]) -> Self {
        if let Self::NotFound { detail, .. } | Self::Unauthorized { detail, .. } | Self::Failed { detail, .. } =
            &mut self
            && !earlier.is_empty()
        {
            *detail = format!("{detail}; before that, {}", earlier.join("; "));
        }
        self
    }

    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source: Arc::new(source) }
    }

    pub(crate) fn invalid(image: impl Into<String>, source: InvalidImage) -> Self {
        Self::Invalid { image: image.into(), source }
    }
}

/// Why an image cannot be used, whoever serves it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum InvalidImage {
    /// A document of it (manifest, index, configuration) is not what the OCI specification says.
    #[error("{document}: {problem}")]
    Document {
        /// Which document.
        document: String,
        /// What is wrong.
        problem: String,
    },
    /// A kind of image that Imp does not run.
    #[error("{0}")]
    Unsupported(String),
    /// What came is not what was promised.
    #[error("{what} does not match: expected {expected}, got {actual}")]
    Mismatch {
        /// The digest or size of what.
        what: String,
        /// As promised.
        expected: String,
        /// As it came.
        actual: String,
    },
    /// A layer as a whole is damaged.
    #[error("{layer}: {problem}")]
    Layer {
        /// Position and digest of the layer.
        layer: String,
        /// What is wrong.
        problem: String,
    },
    /// One entry of a layer cannot be laid out.
    #[error("{layer}: entry \"{entry}\": {problem}")]
    Entry {
        /// Position and digest of the layer.
        layer: String,
        /// Name of the entry, as it stands in the layer; bytes that are no UTF-8 are shown as U+FFFD.
        entry: String,
        /// What is wrong.
        problem: String,
    },
    /// Larger than we allow.
    #[error("{at}: more than {limit} {what}")]
    Limit {
        /// Where: document, layer or entry.
        at: String,
        /// The limit that was hit.
        limit: u64,
        /// Unit and thing that is limited.
        what: Cow<'static, str>,
    },
}

impl InvalidImage {
    pub(crate) fn document(document: impl Into<String>, problem: impl ToString) -> Self {
        Self::Document { document: document.into(), problem: problem.to_string() }
    }
}
