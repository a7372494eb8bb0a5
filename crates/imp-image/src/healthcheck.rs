//! HEALTHCHECK, which Docker keeps in an image's configuration and the OCI specification does not know (moby, image/spec/docker-image-spec.md).

use serde::Deserialize;
use std::time::Duration;

/// How an image says that it is to be asked whether it is healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Healthcheck {
    /// What is run in the VM; 0 is healthy. Never empty.
    pub command: Vec<String>,
    /// Between two checks.
    pub interval: Duration,
    /// Longest that a check may take.
    pub timeout: Duration,
    /// Failures in a row that count.
    pub retries: u32,
}

/// Docker's default for interval and timeout, in nanoseconds.
const DEFAULT: u64 = 30_000_000_000;
const DEFAULT_RETRIES: u32 = 3;

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Raw {
    test: Vec<String>,
    /// Nanoseconds; 0: the default.
    interval: u64,
    timeout: u64,
    retries: u32,
}

/// The health check of a configuration (its `config.Healthcheck`); none where there is none, or it makes no sense: it is not worth an image.
pub(crate) fn of(configuration: &[u8]) -> Option<Healthcheck> {
    #[derive(Deserialize)]
    struct Configuration {
        config: Option<Config>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Config {
        healthcheck: Option<Raw>,
        shell: Option<Vec<String>>,
    }
    let config = serde_json::from_slice::<Configuration>(configuration).ok()?.config?;
    let raw = config.healthcheck?;
    let (kind, arguments) = raw.test.split_first()?;
    let shell = || config.shell.unwrap_or_else(|| vec!["/bin/sh".to_owned(), "-c".to_owned()]);
    let command = match kind.as_str() {
        "CMD" => arguments.to_vec(),
        "CMD-SHELL" => [shell(), arguments.to_vec()].concat(),
        _ => return None,
    };
    if arguments.is_empty() {
        return None;
    }
    let time = |nanoseconds: u64| Duration::from_nanos(if nanoseconds == 0 { DEFAULT } else { nanoseconds });
    Some(Healthcheck {
        command,
        interval: time(raw.interval),
        timeout: time(raw.timeout),
        retries: if raw.retries == 0 { DEFAULT_RETRIES } else { raw.retries },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn docker_s_forms_are_read() {
        let check = |config: serde_json::Value| of(json!({"config": config}).to_string().as_bytes());
        let commands = |config| check(config).map(|check| check.command);
        assert_eq!(
            commands(json!({"Healthcheck": {"Test": ["CMD", "a", "b c"]}})),
            Some(vec!["a".into(), "b c".into()])
        );
        let shell = json!({"Healthcheck": {"Test": ["CMD-SHELL", "a && b"]}});
        assert_eq!(commands(shell), Some(vec!["/bin/sh".into(), "-c".into(), "a && b".into()]));
        let own = json!({"Healthcheck": {"Test": ["CMD-SHELL", "a"]}, "Shell": ["/bash", "-lc"]});
        assert_eq!(commands(own), Some(vec!["/bash".into(), "-lc".into(), "a".into()]));
        for none in [
            json!({}),
            json!({"Healthcheck": null}),
            json!({"Healthcheck": {"Test": ["NONE"]}}),
            json!({"Healthcheck": {"Test": []}}),
            json!({"Healthcheck": {"Test": ["CMD"]}}),
            json!({"Healthcheck": {"Test": "sh"}}),
        ] {
            assert_eq!(check(none.clone()), None, "{none}");
        }
        let timed =
            json!({"Healthcheck": {"Test": ["CMD", "a"], "Interval": 5_000_000_000_u64, "Retries": 1}});
        let timed = check(timed).expect("a check");
        assert_eq!((timed.interval.as_secs(), timed.timeout.as_secs(), timed.retries), (5, 30, 1));
    }
}
