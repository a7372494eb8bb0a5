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

/// Decides from spec.expireAfter (zero: never) and the time at which the VM first ran, both as they are now: who changes
/// spec.expireAfter changes when the VM expires. A restart does not, as long as `running_at` stays the first.
#[must_use]
pub fn decide(expire_after: Option<Duration>, running_at: Option<i64>, now: i64) -> Expiry {
    match (expire_after.filter(|d| !d.is_zero()), running_at) {
        (Some(after), Some(since)) => {
            // A part of a second counts as a whole one: never too early.
            let seconds = i64::try_from(after.as_millis().div_ceil(1000)).unwrap_or(i64::MAX);
            let due = since.saturating_add(seconds);
            if due <= now { Expiry::Due } else { Expiry::At(due) }
        }
        _ => Expiry::Never,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_vm_expires_once_it_ran_so_long() {
        let hour = Some(Duration::from_secs(3600));
        assert_eq!(decide(hour, None, 9999), Expiry::Never);
        assert_eq!(decide(Some(Duration::ZERO), Some(0), 9999), Expiry::Never);
        assert_eq!(decide(None, Some(0), 9999), Expiry::Never);
        assert_eq!(decide(hour, Some(1000), 4599), Expiry::At(4600));
        assert_eq!(decide(hour, Some(1000), 4600), Expiry::Due);
        assert_eq!(decide(Some(Duration::from_millis(1)), Some(1000), 1000), Expiry::At(1001));
        assert_eq!(decide(Some(Duration::MAX), Some(i64::MAX - 1), 0), Expiry::At(i64::MAX));
    }

    proptest! {
        /// Asked again at the time that it named, and not before, it is due.
        #[test]
        fn it_is_due_when_it_was_said_to_be(ms in 1u64..10_000_000, since in 0i64..1_000_000, now in 0i64..2_000_000) {
            let after = Some(Duration::from_millis(ms));
            if let Expiry::At(then) = decide(after, Some(since), now) {
                prop_assert!(then > now);
                prop_assert_eq!(decide(after, Some(since), then - 1), Expiry::At(then));
                prop_assert_eq!(decide(after, Some(since), then), Expiry::Due);
            }
        }
    }
}
