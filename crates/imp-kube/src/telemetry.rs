//! The log: standard error, filtered by `IMP_LOG`, in JSON if `IMP_LOG_FORMAT=json`.

use tracing_subscriber::EnvFilter;

/// Environment variable with the filter, in the syntax of `tracing_subscriber::EnvFilter` (`info`, `info,imp_operator=debug`).
pub const FILTER: &str = "IMP_LOG";
/// Environment variable with the format: `json`, or anything else for lines that people read.
pub const FORMAT: &str = "IMP_LOG_FORMAT";

/// Sets up the log of this process: filter of `IMP_LOG`, else of `RUST_LOG`, else `info`. A second call changes nothing.
pub fn init() {
    let (filter, problem) = filter(|name| std::env::var(name).ok());
    let json = std::env::var(FORMAT).is_ok_and(|format| format.eq_ignore_ascii_case("json"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let set = if json { log.json().try_init() } else { log.try_init() };
    match (set, problem) {
        (Ok(()), Some(problem)) => tracing::warn!("{problem}; the filter is \"info\""),
        (Ok(()), None) => {}
        (Err(error), _) => tracing::debug!(error = &*error, "the log is set up already"),
    }
}

/// The filter, and what is wrong with the text that it should have come from.
fn filter(variable: impl Fn(&str) -> Option<String>) -> (EnvFilter, Option<String>) {
    let text = [FILTER, EnvFilter::DEFAULT_ENV]
        .into_iter()
        .find_map(|name| variable(name).filter(|text| !text.trim().is_empty()).map(|text| (name, text)));
    let Some((name, text)) = text else { return (EnvFilter::new("info"), None) };
    match EnvFilter::builder().parse(&text) {
        Ok(filter) => (filter, None),
        Err(error) => {
            (EnvFilter::new("info"), Some(format!("{name}={text:?} is no filter of the log: {error}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> (String, bool) {
        let get = |name: &str| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
        };
        let (filter, problem) = filter(get);
        (filter.to_string(), problem.is_some())
    }

    #[test]
    fn own_variable_comes_first_and_nonsense_is_told() {
        assert_eq!(of(&[]), ("info".to_owned(), false));
        assert_eq!(of(&[("RUST_LOG", "warn")]), ("warn".to_owned(), false));
        assert_eq!(of(&[("RUST_LOG", "warn"), (FILTER, "debug")]), ("debug".to_owned(), false));
        assert_eq!(of(&[("RUST_LOG", "warn"), (FILTER, "")]), ("warn".to_owned(), false));
        assert_eq!(of(&[(FILTER, "imp=loud=yes")]), ("info".to_owned(), true));
    }
}
