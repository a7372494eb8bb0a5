//! Names of the API against those of the wire protocol, which know nothing of each other.

use imp_api::names::Reason;
use imp_proto::v1::FailureReason;

/// `FAILURE_REASON_IMAGE_NOT_FOUND` is `ImageNotFound`.
fn camel(name: &str) -> String {
    let name = name.strip_prefix("FAILURE_REASON_").unwrap();
    name.split('_').map(|word| format!("{}{}", &word[..1], word[1..].to_lowercase())).collect()
}

#[test]
fn every_failure_of_the_runtime_has_a_reason() {
    let failures: Vec<FailureReason> =
        (1..).map_while(|number| FailureReason::try_from(number).ok()).collect();
    assert!(failures.len() >= 16, "{failures:?}");
    for failure in failures {
        let name = camel(failure.as_str_name());
        assert!(Reason::parse(&name).is_some(), "imp_api::names::Reason has no {name}");
    }
}
