//! Who calls the node API: an agent, by a token that the API server bound to a pod and so to that pod's node.

use http::{HeaderMap, header};
use imp_api::names;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;

use crate::subresources::error::ApiError;

/// Tokens that are reviewed at the same time: anybody in the cluster can send us some.
const REVIEWS: usize = 16;

/// Asks the API server about tokens.
pub(super) struct Reviewer {
    api: Api<TokenReview>,
    /// What agents are called.
    agent: String,
    turns: Semaphore,
}

impl Reviewer {
    /// For agents of ServiceAccount `imp-agent` in `namespace`.
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self {
            api: Api::all(client),
            agent: format!("system:serviceaccount:{namespace}:{}", names::AGENT_NAME),
            turns: Semaphore::new(REVIEWS),
        }
    }

    /// Name of the node whose agent calls.
    ///
    /// # Errors
    /// 401 when the token is missing or no valid one, 403 when it is not an agent's or not bound to a node.
    pub(super) async fn node(&self, headers: &HeaderMap) -> Result<String, ApiError> {
        let token = bearer(headers)
            .ok_or_else(|| ApiError::unauthorized("no bearer token: this API is for imp-agent"))?;
        let review = TokenReview {
            spec: TokenReviewSpec { token: Some(token.to_owned()), audiences: None },
            ..TokenReview::default()
        };
        let _turn = self.turns.acquire().await.map_err(|_| ApiError::internal("the operator is ending"))?;
        let answer = self
            .api
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| ApiError::unavailable(format!("the token cannot be reviewed: {error}")))?;
        let status = answer.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Err(ApiError::unauthorized("the API server does not know this token, or it has expired"));
        }
        node_of(&status.user.unwrap_or_default(), &self.agent)
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// The node that the token of `user` is bound to, if it is an agent's.
fn node_of(user: &UserInfo, agent: &str) -> Result<String, ApiError> {
    let name = user.username.as_deref().unwrap_or_default();
    if name != agent {
        return Err(ApiError::forbidden(format!("{name:?} may not use the node API; {agent} may")));
    }
    let nodes = user.extra.as_ref().and_then(|extra| extra.get(names::NODE_NAME_CLAIM));
    match nodes.map(Vec::as_slice) {
        Some([node]) if !node.is_empty() => Ok(node.clone()),
        _ => Err(ApiError::forbidden(format!(
            "the agent's token does not say its node ({}): it must be bound to a pod that runs on one",
            names::NODE_NAME_CLAIM
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const AGENT: &str = "system:serviceaccount:imp-system:imp-agent";

    fn user(name: &str, nodes: Option<&[&str]>) -> UserInfo {
        let nodes = nodes.map(|nodes| nodes.iter().map(|node| (*node).to_owned()).collect());
        UserInfo {
            username: Some(name.to_owned()),
            extra: nodes.map(|nodes| BTreeMap::from([(names::NODE_NAME_CLAIM.to_owned(), nodes)])),
            ..UserInfo::default()
        }
    }

    #[test]
    fn only_an_agent_with_one_node_is_one() {
        assert_eq!(node_of(&user(AGENT, Some(&["n1"])), AGENT).unwrap(), "n1");
        for refused in [
            user("system:serviceaccount:default:imp-agent", Some(&["n1"])),
            user("", Some(&["n1"])),
            user(AGENT, None),
            user(AGENT, Some(&[])),
            user(AGENT, Some(&[""])),
            user(AGENT, Some(&["n1", "n2"])),
        ] {
            assert_eq!(
                node_of(&refused, AGENT).unwrap_err().code,
                http::StatusCode::FORBIDDEN,
                "{refused:?}"
            );
        }
    }

    #[test]
    fn bearer_tokens_are_read() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(with("Bearer abc").as_deref(), Some("abc"));
        assert_eq!(with("bearer abc").as_deref(), Some("abc"));
        assert_eq!((with("Basic abc"), with("Bearer "), with("abc")), (None, None, None));
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
