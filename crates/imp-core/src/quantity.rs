//! Kubernetes quantities (k8s.io/apimachinery/pkg/api/resource): exact, rounded up to the unit that is
//! asked for, however many digits they have. The grammar is the documented one: a number, then a suffix or an exponent.

/// A text that is no quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no quantity: a number with an optional suffix such as m, k, M, Ki or Mi")]
pub struct NotAQuantity(pub String);

/// The largest quantity: what is larger counts as this (k8s.io/apimachinery/pkg/api/resource, "Cap at min/max bounds").
const MAX: u64 = i64::MAX as u64;

/// Powers of ten further from one than this are more than [`MAX`] or less than a part of a unit, whatever the suffix.
const FAR: i64 = 64;

/// CPU in thousandths of a CPU, rounded up: `2` is 2000, `250m` is 250, `1n` is 1. At most `i64::MAX`.
///
/// # Errors
/// When the text is no quantity, or negative.
pub fn parse_cpu_millis(text: &str) -> Result<u64, NotAQuantity> {
    units(text, 3).ok_or_else(|| NotAQuantity(text.to_owned()))
}

/// Memory or disk in bytes, rounded up: `1Ki` is 1024, `1k` is 1000, `100m` is 1. At most `i64::MAX`.
///
/// # Errors
/// When the text is no quantity, or negative.
pub fn parse_bytes(text: &str) -> Result<u64, NotAQuantity> {
    units(text, 0).ok_or_else(|| NotAQuantity(text.to_owned()))
}

/// What stands behind a number: the factor 10^`ten` times 2^`two`.
fn factor(suffix: &str) -> Option<(i64, u32)> {
    Some(match suffix {
        "n" => (-9, 0),
        "u" => (-6, 0),
        "m" => (-3, 0),
        "" => (0, 0),
        "k" => (3, 0),
        "M" => (6, 0),
        "G" => (9, 0),
        "T" => (12, 0),
        "P" => (15, 0),
        "E" => (18, 0),
        "Ki" => (0, 10),
        "Mi" => (0, 20),
        "Gi" => (0, 30),
        "Ti" => (0, 40),
        "Pi" => (0, 50),
        "Ei" => (0, 60),
        exponent => {
            let power: i64 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            (power.clamp(-1_000_000_000, 1_000_000_000), 0)
        }
    })
}

/// `text` times 10^`scale`, rounded up to a whole number.
fn units(text: &str, scale: i64) -> Option<u64> {
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = unsigned.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let (ten, two) = factor(suffix)?;
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).map(|digit| digit - b'0').collect();
    let zeros = digits.iter().take_while(|digit| **digit == 0).count();
    let digits = &digits[zeros..];
    if digits.is_empty() {
        return Some(0);
    }
    if negative {
        return None;
    }
    // The number is 0.d1d2d3… times 10^point.
    let point = i64::try_from(whole.len()).ok()? - i64::try_from(zeros).ok()? + ten + scale;
    Some(if point > FAR {
        MAX
    } else if point < -FAR {
        1
    } else {
        product(digits, point, two).map_or(MAX, |units| units.min(MAX))
    })
}

/// 0.d1d2d3… times 10^`point` times 2^`two`, rounded up; `None` when that is far too large.
fn product(digits: &[u8], point: i64, two: u32) -> Option<u64> {
    let places = usize::try_from(point).unwrap_or(0);
    let mut whole: u64 = 0;
    for place in 0..places {
        let digit = digits.get(place).copied().unwrap_or(0);
        whole = whole.checked_mul(10)?.checked_add(digit.into())?;
    }
    let leading = usize::try_from(-point).unwrap_or(0);
    let mut part = vec![0; leading];
    part.extend_from_slice(digits.get(places..).unwrap_or_default());
    // Doubling by hand: exact however many digits there are.
    for _ in 0..two {
        let carry = double(&mut part);
        whole = whole.checked_mul(2)?.checked_add(carry.into())?;
    }
    whole.checked_add(u64::from(part.iter().any(|digit| *digit != 0)))
}

