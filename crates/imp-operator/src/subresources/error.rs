//! Refusals, as Kubernetes' Status objects.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;

/// A call that was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub code: StatusCode,
    /// Kubernetes' reason.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

impl ApiError {
    fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    /// Nobody vouches for the caller.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", message)
    }

    /// The caller may not.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    /// No such object.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    /// The request makes no sense.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    /// The VM is in no state for it.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "Conflict", message)
    }

    /// Somebody on the way does not answer.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message)
    }

    /// A fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message)
    }

    /// What agent or runtime answered, in Kubernetes' terms.
    #[must_use]
    pub fn from_node(status: &tonic::Status) -> Self {
        let message = status.message();
        // A status with a source is of the connection: e.g. the agent did not like our certificate.
        if std::error::Error::source(status).is_some() {
            return Self::unavailable(format!(
                "the connection to the agent of the VM's node broke: {message}"
            ));
        }
        match status.code() {
            tonic::Code::NotFound => Self::not_found(message),
            tonic::Code::FailedPrecondition => Self::conflict(message),
            tonic::Code::InvalidArgument => Self::bad_request(message),
            tonic::Code::Unavailable | tonic::Code::DeadlineExceeded => {
                Self::unavailable(format!("the VM's node does not answer: {message}"))
            }
            _ => Self::internal(format!("the VM's node refused: {message}")),
        }
    }

    /// The Status object.
    #[must_use]
    pub fn status(&self) -> Status {
        Status {
            status: Some("Failure".to_owned()),
            reason: Some(self.reason.to_owned()),
            message: Some(self.message.clone()),
            code: Some(self.code.as_u16().into()),
            ..Status::default()
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.code, Json(self.status())).into_response()
    }
}
