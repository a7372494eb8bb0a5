//! What may happen to a VM on its node in which state. Pure; the runtime's driver does what this says.
//!
//! ```text
//!            Begin                started               ended
//!   (none) ────────> Starting ──────────────> Alive ──────────> Ended
//!                        └──────────── Stop / failure ───────────^  │ Begin (a higher attempt)
//!                                                                   └──────────> Starting
//!   Remove from (none) and Ended, after which nothing is left.
//! ```

/// How far an attempt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Image, disk, network or VMM are being made.
    Starting,
    /// The VMM runs.
    Alive,
    /// Nothing runs, and never again in this attempt.
    Ended,
}

/// What is wanted of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// metadata.generation of the object.
    pub generation: i64,
    /// Which attempt should run.
    pub attempt: u32,
    /// Whether it should run.
    pub run: bool,
    /// Whether everything of it should go.
    pub delete: bool,
}

/// Why a wish is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The wish is older than the one that is known.
    #[error("generation {wanted} is older than {known}, which is known already")]
    OlderGeneration {
        /// Of the wish.
        wanted: i64,
        /// Of the known wish.
        known: i64,
    },
    /// The attempt is older than the one that is known.
    #[error("attempt {wanted} is older than {known}, which is known already")]
    OlderAttempt {
        /// Of the wish.
        wanted: u32,
        /// Of the known wish.
        known: u32,
    },
    /// The VM is being deleted; that cannot be taken back.
    #[error("the VM is being deleted")]
    Deleting,
}

/// Takes a wish in place of the known one. The same wish again is the same wish.
///
/// # Errors
/// When it is older than what is known, or the VM is being deleted.
pub fn admit(known: Wish, wanted: Wish) -> Result<Wish, Denied> {
    if wanted.delete {
        return Ok(Wish { delete: true, ..known });
    }
    if known.delete {
        return Err(Denied::Deleting);
    }
    if wanted.generation < known.generation {
        return Err(Denied::OlderGeneration { wanted: wanted.generation, known: known.generation });
    }
    if wanted.attempt < known.attempt {
        return Err(Denied::OlderAttempt { wanted: wanted.attempt, known: known.attempt });
    }
    Ok(wanted)
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Begin this attempt: it has never been begun.
    Begin(u32),
    /// Go on with the attempt that was begun.
    Continue,
    /// End the attempt.
    Stop,
    /// Free everything.
    Remove,
    /// Wait for another wish.
    Wait,
}

/// Decides from the wish and from the attempt that was begun last, if any was.
#[must_use]
pub fn next(wish: Wish, begun: Option<(u32, Stage)>) -> Action {
    let alive = matches!(begun, Some((_, Stage::Starting | Stage::Alive)));
    let newer = begun.is_none_or(|(attempt, _)| wish.attempt > attempt);
    match (alive, wish) {
        (true, Wish { delete: true, .. } | Wish { run: false, .. }) => Action::Stop,
        (true, _) if newer => Action::Stop,
        (true, _) => Action::Continue,
        (false, Wish { delete: true, .. }) => Action::Remove,
        (false, Wish { run: true, attempt, .. }) if newer => Action::Begin(attempt),
        (false, _) => Action::Wait,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wish() -> impl Strategy<Value = Wish> {
        (0..4i64, 0..4u32, any::<bool>(), prop::bool::weighted(0.1))
            .prop_map(|(generation, attempt, run, delete)| Wish { generation, attempt, run, delete })
    }

    const FIRST: Wish = Wish { generation: 0, attempt: 0, run: true, delete: false };

    #[test]
    fn an_attempt_that_ended_is_not_begun_again() {
        assert_eq!(next(FIRST, None), Action::Begin(0));
        assert_eq!(next(FIRST, Some((0, Stage::Ended))), Action::Wait);
        assert_eq!(next(Wish { attempt: 1, ..FIRST }, Some((0, Stage::Ended))), Action::Begin(1));
        assert_eq!(next(Wish { attempt: 1, ..FIRST }, Some((0, Stage::Alive))), Action::Stop);
    }

    proptest! {
        /// Whatever is asked in whatever order, attempts are begun in rising order, each at most once, and never two at a time.
        #[test]
        fn each_attempt_begins_at_most_once(steps in prop::collection::vec((wish(), any::<bool>()), 1..60)) {
            let (mut known, mut begun, mut last) = (FIRST, None, None);
            for (wanted, ends) in steps {
                if let Ok(taken) = admit(known, wanted) {
                    prop_assert_eq!(admit(taken, Wish { delete: taken.delete, ..taken }), Ok(taken), "the same again is the same");
                    known = taken;
                }
                match next(known, begun) {
                    Action::Begin(n) => {
                        prop_assert!(last.is_none_or(|l| n > l));
                        prop_assert!(!known.delete && known.run);
                        last = Some(n);
                        begun = Some((n, Stage::Starting));
                    }
                    Action::Continue => begun = begun.map(|(n, _)| (n, if ends { Stage::Ended } else { Stage::Alive })),
                    Action::Stop => begun = begun.map(|(n, _)| (n, Stage::Ended)),
                    Action::Remove => break,
                    Action::Wait => prop_assert!(!matches!(begun, Some((_, Stage::Starting | Stage::Alive)))),
                }
            }
        }

        #[test]
        fn a_deletion_is_never_taken_back(wishes in prop::collection::vec(wish(), 1..20)) {
            let mut known = Wish { delete: true, ..FIRST };
            for wanted in wishes {
                known = admit(known, wanted).unwrap_or(known);
                prop_assert!(known.delete);
            }
        }
    }
}
