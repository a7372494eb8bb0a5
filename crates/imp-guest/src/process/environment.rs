//! The environment of a process.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use imp_proto::v1::EnvVar;

use super::user::User;

/// As container runtimes default it.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Variables by name. Its values may be secrets, hence no `Debug`.
pub(crate) type Environment = BTreeMap<String, String>;

/// `base` with `more` laid over it; of two of one name the later counts.
///
/// # Errors
/// For names that no environment can hold; values with a NUL byte. The message does not quote values.
pub(crate) fn merge(base: &[EnvVar], more: &[EnvVar]) -> Result<Environment> {
    let mut environment = Environment::new();
    for variable in base.iter().chain(more) {
        let name = &variable.name;
        ensure!(
            !name.is_empty() && !name.contains(['=', '\0']),
            "{name:?} can't be the name of an environment variable"
        );
        ensure!(
            !variable.value.contains('\0'),
            "the value of the environment variable {name} has a NUL byte"
        );
        environment.insert(name.clone(), variable.value.clone());
    }
    Ok(environment)
}

/// Adds what is missing of PATH, HOME, HOSTNAME and, with a terminal, TERM.
pub(crate) fn add_defaults(environment: &mut Environment, user: &User, hostname: &str, terminal: bool) {
    let defaults = [
        ("PATH", DEFAULT_PATH, true),
        ("HOME", &user.home, true),
        ("HOSTNAME", hostname, !hostname.is_empty()),
        ("TERM", "xterm", terminal),
    ];
    for (name, value, wanted) in defaults {
        if wanted {
            environment.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(name: &str, value: &str) -> EnvVar {
        EnvVar { name: name.into(), value: value.into() }
    }

    #[test]
    fn fr6_the_later_value_of_a_name_counts() {
        let image = [variable("PATH", "/opt/x/bin:/bin"), variable("FOO", "a"), variable("FOO", "b")];
        let environment = merge(&image, &[variable("FOO", "c"), variable("EMPTY", "")]).unwrap();
        assert_eq!(environment["FOO"], "c");
        assert_eq!(environment["PATH"], "/opt/x/bin:/bin");
        assert_eq!(environment["EMPTY"], "");
    }

    #[test]
    fn defaults_fill_gaps_only() {
        let user = User { uid: 1, gid: 1, groups: vec![], home: "/home/u".into() };
        let mut environment = merge(&[variable("HOME", "/elsewhere")], &[]).unwrap();
        add_defaults(&mut environment, &user, "vm", false);
        assert_eq!(environment["HOME"], "/elsewhere");
        assert_eq!(environment["HOSTNAME"], "vm");
        assert_eq!(environment["PATH"], DEFAULT_PATH);
        assert!(!environment.contains_key("TERM"));
        add_defaults(&mut environment, &user, "vm", true);
        assert_eq!(environment["TERM"], "xterm");
    }

    #[test]
    fn impossible_variables_are_errors_that_keep_the_value_secret() {
        assert!(merge(&[variable("A=B", "x")], &[]).is_err());
        assert!(merge(&[variable("", "x")], &[]).is_err());
        let error = merge(&[variable("TOKEN", "s3cret\0")], &[]).unwrap_err().to_string();
        assert!(error.contains("TOKEN") && !error.contains("s3cret"));
    }
}
