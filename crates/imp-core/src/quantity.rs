//! Kubernetes quantities (k8s.io/apimachinery/pkg/api/resource): exact, rounded up to the unit that is asked for.

/// A text that is no quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no quantity: a number with an optional suffix such as m, k, M, Ki or Mi")]
pub struct NotAQuantity(pub String);

/// Nano-units in a unit.
const NANO: i128 = 1_000_000_000;

/// CPU in thousandths of a CPU: `2` is 2000, `250m` is 250.
///
/// # Errors
/// When the text is no quantity, negative or out of range.
pub fn parse_cpu_millis(text: &str) -> Result<u64, NotAQuantity> {
    rounded(text, NANO / 1000)
}

/// Memory or disk in bytes: `1Ki` is 1024, `1k` is 1000.
///
/// # Errors
/// When the text is no quantity, negative or out of range.
pub fn parse_bytes(text: &str) -> Result<u64, NotAQuantity> {
    rounded(text, NANO)
}

fn rounded(text: &str, unit: i128) -> Result<u64, NotAQuantity> {
    let wrong = || NotAQuantity(text.to_owned());
    let nanos = nanos(text).ok_or_else(wrong)?;
    let units = nanos.checked_add(unit - 1).ok_or_else(wrong)?.div_euclid(unit);
    u64::try_from(units).map_err(|_| wrong())
}

fn nanos(text: &str) -> Option<i128> {
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    // 2^80 leaves room: the largest suffix is Ei.
    let (multiplier, divisor): (i128, i128) = match suffix {
        "" => (1, 1),
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (10i128.pow(12), 1),
        "P" => (10i128.pow(15), 1),
        "E" => (10i128.pow(18), 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let scale = 10i128.checked_pow(power.unsigned_abs())?;
            if power < 0 { (1, scale) } else { (scale, 1) }
        }
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 18 || fraction.contains(['+', '-']) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = 10i128.pow(u32::try_from(fraction.len()).ok()?);
    let total = digits.checked_mul(multiplier)?.checked_mul(NANO)?;
    let by = scale.checked_mul(divisor)?;
    // What is below a nano-unit is rounded up, as everything here.
    Some(-((-total).div_euclid(by)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantities_are_read_exactly() {
        for (text, millis) in
            [("2", 2000), ("250m", 250), ("0.1", 100), ("1e3m", 0), ("100u", 1), ("1.5", 1500)]
        {
            if text == "1e3m" {
                assert!(parse_cpu_millis(text).is_err());
            } else {
                assert_eq!(parse_cpu_millis(text), Ok(millis), "{text}");
            }
        }
        for (text, bytes) in
            [("1Ki", 1024), ("1k", 1000), ("1.5Gi", 3 << 29), ("12e6", 12_000_000), ("8Ei", 1 << 63)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for bad in ["", "Mi", "1Zi", "one", "-1", "1..2", "1.-2", "99999999999999999999Ei"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_quantity_or_an_error(text in "\\PC{0,24}") {
            let _ = (parse_bytes(&text), parse_cpu_millis(&text));
        }

        #[test]
        fn a_milli_is_a_thousandth(n in 0u64..1_000_000) {
            prop_assert_eq!(parse_cpu_millis(&format!("{n}m")), Ok(n));
            prop_assert_eq!(parse_cpu_millis(&n.to_string()), Ok(n * 1000));
        }
    }
}
