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
    /// Whether it tolerates `taint` (k8s.io/api/core/v1 Toleration.ToleratesTaint).
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
            memory_bytes: (memory_mib + VM_OVERHEAD_MIB) << 20,
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

    /// What VMs take of a node.
    #[must_use]
    pub fn usage(&self, node: &str) -> Usage {
        self.nodes.get(node).copied().unwrap_or_default()
    }
}

/// Why no node will do: how many nodes there are, and how many lack what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unschedulable {
    nodes: usize,
    reasons: BTreeMap<String, usize>,
}

impl fmt::Display for Unschedulable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nodes == 0 {
            return f.write_str("no node has the label imp/enabled=true: label those that may run VMs");
        }
        write!(f, "0/{} nodes are available: ", self.nodes)?;
        for (n, (reason, count)) in self.reasons.iter().enumerate() {
            write!(f, "{}{count} {reason}", if n > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Unschedulable {}

/// Chooses a node.
///
/// # Errors
/// [`Unschedulable`] with what each enabled node lacks.
pub fn place(request: &Request, nodes: &[Node], ledger: &Ledger) -> Result<String, Unschedulable> {
    if let Some(wanted) = &request.node_name {
        let named: Vec<&Node> = nodes.iter().filter(|node| node.name == *wanted).collect();
        if named.is_empty() {
            let reason = format!("spec.nodeName {wanted:?} is no node");
            return Err(Unschedulable { nodes: 1, reasons: BTreeMap::from([(reason, 1)]) });
        }
        return best(request, &named, ledger);
    }
    let enabled: Vec<&Node> = nodes.iter().filter(|node| node.enabled).collect();
    best(request, &enabled, ledger)
}

fn best(request: &Request, nodes: &[&Node], ledger: &Ledger) -> Result<String, Unschedulable> {
    let mut reasons = BTreeMap::new();
    let mut fitting = Vec::new();
    for node in nodes {
        match unfit(request, node, ledger.usage(&node.name)) {
            Ok(free) => fitting.push((std::cmp::Reverse(free), ledger.usage(&node.name).vms, &node.name)),
            Err(reason) => *reasons.entry(reason).or_default() += 1,
        }
    }
    let best = fitting.into_iter().min().map(|(_, _, name)| name.clone());
    best.ok_or(Unschedulable { nodes: nodes.len(), reasons })
}

/// Bytes of memory that are free, or why the node will not do.
fn unfit(request: &Request, node: &Node, usage: Usage) -> Result<u64, String> {
    let fail = |reason: &str| Err(reason.to_owned());
    if !node.enabled {
        return fail("node(s) without the label imp/enabled=true");
    }
    if request.arch.as_ref().is_some_and(|arch| *arch != node.arch) {
        return Err(format!("node(s) of architecture {}", node.arch));
    }
    if let Some((key, value)) = request.node_selector.iter().find(|(k, v)| node.labels.get(*k) != Some(v)) {
        return Err(format!("node(s) without the label {key}={value} of the node selector"));
    }
    if node.unschedulable {
        return fail("node(s) cordoned");
    }
    if !node.ready {
        return fail("node(s) not Ready");
    }
    if let Some(pressure) = &node.pressure {
        return Err(format!("node(s) with {pressure}"));
    }
    let hard = |t: &&Taint| t.effect == "NoSchedule" || t.effect == "NoExecute";
    let untolerated = |t: &&Taint| !request.tolerations.iter().any(|toleration| toleration.tolerates(t));
    if let Some(taint) = node.taints.iter().filter(hard).find(untolerated) {
        return Err(format!("node(s) with untolerated taint {{{}: {}}}", taint.key, taint.value));
    }
    if node.max_vms.is_some_and(|max| usage.vms >= max) {
        return fail("node(s) with as many VMs as their profile's maxImpVMs");
    }
    room(request, node, usage)
}

fn room(request: &Request, node: &Node, usage: Usage) -> Result<u64, String> {
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
    if free_cpu < request.cpu_millis {
        return Err(format!(
            "node(s) with insufficient cpu (needs {}m, {free_cpu}m free)",
            request.cpu_millis
        ));
    }
    if free_memory < request.memory_bytes {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        return Err(format!(
            "node(s) with insufficient memory (needs {}Mi, {}Mi free)",
            mib(request.memory_bytes),
            free_memory >> 20
        ));
    }
    Ok(free_memory - request.memory_bytes)
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
        let (fit, message) = fill(&Request::of_size(1, 1024), &[node("n", 4096)]);
        assert_eq!(fit, 3, "and not 4");
        assert_eq!(
            message,
            "0/1 nodes are available: 1 node(s) with insufficient memory (needs 1088Mi, 832Mi free)"
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
    fn a_pinned_vm_goes_there_or_nowhere() {
        let nodes = [node("a", 1024), node("b", 4096)];
        let mut request = Request::of_size(1, 512);
        request.node_name = Some("a".into());
        assert_eq!(place(&request, &nodes, &Ledger::default()), Ok("a".into()));
        request.node_name = Some("z".into());
        let error = place(&request, &nodes, &Ledger::default()).unwrap_err().to_string();
        assert!(error.contains("spec.nodeName \"z\" is no node"), "{error}");
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
