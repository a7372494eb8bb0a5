//! Whether and when a VM that ended is started again.
//!
//! An ephemeral VM is done when its workload ends; it is started again after a *failure* only where a restart policy is given.
//! A persistent VM is started again after any end, by its policy or the default one. The first restart waits for the
//! initial delay, the n-th for twice the one before, up to the longest. `max_retries` 0 means none.

use std::time::Duration;

/// What happens when there are no retries left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exhaustion {
    /// The VM stays Failed.
    #[default]
    Fail,
    /// The VM becomes RetryExhausted until someone resets it.
    ManualReset,
    /// After this time the count begins anew.
    CoolDown(Duration),
}

/// A restart policy with its texts read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Choose a node again.
    pub reschedule: bool,
    /// Restarts before the VM is given up.
    pub max_retries: u32,
    /// Before the first restart.
    pub initial_delay: Duration,
    /// Longest pause.
    pub max_delay: Duration,
    /// When there are no retries left.
    pub on_exhaustion: Exhaustion,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            reschedule: false,
            max_retries: 5,
            initial_delay: Duration::from_secs(10),
            max_delay: Duration::from_secs(300),
            on_exhaustion: Exhaustion::Fail,
        }
    }
}

/// A VM that ended. Times are Unix seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input {
    /// As given on VM, template or class.
    pub policy: Option<Policy>,
    /// spec.lifecycle is persistent.
    pub persistent: bool,
    /// The workload exited with 0.
    pub succeeded: bool,
    /// Restarts since the count began.
    pub retries: u32,
    /// When the attempt ended.
    pub ended_at: i64,
    /// When the retries were found used up.
    pub exhausted_at: Option<i64>,
    /// The annotation that resets the count is there.
    pub reset: bool,
    /// Now.
    pub now: i64,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It has ended for good.
    Nothing,
    /// Look again then.
    Wait(i64),
    /// Start the next attempt now.
    Start {
        /// Choose a node again.
        reschedule: bool,
        /// The count begins anew with this start.
        fresh: bool,
    },
    /// No retries are left; say so.
    Exhausted {
        /// Only a person can go on.
        manual: bool,
    },
}

/// Decides.
#[must_use]
pub fn decide(input: &Input) -> Decision {
    let Some(policy) = input.policy.or_else(|| input.persistent.then(Policy::default)) else {
        return if input.reset && !input.succeeded { start(false, true) } else { Decision::Nothing };
    };
    if input.succeeded && !input.persistent {
        return Decision::Nothing;
    }
    if input.reset {
        return start(policy.reschedule, true);
    }
    if input.retries >= policy.max_retries {
        return exhausted(&policy, input);
    }
    let due = input.ended_at.saturating_add(seconds(delay(&policy, input.retries)));
    if due > input.now { Decision::Wait(due) } else { start(policy.reschedule, false) }
}

fn start(reschedule: bool, fresh: bool) -> Decision {
    Decision::Start { reschedule, fresh }
}

fn exhausted(policy: &Policy, input: &Input) -> Decision {
    match (policy.on_exhaustion, input.exhausted_at) {
        (Exhaustion::Fail, _) => Decision::Nothing,
        (Exhaustion::ManualReset, Some(_)) => Decision::Nothing,
        (Exhaustion::ManualReset, None) => Decision::Exhausted { manual: true },
        (Exhaustion::CoolDown(_), None) => Decision::Exhausted { manual: false },
        (Exhaustion::CoolDown(period), Some(since)) => {
            let due = since.saturating_add(seconds(period));
            if due > input.now { Decision::Wait(due) } else { start(policy.reschedule, true) }
        }
    }
}

