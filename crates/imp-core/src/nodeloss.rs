//! Whether a VM's node still has it.
//!
//! A node that is not heard of may still run the VM: starting it elsewhere would make two of it, with one disk and one address.
//! So silence alone, however long, is never leave to do so. Only a *fenced* node's VMs are surely gone: its Node object
//! was deleted, or it is tainted `node.kubernetes.io/out-of-service` while it is not Ready (KEP-2268; the taint on a Ready node
//! says nothing, as in k8s.io/kubernetes/pkg/controller/podgc).
//!
//! Times are Unix seconds on the caller's clock: when it *saw* a change, not what another machine's clock wrote.

use std::time::Duration;

/// What is known of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// Its condition Ready is True.
    Ready,
    /// Its condition Ready is False, Unknown or missing since then.
    NotReadySince(i64),
    /// Its object does not exist.
    Gone,
    /// It is not Ready, and someone has said that nothing runs there any more.
    OutOfService,
}

impl NodeState {
    /// The state of a Node that exists: whether it is Ready, since when it is or is not, whether it has the taint
    /// `node.kubernetes.io/out-of-service`.
    #[must_use]
    pub fn of(ready: bool, since: i64, out_of_service: bool) -> Self {
        match (ready, out_of_service) {
            (true, _) => Self::Ready,
            (false, true) => Self::OutOfService,
            (false, false) => Self::NotReadySince(since),
        }
    }
}

/// What that means for the node's VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// They are where they were.
    Healthy,
    /// Nothing has been heard for a while; what the status says may be out of date.
    Unknown,
    /// The node is taken to be lost.
    Lost {
        /// Its VMs surely run no more, so that they may be started elsewhere and their objects be released.
        fenced: bool,
    },
}

impl Loss {
    /// Whether a VM that is bound to the node may be bound to another one.
    #[must_use]
    pub fn may_start_elsewhere(self) -> bool {
        self == Self::Lost { fenced: true }
    }
}

/// Decides from the node's state and from when its agent's lease was last seen renewed (`None`: never; then the node's
/// condition alone counts). The node is lost when both have been silent for `grace`.
#[must_use]
pub fn decide(node: NodeState, lease_renewed_at: Option<i64>, now: i64, grace: Duration) -> Loss {
    let over = |since: i64| now >= after(since, grace);
    match node {
        NodeState::Gone | NodeState::OutOfService => Loss::Lost { fenced: true },
        NodeState::Ready if lease_renewed_at.is_some_and(over) => Loss::Unknown,
        NodeState::Ready => Loss::Healthy,
        NodeState::NotReadySince(since) if over(heard(since, lease_renewed_at)) => {
            Loss::Lost { fenced: false }
        }
        NodeState::NotReadySince(_) => Loss::Unknown,
    }
}

/// When [`decide`] would say something else of its own accord, if nothing is heard until then; `None`: never.
#[must_use]
pub fn next_look(node: NodeState, lease_renewed_at: Option<i64>, now: i64, grace: Duration) -> Option<i64> {
    let end = match node {
        NodeState::Gone | NodeState::OutOfService => return None,
        NodeState::Ready => after(lease_renewed_at?, grace),
        NodeState::NotReadySince(since) => after(heard(since, lease_renewed_at), grace),
    };
    Some(end).filter(|end| *end > now)
}

/// The last sign of life.
fn heard(since: i64, lease_renewed_at: Option<i64>) -> i64 {
    lease_renewed_at.map_or(since, |renewed| renewed.max(since))
}

/// A part of a second counts as a whole one.
fn after(since: i64, grace: Duration) -> i64 {
    since.saturating_add(i64::try_from(grace.as_millis().div_ceil(1000)).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use NodeState::{Gone, NotReadySince, OutOfService, Ready};
    use proptest::prelude::*;

    const GRACE: Duration = Duration::from_secs(40);
    const UNFENCED: Loss = Loss::Lost { fenced: false };
    const FENCED: Loss = Loss::Lost { fenced: true };

    #[test]
    fn a_node_is_lost_when_it_and_its_agent_are_silent() {
        for (node, lease, now, expected) in [
            (Ready, Some(1000), 1039, Loss::Healthy),
            (Ready, Some(1000), 1040, Loss::Unknown),
            (Ready, None, 9999, Loss::Healthy),
            (NotReadySince(1000), None, 1000, Loss::Unknown),
            (NotReadySince(1000), None, 1039, Loss::Unknown),
            (NotReadySince(1000), None, 1040, UNFENCED),
            (NotReadySince(1000), Some(1020), 1059, Loss::Unknown),
            (NotReadySince(1000), Some(1020), 1060, UNFENCED),
            (NotReadySince(1000), Some(900), 1039, Loss::Unknown),
            (Gone, Some(1000), 1000, FENCED),
            (OutOfService, Some(1000), 1000, FENCED),
        ] {
            assert_eq!(decide(node, lease, now, GRACE), expected, "{node:?} {lease:?} {now}");
        }
    }

    #[test]
    fn an_out_of_service_taint_counts_on_a_node_that_is_not_ready_only() {
        assert_eq!(NodeState::of(true, 5, true), Ready);
        assert_eq!(NodeState::of(true, 5, false), Ready);
        assert_eq!(NodeState::of(false, 5, true), OutOfService);
        assert_eq!(NodeState::of(false, 5, false), NotReadySince(5));
    }

    #[test]
    fn fr65_silence_however_long_is_no_leave_to_start_a_second_copy() {
        let years = 1000 + 100 * 365 * 24 * 3600;
        let silent = decide(NotReadySince(1000), Some(1000), years, GRACE);
        assert_eq!(silent, UNFENCED);
        assert!(!silent.may_start_elsewhere());
        for fenced in [Gone, OutOfService] {
            assert!(
                decide(fenced, Some(years), years, GRACE).may_start_elsewhere(),
                "positive control: {fenced:?}"
            );
        }
    }

    #[test]
    fn extreme_times_do_not_overflow() {
        assert_eq!(decide(NotReadySince(i64::MAX), None, i64::MIN, Duration::MAX), Loss::Unknown);
        assert_eq!(next_look(NotReadySince(i64::MIN), None, i64::MIN, Duration::ZERO), None);
    }

    fn states() -> impl Strategy<Value = NodeState> {
        prop_oneof![Just(Ready), (0i64..2000).prop_map(NotReadySince), Just(Gone), Just(OutOfService)]
    }

    proptest! {
        /// Whatever is seen when: only a fenced node's VMs may start elsewhere.
        #[test]
        fn fr65_only_fencing_lets_a_vm_go(
            node in states(), lease in prop::option::of(0i64..2000), now in 0i64..4000, grace in 0u64..300,
        ) {
            let loss = decide(node, lease, now, Duration::from_secs(grace));
            prop_assert_eq!(loss.may_start_elsewhere(), matches!(node, Gone | OutOfService));
        }

        /// Nothing changes before the time that was named, and something does then.
        #[test]
        fn the_next_look_is_when_it_changes(
            node in states(), lease in prop::option::of(0i64..2000), now in 0i64..4000, grace in 0u64..300, later in 0i64..4000,
        ) {
            let grace = Duration::from_secs(grace);
            let at = |now| decide(node, lease, now, grace);
            match next_look(node, lease, now, grace) {
                Some(then) => {
                    prop_assert!(then > now);
                    prop_assert_eq!(at(then - 1), at(now));
                    prop_assert_ne!(at(then), at(now));
                }
                None => prop_assert_eq!(at(now + later), at(now)),
            }
        }
    }
}
