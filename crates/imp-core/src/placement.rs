//! On which node a VM runs.
//!
//! A node is considered when it is enabled, matches the VM's selector and architecture, is Ready and schedulable, and has no
//! taint that the VM does not tolerate. It fits when what is free (allocatable times the node's fraction, or the profile's
//! explicit capacity, less what pods request and what VMs are bound) covers the VM and its VMM. The node with the most free
//! memory wins; ties go to fewer VMs, then to the name.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

/// What a VMM needs beside its guest's memory, in MiB.
pub const VM_OVERHEAD_MIB: u64 = 64;
/// What a VMM's own threads need, in thousandths of a CPU.
pub const VM_OVERHEAD_CPU_MILLIS: u64 = 50;
/// Part of a node that VMs may take unless said otherwise, in thousandths.
pub const DEFAULT_FRACTION: u32 = 900;

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    /// Key.
    pub key: String,
    /// Value, perhaps empty.
    pub value: String,
    /// NoSchedule, NoExecute or PreferNoSchedule.
    pub effect: String,
}

/// A toleration of a VM, as a Pod's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toleration {
    /// Empty with `Exists`: every key.
    pub key: String,
    /// `Exists`, or `Equal` (also when empty).
    pub operator: String,
    /// For `Equal`.
    pub value: String,
    /// Empty: every effect.
    pub effect: String,
}

impl Toleration {
    /// Whether it tolerates `taint` (k8s.io/api/core/v1 Toleration.ToleratesTaint; without a key only `Exists` is valid, so that
    /// anything else without one tolerates nothing).
    #[must_use]
    pub fn tolerates(&self, taint: &Taint) -> bool {
        let effect = self.effect.is_empty() || self.effect == taint.effect;
        let key = self.key.is_empty() || self.key == taint.key;
        effect
            && key
            && match self.operator.as_str() {
                "Exists" => true,
                "" | "Equal" => !self.key.is_empty() && self.value == taint.value,
                _ => false,
            }
    }
}

/// A node as placement sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Name of the object.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Has the label that enables Imp.
    pub enabled: bool,
    /// Its taints.
    pub taints: Vec<Taint>,
    /// Condition Ready is True.
    pub ready: bool,
    /// Cordoned.
    pub unschedulable: bool,
    /// MemoryPressure, DiskPressure or PIDPressure, when one is True.
    pub pressure: Option<String>,
    /// `kubernetes.io/arch`.
    pub arch: String,
    /// Allocatable CPU in thousandths.
    pub cpu_millis: u64,
    /// Allocatable memory in bytes.
    pub memory_bytes: u64,
    /// What its pods request.
    pub pods_cpu_millis: u64,
    /// What its pods request.
    pub pods_memory_bytes: u64,
    /// Part of the node for VMs, in thousandths.
    pub fraction: u32,
    /// Most VMs.
    pub max_vms: Option<u32>,
    /// CPUs for VMs, in place of the fraction and of the pods' requests.
    pub explicit_cpu_millis: Option<u64>,
    /// Memory for VMs, likewise.
    pub explicit_memory_bytes: Option<u64>,
}

/// What a VM needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// With the VMM's overhead.
    pub cpu_millis: u64,
    /// With the VMM's overhead.
    pub memory_bytes: u64,
    /// None: any.
    pub arch: Option<String>,
    /// Labels that the node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Taints that are no hindrance.
    pub tolerations: Vec<Toleration>,
    /// The only node that will do.
    pub node_name: Option<String>,
}

impl Request {
    /// CPU and memory of a VM of a size, with its VMM's overhead.
    #[must_use]
    pub fn of_size(vcpus: u32, memory_mib: u64) -> Self {
        Self {
            cpu_millis: u64::from(vcpus) * 1000 + VM_OVERHEAD_CPU_MILLIS,
            memory_bytes: memory_mib.saturating_add(VM_OVERHEAD_MIB).saturating_mul(1 << 20),
            ..Self::default()
        }
    }
}

/// What VMs take of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// How many.
    pub vms: u32,
    /// Together.
    pub cpu_millis: u64,
    /// Together.
    pub memory_bytes: u64,
}

/// Which VM is on which node, with what was decided and is not yet seen in the API.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    vms: HashMap<String, (String, u64, u64)>,
    nodes: HashMap<String, Usage>,
}

