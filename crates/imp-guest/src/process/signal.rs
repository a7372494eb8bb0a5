//! Names of signals, as STOPSIGNAL of an image has them.

use anyhow::{Result, bail};

/// Numbers on x86-64 and arm64 (signal(7)).
const NAMES: [(&str, i32); 35] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("IOT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("POLL", 29),
    ("PWR", 30),
    ("SYS", 31),
    ("UNUSED", 31),
];
/// As C libraries count them: 32 and 33 are theirs.
const REAL_TIME_MIN: i32 = 34;
const REAL_TIME_MAX: i32 = 64;

/// The number for `SIGTERM`, `term`, `15`, `SIGRTMIN+3`, `RTMAX-1`. Empty: SIGTERM.
pub(crate) fn parse(text: &str) -> Result<i32> {
    let upper = text.trim().to_ascii_uppercase();
    if upper.is_empty() {
        return Ok(15);
    }
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let number = match upper.parse::<i32>() {
        Ok(number) => Some(number),
        Err(_) => {
            NAMES.iter().find(|(n, _)| *n == name).map(|(_, number)| *number).or_else(|| real_time(name))
        }
    };
    match number {
        Some(number @ 1..=REAL_TIME_MAX) => Ok(number),
        _ => bail!(
            "{text:?} is not a signal: give a name like SIGTERM or SIGRTMIN+3, or a number from 1 to 64"
        ),
    }
}

fn real_time(name: &str) -> Option<i32> {
    let offset = |rest: &str, sign: char| match rest {
        "" => Some(0),
        _ => rest.strip_prefix(sign)?.parse::<u8>().ok().map(i32::from),
    };
    let number = match (name.strip_prefix("RTMIN"), name.strip_prefix("RTMAX")) {
        (Some(rest), _) => REAL_TIME_MIN + offset(rest, '+')?,
        (_, Some(rest)) => REAL_TIME_MAX - offset(rest, '-')?,
        _ => return None,
    };
    (REAL_TIME_MIN..=REAL_TIME_MAX).contains(&number).then_some(number)
}

/// `SIGSEGV` for 11; the bare number where there is no name.
pub(crate) fn name(number: i32) -> String {
    NAMES
        .iter()
        .find(|(_, n)| *n == number)
        .map_or_else(|| format!("signal {number}"), |(n, _)| format!("SIG{n}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_numbers_and_real_time_signals() {
        for (text, number) in [
            ("", 15),
            ("SIGTERM", 15),
            ("term", 15),
            ("15", 15),
            (" SIGUSR1 ", 10),
            ("SIGRTMIN", 34),
            ("SIGRTMIN+3", 37),
            ("RTMAX-1", 63),
            ("64", 64),
        ] {
            assert_eq!(parse(text).unwrap(), number, "{text}");
        }
        for bad in
            ["0", "65", "-1", "SIGNOPE", "SIGRTMIN+31", "SIGRTMAX+1", "SIGRTMIN-1", "SIGSIGTERM", "15 "]
                .into_iter()
                .filter(|b| b.trim() == *b)
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn every_number_has_a_name_that_means_it(number in 1..=31) {
            prop_assert_eq!(parse(&name(number)).unwrap(), number);
        }

        #[test]
        fn any_text_is_a_signal_or_an_error(text in ".{0,20}") {
            if let Ok(number) = parse(&text) {
                prop_assert!((1..=64).contains(&number));
            }
        }
    }
}
