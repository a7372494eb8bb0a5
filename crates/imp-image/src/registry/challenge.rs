//! What a registry's `WWW-Authenticate` header asks for (RFC 9110, 11.6.1). Pure.

use std::collections::BTreeMap;

/// One way to authenticate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    /// A token from this address (distribution specification, token authentication).
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// The first challenge in the headers that we can answer; Bearer before Basic.
pub(super) fn parse<'h>(headers: impl Iterator<Item = &'h str>) -> Option<Challenge> {
    let mut basic = None;
    for header in headers {
        for (scheme, mut parameters) in split(header) {
            if scheme.eq_ignore_ascii_case("bearer")
                && let Some(realm) = parameters.remove("realm")
            {
                let (service, scope) = (parameters.remove("service"), parameters.remove("scope"));
                return Some(Challenge::Bearer { realm, service, scope });
            }
            if scheme.eq_ignore_ascii_case("basic") {
                basic = Some(Challenge::Basic);
            }
        }
    }
    basic
}

/// Schemes with their parameters.
fn split(header: &str) -> Vec<(String, BTreeMap<String, String>)> {
    let mut found: Vec<(String, BTreeMap<String, String>)> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if rest.is_empty() {
            return found;
        }
        let end = rest.find([' ', '\t', ',', '=']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        match after.strip_prefix('=') {
            Some(value) => {
                let (value, after) = take_value(value);
                if let Some((_, parameters)) = found.last_mut() {
                    parameters.insert(word.to_ascii_lowercase(), value);
                }
                rest = after;
            }
            None => {
                found.push((word.to_owned(), BTreeMap::new()));
                rest = after;
            }
        }
        if end == 0 && !after.starts_with('=') {
            return found;
        }
    }
}

fn take_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, c)| c)),
            c => value.push(c),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn challenges_of_real_registries() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#;
        let expected = Challenge::Bearer {
            realm: "https://auth.docker.io/token".into(),
            service: Some("registry.docker.io".into()),
            scope: Some("repository:a/b:pull,push".into()),
        };
        assert_eq!(parse([hub].into_iter()), Some(expected.clone()));
        assert_eq!(parse([r#"Basic realm="x, y""#].into_iter()), Some(Challenge::Basic));
        assert_eq!(parse(["Basic realm=x", hub].into_iter()), Some(expected.clone()));
        assert_eq!(parse([format!("Basic realm=\"x\", {hub}").as_str()].into_iter()), Some(expected));
        assert_eq!(parse(["Negotiate abc=="].into_iter()), None);
        assert_eq!(parse(["Bearer"].into_iter()), None);
    }

    proptest! {
        #[test]
        fn any_header_is_survived(header in "\\PC{0,200}") {
            let _ = parse([header.as_str()].into_iter());
        }
    }
}