impl Ledger {
    /// A VM takes its part of a node; what it had elsewhere is given back.
    pub fn assume(&mut self, uid: &str, node: &str, request: &Request) {
        let entry = (node.to_owned(), request.cpu_millis, request.memory_bytes);
        if self.vms.get(uid) == Some(&entry) {
            return;
        }
        self.release(uid);
        let usage = self.nodes.entry(node.to_owned()).or_default();
        usage.vms += 1;
        usage.cpu_millis += request.cpu_millis;
        usage.memory_bytes += request.memory_bytes;
        self.vms.insert(uid.to_owned(), entry);
    }

    /// A VM gives back what it had. Returns whether it had anything.
    pub fn release(&mut self, uid: &str) -> bool {
        let Some((node, cpu, memory)) = self.vms.remove(uid) else { return false };
        if let Some(usage) = self.nodes.get_mut(&node) {
            usage.vms -= 1;
            usage.cpu_millis -= cpu;
            usage.memory_bytes -= memory;
            if usage.vms == 0 {
                self.nodes.remove(&node);
            }
        }
        true
    }

    /// The node that a VM takes part of.
    #[must_use]
    pub fn node_of(&self, uid: &str) -> Option<&str> {
        self.vms.get(uid).map(|(node, ..)| node.as_str())
    }

    /// What VMs take of a node.
    #[must_use]
    pub fn usage(&self, node: &str) -> Usage {
        self.nodes.get(node).copied().unwrap_or_default()
    }
}

/// Why no node will do: how many nodes there are, and how many lack what. A node that lacks both CPU and memory counts for both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unschedulable {
    nodes: usize,
    reasons: BTreeMap<String, usize>,
    /// The only node that was looked at.
    pinned: Option<String>,
}