/// Doubles 0.d1d2d3… and returns what comes before the point: 0 or 1.
fn double(part: &mut [u8]) -> u8 {
    part.iter_mut().rev().fold(0, |carry, digit| {
        let doubled = *digit * 2 + carry;
        *digit = doubled % 10;
        doubled / 10
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantities_are_read_exactly() {
        for (text, millis) in [
            ("2", 2000),
            ("+2", 2000),
            ("250m", 250),
            ("0.1", 100),
            (".5", 500),
            ("5.", 5000),
            ("1.5", 1500),
            ("100u", 1),
            ("1n", 1),
            ("1000001u", 1001),
            ("0", 0),
            ("-0", 0),
            ("1e3", 1_000_000),
            ("1E-3", 1),
            ("0.0000000000000000000000000000000001", 1),
        ] {
            assert_eq!(parse_cpu_millis(text), Ok(millis), "{text}");
        }
        for (text, bytes) in [
            ("1Ki", 1024),
            ("1k", 1000),
            ("1.5Gi", 3 << 29),
            ("0.1Ki", 103),
            ("12e6", 12_000_000),
            ("12E+6", 12_000_000),
            ("1E", 1_000_000_000_000_000_000),
            ("100m", 1),
            ("129M", 129_000_000),
            ("7Ei", 7 << 60),
            ("9223372036854775807", i64::MAX as u64),
            ("00000000000000000000000000000000000000000000000000000000000000000000000001", 1),
            ("1.0000000000000000000000000000000000000001Ki", 1025),
            ("0e99999999999", 0),
            ("1e-99999999999", 1),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn too_much_counts_as_the_most_as_in_kubernetes() {
        for text in
            ["8Ei", "9Ei", "9223372036854775807Ki", "9223372036854775808", "10E", "1e19", "1e99999999999"]
        {
            assert_eq!(parse_bytes(text), Ok(i64::MAX as u64), "{text}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for bad in [
            "", "Mi", ".", "-", "+", ".Mi", "1Zi", "1mi", "1KI", "one", "-1", "-1n", "1..2", "1.2.3", "1.-2",
            "+-1", "1 Mi", " 1", "1e3m", "1e", "1e+", "1e1.5", "0x10", "1K", "١",
        ] {
            assert_eq!(parse_bytes(bad), Err(NotAQuantity(bad.into())), "{bad}");
            assert!(parse_cpu_millis(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_quantity_or_an_error(text in "\\PC{0,24}", near in "[+-]?[0-9.]{0,9}[eEinumkKMGTP+-]{0,3}[0-9]{0,3}") {
            for text in [text, near] {
                for read in [parse_bytes(&text), parse_cpu_millis(&text)].into_iter().flatten() {
                    prop_assert!(read <= MAX);
                }
            }
        }

        #[test]
        fn a_milli_is_a_thousandth(n in 0u64..1_000_000) {
            prop_assert_eq!(parse_cpu_millis(&format!("{n}m")), Ok(n));
            prop_assert_eq!(parse_cpu_millis(&n.to_string()), Ok(n * 1000));
            prop_assert_eq!(parse_bytes(&format!("{n}m")), Ok(n.div_ceil(1000)));
        }

        /// Against whole-number arithmetic: every suffix, with and without a fraction.
        #[test]
        fn a_fraction_is_rounded_up_once(whole in 0u64..1_000, thousandths in 0u64..1_000, power in 0u32..6) {
            let suffix = ["", "Ki", "Mi", "Gi", "Ti", "Pi"][power as usize];
            let exact = u128::from(whole * 1000 + thousandths) << (10 * power);
            let text = format!("{whole}.{thousandths:03}{suffix}");
            prop_assert_eq!(parse_bytes(&text).map(u128::from), Ok(exact.div_ceil(1000)));
        }

        /// More is never read as less.
        #[test]
        fn order_is_kept(a in 0u64..u64::MAX, b in 0u64..u64::MAX, suffix in "(n|u|m||k|M|G|Ki|Mi|Gi|e3)") {
            let read = |n: u64| parse_bytes(&format!("{n}{suffix}")).map_err(|e| TestCaseError::fail(e.to_string()));
            prop_assert!(read(a.min(b))? <= read(a.max(b))?);
        }
    }
}
