//! What was written to an API server, from its own metrics.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use kube::Client;

/// Requests that are POSTs and store nothing: questions with an answer.
const QUESTIONS: &[&str] = &[
    "tokenreviews",
    "subjectaccessreviews",
    "selfsubjectaccessreviews",
    "selfsubjectreviews",
    "serviceaccounts/token",
];
/// Written by every program that shows that it is alive.
const LEASES: &str = "leases";

/// Successful writes so far, by resource (`impvms`, `impvms/status`). Leases and what is not stored are left out.
///
/// # Errors
/// When the metrics can't be read.
pub async fn count(client: &Client) -> Result<BTreeMap<String, u64>> {
    let request = http::Request::get("/metrics").body(Vec::new()).context("make the request")?;
    let text = client.request_text(request).await.context("read the API server's metrics")?;
    Ok(parse(&text))
}

fn parse(text: &str) -> BTreeMap<String, u64> {
    let mut writes = BTreeMap::new();
    for line in text.lines() {
        let Some((labels, value)) =
            line.strip_prefix("apiserver_request_total{").and_then(|l| l.split_once("} "))
        else {
            continue;
        };
        let label = |name: &str| {
            let start = labels.find(&format!("{name}=\""))? + name.len() + 2;
            labels[start..].split('"').next()
        };
        let writes_something =
            matches!(label("verb"), Some("POST" | "PUT" | "PATCH" | "APPLY" | "DELETE" | "DELETECOLLECTION"));
        let succeeded = label("code").is_some_and(|code| code.starts_with('2'));
        let (Some(resource), true, true) = (label("resource"), writes_something, succeeded) else { continue };
        let resource = match label("subresource") {
            Some(sub) if !sub.is_empty() => format!("{resource}/{sub}"),
            _ => resource.to_owned(),
        };
        if resource != LEASES && !QUESTIONS.contains(&resource.as_str()) {
            let count: f64 = value.trim().parse().unwrap_or(0.0);
            *writes.entry(resource).or_default() += count as u64;
        }
    }
    writes
}

/// What came on top between two counts, without the resources where nothing did.
#[must_use]
pub fn since(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let more = |(name, count): (&String, &u64)| {
        let more = count - before.get(name).copied().unwrap_or(0).min(*count);
        (more > 0).then(|| (name.clone(), more))
    };
    after.iter().filter_map(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_told_from_reads_refusals_and_leases() {
        let line = |verb: &str, resource: &str, sub: &str, code: &str, count: u32| {
            format!(
                "apiserver_request_total{{code=\"{code}\",dry_run=\"\",resource=\"{resource}\",subresource=\"{sub}\",verb=\"{verb}\"}} {count}\n"
            )
        };
        let text = [
            line("APPLY", "impvms", "status", "200", 3),
            line("PATCH", "impvms", "status", "200", 2),
            line("PATCH", "impvms", "", "409", 7),
            line("GET", "impvms", "", "200", 9),
            line("PUT", "leases", "", "200", 100),
            line("POST", "tokenreviews", "", "201", 4),
            "# TYPE apiserver_request_total counter\n".to_owned(),
        ]
        .concat();
        let before = parse(&text);
        assert_eq!(before, BTreeMap::from([("impvms/status".to_owned(), 5)]));
        let after = parse(&text.replace("} 3", "} 4"));
        assert_eq!(since(&before, &after), BTreeMap::from([("impvms/status".to_owned(), 1)]));
    }
}
