//! Options in the URL, as of pods/exec and pods/log.

use imp_proto::v1::{ExecStart, LogsRequest, VmRef};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::error::ApiError;

/// The options of a URL, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Options(Vec<(String, String)>);

impl Options {
    pub(super) fn parse(query: Option<&str>) -> Self {
        Self(form_urlencoded::parse(query.unwrap_or_default().as_bytes()).into_owned().collect())
    }

    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    /// As Kubernetes reads booleans in URLs: present and neither `0` nor `false` is true.
    pub(super) fn flag(&self, name: &str) -> bool {
        self.all(name)
            .next()
            .is_some_and(|value| !matches!(value.to_ascii_lowercase().as_str(), "0" | "false"))
    }

    fn number(&self, name: &str, least: u64) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let number = text.parse().ok().filter(|number| *number >= least);
        number.map(Some).ok_or_else(|| {
            ApiError::bad_request(format!("{name}={text:?} is no whole number of at least {least}"))
        })
    }
}

/// First message of exec.
///
/// # Errors
/// 400 when there is no command, or nothing to talk over.
pub(super) fn exec(options: &Options, vm: VmRef, attach: bool) -> Result<ExecStart, ApiError> {
    let argv: Vec<String> =
        if attach { Vec::new() } else { options.all("command").map(str::to_owned).collect() };
    if argv.is_empty() && !attach {
        return Err(ApiError::bad_request("no command: give at least one option command"));
    }
    let (stdin, stdout, stderr, tty) =
        (options.flag("stdin"), options.flag("stdout"), options.flag("stderr"), options.flag("tty"));
    if !(stdin || stdout || stderr) {
        return Err(ApiError::bad_request("at least one of stdin, stdout and stderr must be true"));
    }
    if tty && stderr {
        return Err(ApiError::bad_request("tty and stderr exclude each other: a terminal has one output"));
    }
    Ok(ExecStart {
        vm: Some(vm),
        argv,
        stdin,
        stdout,
        stderr,
        tty,
        size: None,
        env: Vec::new(),
        working_dir: options.text("workingDir").unwrap_or_default().to_owned(),
        user: options.text("user").unwrap_or_default().to_owned(),
    })
}

/// Options of log.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Log {
    pub(super) request: LogsRequest,
    pub(super) timestamps: bool,
}

/// Reads the options of log.
///
/// # Errors
/// 400 when one makes no sense.
pub(super) fn log(options: &Options, vm: VmRef, now: Timestamp) -> Result<Log, ApiError> {
    if options.flag("previous") {
        return Err(ApiError::bad_request(
            "previous is not supported: the log of a VM goes on over its restarts",
        ));
    }
    let seconds = options.number("sinceSeconds", 1)?;
    let time = match options.text("sinceTime") {
        Some(text) => Some(
            text.parse::<Timestamp>()
                .map_err(|error| ApiError::bad_request(format!("sinceTime={text:?}: {error}")))?,
        ),
        None => None,
    };
    let since = match (seconds, time) {
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_request("sinceSeconds and sinceTime exclude each other"));
        }
        (Some(seconds), None) => {
            let ago = SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX));
            Some(now.checked_sub(ago).unwrap_or(Timestamp::UNIX_EPOCH))
        }
        (None, time) => time,
    };
    Ok(Log {
        request: LogsRequest {
            vm: Some(vm),
            follow: options.flag("follow"),
            tail_lines: options.number("tailLines", 0)?,
            since: since.map(|time| prost_types::Timestamp {
                seconds: time.as_second(),
                nanos: time.subsec_nanosecond(),
            }),
            limit_bytes: options.number("limitBytes", 1)?,
        },
        timestamps: options.flag("timestamps"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(query: &str) -> Options {
        Options::parse(Some(query))
    }

    #[test]
    fn arguments_keep_their_order_and_spelling() {
        let start = exec(
            &options("command=sh&command=-c&command=echo+%22a+b%22&stdin=true&stdout=1&tty=false"),
            VmRef::default(),
            false,
        )
        .unwrap();
        assert_eq!(start.argv, ["sh", "-c", "echo \"a b\""]);
        assert_eq!((start.stdin, start.stdout, start.stderr, start.tty), (true, true, false, false));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for query in ["stdout=true", "command=a", "command=a&stdout=1&stderr=1&tty=1"] {
            assert!(exec(&options(query), VmRef::default(), false).is_err(), "{query}");
        }
        for query in [
            "tailLines=-1",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceTime=noon",
            "sinceSeconds=5&sinceTime=2026-01-01T00:00:00Z",
            "previous=true",
        ] {
            assert!(log(&options(query), VmRef::default(), Timestamp::UNIX_EPOCH).is_err(), "{query}");
        }
    }

    #[test]
    fn log_options_are_those_of_pods() {
        let now = Timestamp::from_second(1000).unwrap();
        let log =
            log(&options("follow=true&tailLines=3&sinceSeconds=60&timestamps=true"), VmRef::default(), now)
                .unwrap();
        assert!(log.request.follow && log.timestamps);
        assert_eq!((log.request.tail_lines, log.request.since.unwrap().seconds), (Some(3), 940));
    }
}