impl fmt::Display for Unschedulable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.pinned, self.nodes) {
            (Some(name), 0) => return write!(f, "spec.nodeName {name:?} is no node"),
            (None, 0) => {
                return f.write_str("no node has the label imp/enabled=true: label those that may run VMs");
            }
            _ => {}
        }
        write!(f, "0/{} nodes are available: ", self.nodes)?;
        for (n, (reason, count)) in self.reasons.iter().enumerate() {
            write!(f, "{}{count} {reason}", if n > 0 { ", " } else { "" })?;
        }
        match &self.pinned {
            Some(name) => write!(f, "; spec.nodeName allows {name:?} alone"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Unschedulable {}

/// Chooses a node.
///
/// # Errors
/// [`Unschedulable`] with what each enabled node lacks.
pub fn place(request: &Request, nodes: &[Node], ledger: &Ledger) -> Result<String, Unschedulable> {
    let considered =
        |node: &&Node| request.node_name.as_ref().map_or(node.enabled, |wanted| node.name == *wanted);
    let mut tally = Tally::default();
    let mut fitting = Vec::new();
    for node in nodes.iter().filter(considered) {
        let usage = ledger.usage(&node.name);
        match unfit(request, node, usage) {
            Ok(free) => fitting.push((std::cmp::Reverse(free), usage.vms, &node.name)),
            Err(lack) => tally.add(lack),
        }
    }
    let best = fitting.into_iter().min().map(|(_, _, name)| name.clone());
    best.ok_or_else(|| tally.sum(request))
}

/// Why a node will not do.
enum Lack {
    /// In words.
    Other(String),
    /// What is free of what there is too little of.
    Room { cpu_millis: Option<u64>, memory_bytes: Option<u64> },
}

/// What nodes lack. Of room, the most that one has is told: one text for a thousand nodes that are full to a different degree.
#[derive(Default)]
struct Tally {
    nodes: usize,
    reasons: BTreeMap<String, usize>,
    /// Nodes with too little, and the most that is free among them.
    cpu: (usize, u64),
    memory: (usize, u64),
}

impl Tally {
    fn add(&mut self, lack: Lack) {
        self.nodes += 1;
        match lack {
            Lack::Other(reason) => *self.reasons.entry(reason).or_default() += 1,
            Lack::Room { cpu_millis, memory_bytes } => {
                for ((count, most), free) in [(&mut self.cpu, cpu_millis), (&mut self.memory, memory_bytes)] {
                    *count += usize::from(free.is_some());
                    *most = free.unwrap_or(0).max(*most);
                }
            }
        }
    }

    fn sum(mut self, request: &Request) -> Unschedulable {
        if let (count @ 1.., most) = self.cpu {
            let needs = request.cpu_millis;
            let reason = format!("node(s) with insufficient cpu (needs {needs}m, at most {most}m free)");
            self.reasons.insert(reason, count);
        }
        if let (count @ 1.., most) = self.memory {
            let (needs, most) = (request.memory_bytes.div_ceil(1 << 20), most >> 20);
            let reason = format!("node(s) with insufficient memory (needs {needs}Mi, at most {most}Mi free)");
            self.reasons.insert(reason, count);
        }
        Unschedulable { nodes: self.nodes, reasons: self.reasons, pinned: request.node_name.clone() }
    }
}

/// Bytes of memory that are free, or why the node will not do.
fn unfit(request: &Request, node: &Node, usage: Usage) -> Result<u64, Lack> {
    match hindrance(request, node, usage) {
        Some(reason) => Err(Lack::Other(reason)),
        None => room(request, node, usage),
    }
}

/// What keeps a VM off a node however much room there is.
fn hindrance(request: &Request, node: &Node, usage: Usage) -> Option<String> {
    let fail = |reason: &str| Some(reason.to_owned());
    if !node.enabled {
        return fail("node(s) without the label imp/enabled=true");
    }
    if request.arch.as_ref().is_some_and(|arch| *arch != node.arch) {
        return Some(format!("node(s) of architecture {}", node.arch));
    }
    if let Some((key, value)) = request.node_selector.iter().find(|(k, v)| node.labels.get(*k) != Some(v)) {
        return Some(format!("node(s) without the label {key}={value} of the node selector"));
    }
    if node.unschedulable {
        return fail("node(s) cordoned");
    }
    if !node.ready {
        return fail("node(s) not Ready");
    }
    if let Some(pressure) = &node.pressure {
        return Some(format!("node(s) with {pressure}"));
    }
    let hard = |t: &&Taint| t.effect == "NoSchedule" || t.effect == "NoExecute";
    let untolerated = |t: &&Taint| !request.tolerations.iter().any(|toleration| toleration.tolerates(t));
    if let Some(taint) = node.taints.iter().filter(hard).find(untolerated) {
        return Some(format!("node(s) with untolerated taint {{{}: {}}}", taint.key, taint.value));
    }
    if node.max_vms.is_some_and(|max| usage.vms >= max) {
        return fail("node(s) with as many VMs as their profile's maxImpVMs");
    }
    None
}

fn room(request: &Request, node: &Node, usage: Usage) -> Result<u64, Lack> {
    let part =
        |whole: u64| u64::try_from(u128::from(whole) * u128::from(node.fraction) / 1000).unwrap_or(u64::MAX);
    let cpu = node
        .explicit_cpu_millis
        .unwrap_or_else(|| part(node.cpu_millis).saturating_sub(node.pods_cpu_millis));
    let memory = node
        .explicit_memory_bytes
        .unwrap_or_else(|| part(node.memory_bytes).saturating_sub(node.pods_memory_bytes));
    let free_cpu = cpu.saturating_sub(usage.cpu_millis);
    let free_memory = memory.saturating_sub(usage.memory_bytes);
    let too_little = |free: u64, needs: u64| Some(free).filter(|free| *free < needs);
    let cpu_millis = too_little(free_cpu, request.cpu_millis);
    let memory_bytes = too_little(free_memory, request.memory_bytes);
    if cpu_millis.is_some() || memory_bytes.is_some() {
        return Err(Lack::Room { cpu_millis, memory_bytes });
    }
    Ok(free_memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(name: &str, memory_mib: u64) -> Node {
        Node {
            name: name.into(),
            enabled: true,
            ready: true,
            arch: "amd64".into(),
            cpu_millis: 64_000,
            memory_bytes: memory_mib << 20,
            fraction: 1000,
            ..Node::default()
        }
    }

    fn fill(request: &Request, nodes: &[Node]) -> (usize, String) {
        let mut ledger = Ledger::default();
        for n in 0.. {
            match place(request, nodes, &ledger) {
                Ok(name) => ledger.assume(&n.to_string(), &name, request),
                Err(error) => return (n, error.to_string()),
            }
        }
        unreachable!("a node is never endless")
    }

    #[test]
    fn fr62_the_vmms_overhead_counts() {
        assert_eq!(Request::of_size(1, 1 << 60).memory_bytes, u64::MAX, "and not what is left of it");
        let (fit, message) = fill(&Request::of_size(1, 1024), &[node("n", 4096)]);
        assert_eq!(fit, 3, "and not 4");
        assert_eq!(
            message,
            "0/1 nodes are available: 1 node(s) with insufficient memory (needs 1088Mi, at most 832Mi free)"
        );
    }

    #[test]
    fn what_pods_request_is_not_free_and_a_fraction_holds() {
        let mut full = node("n", 4096);
        full.pods_memory_bytes = 2048 << 20;
        assert_eq!(fill(&Request::of_size(1, 448), &[full.clone()]).0, 4);
        full.fraction = 900;
        assert_eq!(fill(&Request::of_size(1, 448), &[full.clone()]).0, 3);
        full.explicit_memory_bytes = Some(512 << 20);
        full.explicit_cpu_millis = Some(8000);
        assert_eq!(fill(&Request::of_size(1, 448), &[full.clone()]).0, 1);
        full.max_vms = Some(0);
        assert!(fill(&Request::of_size(1, 448), &[full]).1.contains("maxImpVMs"));
    }

    #[test]
    fn every_hindrance_is_told_and_counted() {
        let mut cordoned = node("a", 4096);
        cordoned.unschedulable = true;
        let mut tainted = node("b", 4096);
        tainted.taints.push(Taint { key: "gpu".into(), value: "yes".into(), effect: "NoSchedule".into() });
        let mut lost = node("c", 4096);
        lost.ready = false;
        let nodes = [cordoned.clone(), tainted.clone(), lost, cordoned];
        let message = place(&Request::of_size(1, 128), &nodes, &Ledger::default()).unwrap_err().to_string();
        assert_eq!(
            message,
            "0/4 nodes are available: 2 node(s) cordoned, 1 node(s) not Ready, 1 node(s) with untolerated taint {gpu: yes}"
        );
        let mut request = Request::of_size(1, 128);
        request.tolerations.push(Toleration {
            key: "gpu".into(),
            operator: "Exists".into(),
            ..Default::default()
        });
        assert_eq!(place(&request, &nodes, &Ledger::default()), Ok("b".into()), "positive control");
        let none = place(&request, &[], &Ledger::default()).unwrap_err().to_string();
        assert!(none.contains("imp/enabled=true"), "{none}");
    }

    #[test]
    fn every_other_hindrance_keeps_a_vm_off() {
        let mut request = Request::of_size(2, 128);
        request.arch = Some("amd64".into());
        request.node_selector.insert("disk".into(), "fast".into());
        let mut good = node("n", 4096);
        good.labels.insert("disk".into(), "fast".into());
        assert_eq!(place(&request, &[good.clone()], &Ledger::default()), Ok("n".into()), "positive control");
        let check = |change: fn(&mut Node), expected: &str| {
            let mut node = good.clone();
            change(&mut node);
            let error = place(&request, &[node], &Ledger::default()).unwrap_err().to_string();
            assert_eq!(error, format!("0/1 nodes are available: 1 node(s) {expected}"));
        };
        check(|n| n.arch = "arm64".into(), "of architecture arm64");
        check(|n| n.labels.clear(), "without the label disk=fast of the node selector");
        check(|n| n.pressure = Some("DiskPressure".into()), "with DiskPressure");
        check(|n| n.max_vms = Some(0), "with as many VMs as their profile's maxImpVMs");
        check(|n| n.cpu_millis = 2049, "with insufficient cpu (needs 2050m, at most 2049m free)");
        let taint = |effect: &str| Taint { key: "k".into(), value: String::new(), effect: effect.into() };
        good.taints.push(taint("PreferNoSchedule"));
        assert_eq!(place(&request, &[good.clone()], &Ledger::default()), Ok("n".into()), "a wish only");
        good.taints.push(taint("NoExecute"));
        let error = place(&request, &[good], &Ledger::default()).unwrap_err().to_string();
        assert!(error.ends_with("1 node(s) with untolerated taint {k: }"), "{error}");
    }

    #[test]
    fn nodes_that_are_full_share_one_text() {
        let mut nodes: Vec<Node> = (1..=300).map(|n| node(&format!("n{n}"), n)).collect();
        nodes[0].cpu_millis = 100;
        let message = place(&Request::of_size(1, 1024), &nodes, &Ledger::default()).unwrap_err().to_string();
        assert_eq!(
            message,
            "0/300 nodes are available: 1 node(s) with insufficient cpu (needs 1050m, at most 100m free), \
             300 node(s) with insufficient memory (needs 1088Mi, at most 300Mi free)"
        );
    }

    #[test]
    fn most_memory_then_fewest_vms_then_the_name() {
        let request = Request::of_size(1, 128);
        let nodes = [node("b", 1024), node("c", 2048), node("a", 1024)];
        let mut ledger = Ledger::default();
        assert_eq!(place(&request, &nodes, &ledger), Ok("c".into()));
        assert_eq!(place(&request, &nodes[..1], &ledger), Ok("b".into()));
        let equal = [nodes[0].clone(), nodes[2].clone()];
        assert_eq!(place(&request, &equal, &ledger), Ok("a".into()), "the name");
        let small = |mib: u64| Request { memory_bytes: mib << 20, ..Request::default() };
        for (uid, node, mib) in [("1", "a", 64), ("2", "a", 64), ("3", "b", 128)] {
            ledger.assume(uid, node, &small(mib));
        }
        assert_eq!(place(&request, &equal, &ledger), Ok("b".into()), "fewer VMs");
    }

    #[test]
    fn the_ledger_knows_where_a_vm_is_and_moves_it() {
        let request = Request::of_size(1, 128);
        let mut ledger = Ledger::default();
        assert_eq!(ledger.node_of("u"), None);
        ledger.assume("u", "a", &request);
        ledger.assume("u", "b", &request);
        assert_eq!((ledger.node_of("u"), ledger.usage("a")), (Some("b"), Usage::default()));
        assert_eq!(ledger.usage("b").vms, 1);
        assert!(ledger.release("u") && !ledger.release("u"));
        assert_eq!((ledger.node_of("u"), ledger.usage("b")), (None, Usage::default()));
    }

    #[test]
    fn a_pinned_vm_goes_there_or_nowhere() {
        let nodes = [node("a", 1024), node("b", 4096)];
        let mut request = Request::of_size(1, 512);
        request.node_name = Some("a".into());
        assert_eq!(place(&request, &nodes, &Ledger::default()), Ok("a".into()));
        request.node_name = Some("z".into());
        let error = place(&request, &nodes, &Ledger::default()).unwrap_err().to_string();
        assert_eq!(error, "spec.nodeName \"z\" is no node");
        request.node_name = Some("b".into());
        let error = place(
            &request,
            &[nodes[0].clone(), Node { enabled: false, ..nodes[1].clone() }],
            &Ledger::default(),
        );
        assert_eq!(
            error.unwrap_err().to_string(),
            "0/1 nodes are available: 1 node(s) without the label imp/enabled=true; spec.nodeName allows \"b\" alone"
        );
    }

    #[test]
    fn tolerations_are_kubernetes() {
        let taint = Taint { key: "k".into(), value: "v".into(), effect: "NoExecute".into() };
        let t = |key: &str, operator: &str, value: &str, effect: &str| {
            let [key, operator, value, effect] = [key, operator, value, effect].map(str::to_owned);
            Toleration { key, operator, value, effect }.tolerates(&taint)
        };
        assert!(t("k", "Equal", "v", "") && t("k", "", "v", "NoExecute") && t("", "Exists", "", ""));
        assert!(!t("k", "Equal", "w", "") && !t("k", "Exists", "", "NoSchedule") && !t("", "Equal", "", ""));
    }

    proptest! {
        /// The order in which nodes are listed decides nothing.
        #[test]
        fn the_same_nodes_give_the_same_node(
            nodes in prop::collection::btree_map("[a-e]", 100u64..105, 0..5), by in 0usize..5, vcpus in 1u32..3,
        ) {
            let mut nodes: Vec<Node> = nodes.into_iter().map(|(name, mib)| node(&name, mib)).collect();
            let request = Request::of_size(vcpus, 38);
            let first = place(&request, &nodes, &Ledger::default());
            nodes.reverse();
            prop_assert_eq!(&place(&request, &nodes, &Ledger::default()), &first);
            if !nodes.is_empty() {
                let by = by % nodes.len();
                nodes.rotate_left(by);
                prop_assert_eq!(&place(&request, &nodes, &Ledger::default()), &first);
            }
        }

        /// Whatever comes and goes, no node is promised more than it has, and what is given back is all there again.
        #[test]
        fn a_node_is_never_promised_twice(sizes in prop::collection::vec((1u32..5, 128u64..2048, any::<bool>()), 1..60)) {
            let nodes = [node("a", 4096), node("b", 8192)];
            let mut ledger = Ledger::default();
            let mut live: Vec<String> = Vec::new();
            for (n, (vcpus, mib, leaves)) in sizes.into_iter().enumerate() {
                let request = Request::of_size(vcpus, mib);
                let uid = n.to_string();
                if let Ok(name) = place(&request, &nodes, &ledger) {
                    ledger.assume(&uid, &name, &request);
                    ledger.assume(&uid, &name, &request);
                    live.push(uid);
                }
                if leaves && !live.is_empty() {
                    ledger.release(&live.remove(0));
                }
                for node in &nodes {
                    prop_assert!(ledger.usage(&node.name).memory_bytes <= node.memory_bytes);
                    prop_assert!(ledger.usage(&node.name).cpu_millis <= node.cpu_millis);
                }
            }
            for uid in live {
                ledger.release(&uid);
            }
            prop_assert_eq!(ledger.usage("a"), Usage::default());
            prop_assert_eq!(ledger.usage("b"), Usage::default());
        }
    }
}
