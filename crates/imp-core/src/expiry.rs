//! When a VM has lived long enough (spec.expireAfter, counted from when it first ran).

use std::time::Duration;

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// It does not expire, or has not run yet.
    Never,
    /// At this time, in Unix seconds.
    At(i64),
    /// Now.
    Due,
}

/// Decides from spec.expireAfter (zero: never) and the time at which the VM first ran, both as they are now.
#[must_use]
pub fn decide(expire_after: Option<Duration>, running_at: Option<i64>, now: i64) -> Expiry {
    match (expire_after.filter(|d| !d.is_zero()), running_at) {
        (Some(after), Some(since)) => {
            let due = since.saturating_add(i64::try_from(after.as_secs()).unwrap_or(i64::MAX));
            if due <= now { Expiry::Due } else { Expiry::At(due) }
        }
        _ => Expiry::Never,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_expires_once_it_ran_so_long() {
        let hour = Some(Duration::from_secs(3600));
        assert_eq!(decide(hour, None, 9999), Expiry::Never);
        assert_eq!(decide(Some(Duration::ZERO), Some(0), 9999), Expiry::Never);
        assert_eq!(decide(None, Some(0), 9999), Expiry::Never);
        assert_eq!(decide(hour, Some(1000), 4599), Expiry::At(4600));
        assert_eq!(decide(hour, Some(1000), 4600), Expiry::Due);
    }
}
