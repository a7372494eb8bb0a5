//! Whether the caller may: a SubjectAccessReview per call.

use imp_api::names::SUBRESOURCES_GROUP;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};

use super::authn::User;
use super::discovery::VERSION;
use super::error::ApiError;

/// Asks the API server whether `user` may do `verb` on `subresource` of a VM. What changes a VM from within (exec,
/// attach, console) takes `create`, as in Kubernetes since 1.35, though WebSockets begin with a GET: a role that may
/// read everything is not meant to run commands.
///
/// # Errors
/// 403 when not; 503 when nobody can tell.
pub(super) async fn authorize(
    client: &Client,
    user: &User,
    namespace: &str,
    name: &str,
    subresource: &str,
    verb: &str,
) -> Result<(), ApiError> {
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            uid: user.uid.clone(),
            groups: Some(user.groups.clone()),
            extra: Some(user.extra.clone()),
            resource_attributes: Some(ResourceAttributes {
                group: Some(SUBRESOURCES_GROUP.to_owned()),
                version: Some(VERSION.to_owned()),
                resource: Some("impvms".to_owned()),
                subresource: Some(subresource.to_owned()),
                namespace: Some(namespace.to_owned()),
                name: Some(name.to_owned()),
                verb: Some(verb.to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer =
        Api::<SubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await;
    let answer = answer.map_err(|error| {
        ApiError::unavailable(format!("whether {:?} may do this cannot be found out: {error}", user.name))
    })?;
    let status = answer.status.unwrap_or_default();
    if status.allowed && status.denied != Some(true) {
        return Ok(());
    }
    let why = status
        .reason
        .filter(|reason| !reason.is_empty())
        .map(|reason| format!(": {reason}"))
        .unwrap_or_default();
    Err(ApiError::forbidden(format!(
        "impvms.{SUBRESOURCES_GROUP} {name:?} is forbidden: User {:?} cannot {verb} resource \"impvms/{subresource}\" in API group {SUBRESOURCES_GROUP:?} in the namespace {namespace:?}{why}",
        user.name
    )))
}