/// The pause before restart number `retries` + 1.
#[must_use]
pub fn delay(policy: &Policy, retries: u32) -> Duration {
    let factor = 1u32.checked_shl(retries).unwrap_or(u32::MAX);
    policy.initial_delay.saturating_mul(factor).min(policy.max_delay)
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis().div_ceil(1000)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FAILED: Input = Input {
        policy: Some(Policy {
            reschedule: false,
            max_retries: 2,
            initial_delay: Duration::from_secs(10),
            max_delay: Duration::from_secs(300),
            on_exhaustion: Exhaustion::Fail,
        }),
        persistent: false,
        succeeded: false,
        retries: 0,
        ended_at: 1000,
        exhausted_at: None,
        reset: false,
        now: 1000,
    };

    fn with(on_exhaustion: Exhaustion) -> Option<Policy> {
        Some(Policy { on_exhaustion, max_retries: 2, ..Policy::default() })
    }

    #[test]
    fn the_first_restart_waits_too_and_each_waits_longer() {
        assert_eq!(decide(&FAILED), Decision::Wait(1010));
        assert_eq!(decide(&Input { now: 1010, ..FAILED }), start(false, false));
        assert_eq!(decide(&Input { retries: 1, ..FAILED }), Decision::Wait(1020));
        let policy = Policy::default();
        let delays: Vec<u64> = (0..7).map(|n| delay(&policy, n).as_secs()).collect();
        assert_eq!(delays, [10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(delay(&policy, 200).as_secs(), 300);
    }

    #[test]
    fn what_has_ended_for_good_stays_so() {
        assert_eq!(
            decide(&Input { policy: None, now: 9999, ..FAILED }),
            Decision::Nothing,
            "ephemeral, no policy"
        );
        assert_eq!(
            decide(&Input { succeeded: true, now: 9999, ..FAILED }),
            Decision::Nothing,
            "ephemeral, done"
        );
        assert_eq!(decide(&Input { retries: 2, now: 9999, ..FAILED }), Decision::Nothing, "no retries left");
        let none = Some(Policy { max_retries: 0, ..Policy::default() });
        assert_eq!(
            decide(&Input { policy: none, now: 9999, ..FAILED }),
            Decision::Nothing,
            "maxRetries 0 is none"
        );
    }

    #[test]
    fn a_persistent_vm_is_started_again_after_any_end() {
        let ended = Input { policy: None, persistent: true, succeeded: true, now: 9999, ..FAILED };
        assert_eq!(decide(&ended), start(false, false));
    }

    #[test]
    fn used_up_retries_follow_the_policy() {
        let manual = Input { policy: with(Exhaustion::ManualReset), retries: 2, ..FAILED };
        assert_eq!(decide(&manual), Decision::Exhausted { manual: true });
        assert_eq!(decide(&Input { exhausted_at: Some(1), ..manual }), Decision::Nothing);
        assert_eq!(decide(&Input { exhausted_at: Some(1), reset: true, ..manual }), start(false, true));
        let cool =
            Input { policy: with(Exhaustion::CoolDown(Duration::from_secs(60))), retries: 2, ..FAILED };
        assert_eq!(decide(&cool), Decision::Exhausted { manual: false });
        assert_eq!(decide(&Input { exhausted_at: Some(1000), ..cool }), Decision::Wait(1060));
        assert_eq!(decide(&Input { exhausted_at: Some(1000), now: 1060, ..cool }), start(false, true));
    }

    #[test]
    fn a_reset_starts_what_did_not_end_well_and_nothing_else() {
        let reset = Input { reset: true, retries: 2, ..FAILED };
        assert_eq!(decide(&reset), start(false, true), "at once, though no retries are left");
        assert_eq!(decide(&Input { policy: None, ..reset }), start(false, true), "ephemeral, no policy");
        assert_eq!(decide(&Input { succeeded: true, ..reset }), Decision::Nothing, "done is done");
        assert_eq!(decide(&Input { policy: None, succeeded: true, ..reset }), Decision::Nothing);
        let policy = Some(Policy { reschedule: true, ..Policy::default() });
        assert_eq!(decide(&Input { policy, ..reset }), start(true, true));
        assert_eq!(decide(&Input { policy, reset: false, now: 9999, ..reset }), start(true, false));
    }

    #[test]
    fn extreme_times_do_not_overflow() {
        let policy =
            Some(Policy { initial_delay: Duration::MAX, max_delay: Duration::MAX, ..Policy::default() });
        let input = Input { policy, ended_at: i64::MAX - 1, now: 0, ..FAILED };
        assert_eq!(decide(&input), Decision::Wait(i64::MAX));
    }

    proptest! {
        /// A VM that always fails is started as often as its policy says, at growing distances, and then no more.
        #[test]
        fn no_more_restarts_than_allowed(max_retries in 0u32..12, persistent: bool) {
            let policy = Policy { max_retries, ..Policy::default() };
            let (mut now, mut retries, mut waited) = (1000, 0, 0);
            loop {
                let ended = Input { policy: Some(policy), persistent, retries, ended_at: now, now, ..FAILED };
                let Decision::Wait(until) = decide(&ended) else {
                    prop_assert_eq!(decide(&ended), Decision::Nothing);
                    break;
                };
                prop_assert!(until - now >= waited && until - now <= 300);
                prop_assert_eq!(decide(&Input { now: until, ..ended }), start(false, false));
                (waited, now, retries) = (until - now, until, retries + 1);
            }
            prop_assert_eq!(retries, max_retries);
        }

        /// Asked again at the time that it named, the decider does not say "wait" again.
        #[test]
        fn a_wait_ends(retries in 0u32..9, max in 0u32..9, ended in 0i64..1_000_000, persistent: bool, succeeded: bool) {
            let policy = Some(Policy { max_retries: max, ..Policy::default() });
            let input = Input { policy, retries, persistent, succeeded, ended_at: ended, now: ended, ..FAILED };
            if let Decision::Wait(until) = decide(&input) {
                prop_assert!(until > input.now);
                let then = decide(&Input { now: until, ..input });
                prop_assert!(matches!(then, Decision::Start { .. }), "{then:?}");
            }
        }
    }
}
