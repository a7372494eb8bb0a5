//! Durations as Go writes them (`time.ParseDuration`), kept as the user wrote them.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A duration in Go's notation: `90s`, `1h30m`, `1.5h`, `0`.
///
/// The text is kept, so that writing an object back changes nothing; [`DurationString::parse`] gives the value.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct DurationString(pub String);

/// Why a text is no duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a duration: {problem}; write for example 90s, 45m or 1h30m")]
pub struct InvalidDuration {
    text: String,
    problem: &'static str,
}

impl DurationString {
    /// The value, exact to the nanosecond.
    ///
    /// # Errors
    /// [`InvalidDuration`] when the text is empty, has an unknown unit or none, is negative, or exceeds what Go can
    /// hold (about 292 years). The schemas refuse such texts, so objects read from the API server have none.
    pub fn parse(&self) -> Result<Duration, InvalidDuration> {
        parse(&self.0).map_err(|problem| InvalidDuration { text: self.0.clone(), problem })
    }
}

impl std::fmt::Display for DurationString {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for DurationString {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

fn parse(text: &str) -> Result<Duration, &'static str> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    if text.is_empty() {
        return Err("it is empty");
    }
    let mut rest = text;
    let mut nanoseconds = 0_u64;
    while !rest.is_empty() {
        let number_end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or("a unit is missing")?;
        let (number, tail) = rest.split_at(number_end);
        let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        nanoseconds = nanoseconds.checked_add(term(number, unit)?).ok_or("it is too long")?;
        rest = tail;
    }
    if i64::try_from(nanoseconds).is_err() {
        return Err("it is too long");
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// Nanoseconds of one `<number><unit>` group.
fn term(number: &str, unit: &str) -> Result<u64, &'static str> {
    let unit: u64 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err("the units are ns, us, ms, s, m and h"),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return Err("a number is missing");
    }
    if fraction.contains('.') {
        return Err("a number has two points");
    }
    let whole = if whole.is_empty() { 0 } else { whole.parse::<u64>().map_err(|_| "it is too long")? };
    let whole = whole.checked_mul(unit).ok_or("it is too long")?;
    // Digits beyond the nanosecond are cut, as Go does; at most 19 fit.
    let mut part = 0_u64;
    let mut scale = unit;
    for digit in fraction.bytes() {
        // Exact for the first digits, which alone can matter: every unit is below 10^13 ns.
        part = part.saturating_add(u64::from(digit - b'0').saturating_mul(scale) / 10);
        scale /= 10;
    }
    whole.checked_add(part).ok_or("it is too long")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_are_understood() {
        for (text, seconds) in [
            ("0", 0.0),
            ("0s", 0.0),
            ("90s", 90.0),
            ("1h30m", 5400.0),
            ("1.5h", 5400.0),
            ("250ms", 0.25),
            ("45m", 2700.0),
        ] {
            let value = DurationString::from(text).parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(value.as_secs_f64(), seconds, "{text}");
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for text in
            ["", "5", "5 minutes", "-5s", "s", ".s", "1.2.3s", "1d", "99999999999999h", "1e3s", "2562048h"]
        {
            assert!(DurationString::from(text).parse().is_err(), "{text}");
        }
    }
}
