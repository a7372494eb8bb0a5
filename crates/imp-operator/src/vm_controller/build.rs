//! What a VM's status should say, as far as it is the operator's. Decisions are `imp-core`'s.

use super::{
    dereference::{self, NodeOf, Referenced},
    validate::{self, Invalid, Validated},
    world::{Binding, Reservation, World},
};
use imp_api::{
    ImpVM, ImpVMStatus, VMLifecycle, VMPhase,
    names::{ConditionType, Reason, annotation, label},
};
use imp_core::{
    expiry::{self, Expiry},
    ipam,
    placement::{self, DEFAULT_FRACTION, Node, Taint},
    quantity,
    restart::{self, Decision},
};
use k8s_openapi::{
    api::core::v1 as core,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;

/// Conditions that the operator owns.
const OWN: [ConditionType; 3] =
    [ConditionType::Scheduled, ConditionType::NodeHealthy, ConditionType::SpecHonored];
/// Taint by which a person or cloud says that a node is off for good (KEP-2268): nothing runs there any more.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// What follows from a look at a VM.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// The operator's part of the status.
    pub(super) status: ImpVMStatus,
    /// It was bound just now.
    pub(super) bound: bool,
    /// An event.
    pub(super) event: Option<Note>,
    /// Delete the object.
    pub(super) delete: bool,
    /// Take the reset annotation off.
    pub(super) reset_annotation: bool,
    /// Look again at this time, in Unix seconds.
    pub(super) again_at: Option<i64>,
}

/// An event. Those of one reason and action become one with a count.
#[derive(Debug)]
pub(super) struct Note {
    pub(super) warning: bool,
    pub(super) reason: Reason,
    pub(super) action: Reason,
    pub(super) text: String,
}

impl Note {
    pub(super) fn new(warning: bool, reason: Reason, text: impl Into<String>) -> Self {
        Self { warning, reason, action: reason, text: text.into() }
    }
}

/// What follows from a deletion.
#[derive(Debug)]
pub(super) enum Deletion {
    /// Nothing of the VM can be left.
    Remove { warning: Option<Note> },
    /// The agent has work to do.
    Wait(Box<ImpVMStatus>),
}

/// The operator's part of a status.
pub(super) fn own(status: Option<&ImpVMStatus>) -> ImpVMStatus {
    let Some(status) = status.cloned() else { return ImpVMStatus::default() };
    let unbound = status.node_name.is_none();
    let phase = status.phase.filter(|phase| match phase {
        VMPhase::Pending | VMPhase::Scheduled | VMPhase::RetryExhausted => true,
        VMPhase::Failed => unbound,
        _ => false,
    });
    ImpVMStatus {
        message: status.message.filter(|_| phase.is_some()),
        phase,
        node_name: status.node_name,
        ip: status.ip,
        mac_address: status.mac_address,
        restart_count: status.restart_count,
        retries_from: status.retries_from,
        next_retry_after: status.next_retry_after,
        exhausted_at: status.exhausted_at,
        scheduled_at: status.scheduled_at,
        expires_at: status.expires_at,
        conditions: status
            .conditions
            .into_iter()
            .filter(|c| OWN.iter().any(|own| own.as_str() == c.type_))
            .collect(),
        ..ImpVMStatus::default()
    }
}

struct Builder<'a> {
    vm: &'a ImpVM,
    now: Timestamp,
    plan: Plan,
}

impl Builder<'_> {
    /// Sets a condition; the time of its last change stays where its status does.
    fn condition(&mut self, kind: ConditionType, status: bool, reason: Reason, message: &str) {
        let conditions = &mut self.plan.status.conditions;
        let status = if status { "True" } else { "False" };
        let old = conditions.iter().find(|c| c.type_ == kind.as_str() && c.status == status);
        let since = old.map_or(Time(self.now), |c| c.last_transition_time.clone());
        conditions.retain(|c| c.type_ != kind.as_str());
        conditions.push(Condition {
            type_: kind.as_str().to_owned(),
            status: status.to_owned(),
            reason: reason.as_str().to_owned(),
            message: message.to_owned(),
            last_transition_time: since,
            observed_generation: self.vm.metadata.generation,
        });
        // Always in the same order, so that equal statuses are equal.
        conditions.sort_by_key(|c| OWN.iter().position(|own| own.as_str() == c.type_));
    }

    fn phase(&mut self, phase: VMPhase, message: Option<String>) {
        self.plan.status.phase = Some(phase);
        self.plan.status.message = message;
    }

    /// Whether the object already says this of being scheduled.
    fn says(&self, reason: Reason, message: &str) -> bool {
        let conditions = self.vm.status.iter().flat_map(|s| &s.conditions);
        conditions
            .filter(|c| c.type_ == ConditionType::Scheduled.as_str())
            .any(|c| c.reason == reason.as_str() && c.message == message)
    }

    fn unscheduled(&mut self, phase: VMPhase, reason: Reason, message: &str) {
        if !self.says(reason, message) {
            let event =
                if reason == Reason::SpecInvalid { Reason::SpecInvalid } else { Reason::Unschedulable };
            self.plan.event = Some(Note { action: reason, ..Note::new(true, event, message) });
        }
        self.condition(ConditionType::Scheduled, false, reason, message);
        self.phase(phase, Some(message.to_owned()));
    }

    fn at(&mut self, when: i64) {
        let sooner = self.plan.again_at.map_or(when, |known| known.min(when));
        self.plan.again_at = Some(sooner);
    }
}

/// Decides everything about a VM that is not being deleted.
pub(super) fn plan(
    vm: &ImpVM,
    referenced: &Referenced,
    validated: &Result<Validated, Invalid>,
    world: &World,
    now: Timestamp,
) -> Plan {
    let plan = Plan { status: own(vm.status.as_ref()), ..Plan::default() };
    let mut builder = Builder { vm, now, plan };
    builder.plan.reset_annotation = reset_requested(vm);
    honoured(&mut builder, referenced);
    match world.binding(vm).or_else(|| dereference::bound(world, vm)) {
        Some(binding) => bound(&mut builder, validated, world, binding),
        None => unbound(&mut builder, validated, world),
    }
    builder.plan
}

fn honoured(builder: &mut Builder<'_>, referenced: &Referenced) {
    match validate::not_honoured_text(builder.vm, referenced) {
        Some(text) => builder.condition(ConditionType::SpecHonored, false, Reason::FieldsNotHonored, &text),
        None => {
            let text = "Every field that is set has its effect";
            builder.condition(ConditionType::SpecHonored, true, Reason::AllFieldsHonored, text);
        }
    }
}

fn reset_requested(vm: &ImpVM) -> bool {
    vm.annotations().get(annotation::RESET_RETRIES).is_some_and(|value| value == "true")
}

fn unbound(builder: &mut Builder<'_>, validated: &Result<Validated, Invalid>, world: &World) {
    let validated = match validated {
        Ok(validated) => validated,
        Err(invalid) => {
            let phase = if invalid.terminal { VMPhase::Failed } else { VMPhase::Pending };
            return builder.unscheduled(phase, invalid.reason, &invalid.message);
        }
    };
    let _alone = world.placing();
    world.settle(|vm| {
        let referenced = dereference::dereference(world, vm);
        let over = vm.status.as_ref().and_then(|s| s.phase).is_some_and(|p| p == VMPhase::Succeeded);
        referenced.class.as_ref().filter(|_| !over).and_then(|class| validate::request_of(&class.spec))
    });
    let reservation = match validated.network.as_ref().map(|network| reserve(builder.vm, network, world)) {
        None => None,
        Some(Ok(reservation)) => Some(reservation),
        Some(Err(error)) => {
            let message = format!("No address: {error}");
            return builder.unscheduled(VMPhase::Pending, Reason::AddressesExhausted, &message);
        }
    };
    let nodes = nodes(world);
    let node = match placement::place(&validated.request, &nodes, &world.ledger()) {
        Ok(node) => node,
        Err(error) => {
            return builder.unscheduled(VMPhase::Pending, Reason::NoNodeAvailable, &error.to_string());
        }
    };
    let binding = Binding { node, reservation };
    world.promise(builder.vm, binding.clone(), Some(&validated.request));
    write_binding(builder, &binding);
    builder.plan.status.restart_count.get_or_insert(0);
    builder.plan.status.scheduled_at.get_or_insert(Time(builder.now));
    builder.phase(VMPhase::Scheduled, None);
    builder.condition(ConditionType::NodeHealthy, true, Reason::NodeReady, "The node is Ready");
    builder.plan.bound = true;
    builder.plan.event = Some(Note::new(false, Reason::Scheduled, format!("Bound to node {}", binding.node)));
}

fn reserve(
    vm: &ImpVM,
    network: &validate::Network,
    world: &World,
) -> Result<Reservation, ipam::AddressError> {
    let (addresses, macs) = world.reserved(vm, &network.key);
    let address = ipam::choose(network.subnet, network.gateway, &addresses)?;
    let mac = ipam::mac(&vm.uid().unwrap_or_default(), &macs);
    Ok(Reservation { network: network.key.clone(), address, mac })
}

fn write_binding(builder: &mut Builder<'_>, binding: &Binding) {
    let status = &mut builder.plan.status;
    status.node_name = Some(binding.node.clone());
    status.ip = binding.reservation.as_ref().map(|r| r.address.to_string());
    status.mac_address = binding.reservation.as_ref().map(|r| r.mac.clone());
    let message = format!("Assigned to node {}", binding.node);
    builder.condition(ConditionType::Scheduled, true, Reason::NodeAssigned, &message);
}

fn bound(builder: &mut Builder<'_>, validated: &Result<Validated, Invalid>, world: &World, binding: Binding) {
    write_binding(builder, &binding);
    let phase = builder.vm.status.as_ref().and_then(|s| s.phase);
    health(builder, world, phase);
    let effective = validated.as_ref().ok().map(|v| &v.effective);
    let running_at = builder.vm.status.as_ref().and_then(|s| s.running_at.as_ref()).map(|t| t.0.as_second());
    match expiry::decide(effective.and_then(|e| e.expire_after), running_at, builder.now.as_second()) {
        Expiry::Never => builder.plan.status.expires_at = None,
        Expiry::At(at) => {
            builder.plan.status.expires_at = Timestamp::from_second(at).ok().map(Time);
            builder.at(at);
        }
        Expiry::Due => {
            builder.plan.delete = true;
            return;
        }
    }
    let over = matches!(phase, Some(VMPhase::Succeeded | VMPhase::Failed | VMPhase::RetryExhausted));
    let goes_on = over && again(builder, validated.as_ref().ok(), phase == Some(VMPhase::Succeeded));
    let request = validated.as_ref().ok().map(|v| &v.request).filter(|_| !over || goes_on);
    if validated.is_ok() || over {
        world.promise(builder.vm, binding, request);
    }
}

/// Whether the node of a bound VM is well.
fn health(builder: &mut Builder<'_>, world: &World, phase: Option<VMPhase>) {
    let node = dereference::node(world, builder.vm);
    match node {
        NodeOf::Unbound => {}
        NodeOf::There(node) if ready(&node) => {
            builder.condition(ConditionType::NodeHealthy, true, Reason::NodeReady, "The node is Ready");
        }
        NodeOf::There(_) => {
            let text = "The node is not Ready: the VM may still run there; it is not started elsewhere";
            builder.condition(ConditionType::NodeHealthy, false, Reason::NodeNotReady, text);
        }
        NodeOf::Gone(name) => {
            let text = format!("Node {name} no longer exists: the VM and its disk are lost with it");
            builder.condition(ConditionType::NodeHealthy, false, Reason::NodeLost, &text);
            let lost = !matches!(phase, Some(VMPhase::Succeeded | VMPhase::Failed | VMPhase::RetryExhausted));
            if lost {
                builder.phase(VMPhase::Failed, Some(text.clone()));
                builder.plan.event = Some(Note::new(true, Reason::NodeLost, text));
            }
        }
    }
}

/// A VM that ended: whether it goes on, now or later.
fn again(builder: &mut Builder<'_>, validated: Option<&Validated>, succeeded: bool) -> bool {
    let status = builder.vm.status.clone().unwrap_or_default();
    let count = status.restart_count.unwrap_or(0);
    let used = count - status.retries_from.unwrap_or(0);
    let ended = status.finished_at.as_ref().or(status.started_at.as_ref()).or(status.scheduled_at.as_ref());
    let input = restart::Input {
        policy: validated.and_then(|v| v.policy),
        persistent: builder.vm.spec.lifecycle == VMLifecycle::Persistent,
        succeeded,
        retries: u32::try_from(used).unwrap_or(0),
        ended_at: ended.map_or(0, |t| t.0.as_second()),
        exhausted_at: status.exhausted_at.as_ref().map(|t| t.0.as_second()),
        reset: reset_requested(builder.vm),
        now: builder.now.as_second(),
    };
    match restart::decide(&input) {
        Decision::Nothing => false,
        Decision::Wait(until) => {
            builder.plan.status.next_retry_after = Timestamp::from_second(until).ok().map(Time);
            builder.at(until);
            true
        }
        Decision::Exhausted { manual } => {
            let how =
                if manual { "annotate it with imp/reset-retries=true to go on" } else { "it cools down" };
            let text = format!("All {used} retries are used up: {how}");
            builder.plan.status.exhausted_at = Some(Time(builder.now));
            builder.plan.status.next_retry_after = None;
            builder.phase(VMPhase::RetryExhausted, Some(text.clone()));
            builder.plan.event = Some(Note::new(true, Reason::RetryExhausted, text));
            // What comes next is decided on the object as it is then.
            builder.at(builder.now.as_second() + 1);
            !manual
        }
        Decision::Start { fresh, .. } => {
            let next = count + 1;
            builder.plan.status.restart_count = Some(next);
            if fresh {
                builder.plan.status.retries_from = Some(next);
            }
            builder.plan.status.next_retry_after = None;
            builder.plan.status.exhausted_at = None;
            builder.phase(VMPhase::Scheduled, None);
            let what = if fresh {
                "the count of retries begins anew".to_owned()
            } else {
                format!("retry {}", used + 1)
            };
            let note = format!("Starting attempt {next} on the same disk ({what})");
            builder.plan.event = Some(Note::new(false, Reason::Restarting, note));
            true
        }
    }
}

/// A VM that is being deleted.
pub(super) fn deletion(vm: &ImpVM, node: &NodeOf) -> Deletion {
    let conditions = vm.status.iter().flat_map(|s| &s.conditions);
    let released =
        conditions.filter(|c| c.type_ == ConditionType::NodeReleased.as_str()).any(|c| c.status == "True");
    match node {
        NodeOf::Unbound => Deletion::Remove { warning: None },
        NodeOf::There(_) if released => Deletion::Remove { warning: None },
        NodeOf::Gone(name) => {
            let note = format!("Node {name} no longer exists; what was there of the VM is taken to be gone");
            Deletion::Remove { warning: (!released).then(|| Note::new(true, Reason::NodeLost, note)) }
        }
        NodeOf::There(node) if out_of_service(node) => {
            let note = format!(
                "Node {} is out of service; what was there of the VM is taken to be gone",
                node.name_any()
            );
            Deletion::Remove { warning: Some(Note::new(true, Reason::NodeLost, note)) }
        }
        NodeOf::There(node) => {
            let plan = Plan { status: own(vm.status.as_ref()), ..Plan::default() };
            let mut builder = Builder { vm, now: Timestamp::now(), plan };
            if ready(node) {
                builder.condition(ConditionType::NodeHealthy, true, Reason::NodeReady, "The node is Ready");
            } else {
                let text = "The node is not Ready: the VM is removed when it is back; delete the Node, or taint it \
                            node.kubernetes.io/out-of-service, if it is off for good";
                builder.condition(ConditionType::NodeHealthy, false, Reason::NodeNotReady, text);
            }
            Deletion::Wait(Box::new(builder.plan.status))
        }
    }
}

fn ready(node: &core::Node) -> bool {
    condition(node, "Ready")
}

fn condition(node: &core::Node, kind: &str) -> bool {
    let conditions = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    conditions.filter(|c| c.type_ == kind).any(|c| c.status == "True")
}

fn out_of_service(node: &core::Node) -> bool {
    node.spec.iter().flat_map(|s| s.taints.iter().flatten()).any(|t| t.key == OUT_OF_SERVICE)
}

/// Nodes as placement sees them.
fn nodes(world: &World) -> Vec<Node> {
    let config = world.configs.get(&ObjectRef::new(imp_api::names::CONFIG_NAME));
    let cluster = config.as_ref().and_then(|c| c.spec.capacity.as_ref()).map(|c| c.default_fraction.clone());
    let cluster = cluster.and_then(|text| fraction(&text)).unwrap_or(DEFAULT_FRACTION);
    world.nodes.state().iter().map(|node| seen(node, world, cluster)).collect()
}

fn seen(node: &core::Node, world: &World, cluster: u32) -> Node {
    let name = node.name_any();
    let profile = world.profiles.get(&ObjectRef::new(&name)).map(|p| p.spec.clone());
    let positive = |value: Option<i32>| value.and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0);
    let explicit_cpus = positive(profile.as_ref().map(|p| p.vcpu_capacity));
    let explicit_mib = profile.as_ref().and_then(|p| u64::try_from(p.memory_mib).ok());
    let own_fraction = profile.as_ref().and_then(|p| fraction(p.capacity_fraction.as_ref()?));
    let allocatable = |resource: &str| {
        let quantity = node.status.as_ref()?.allocatable.as_ref()?.get(resource)?;
        Some(quantity.0.clone())
    };
    let (pods_cpu_millis, pods_memory_bytes) = world.pods_on(&name);
    let pressures = ["MemoryPressure", "DiskPressure", "PIDPressure"];
    let labels = node.metadata.labels.clone().unwrap_or_default();
    Node {
        enabled: labels.get(label::ENABLED).is_some_and(|value| value == "true"),
        arch: labels.get("kubernetes.io/arch").cloned().unwrap_or_default(),
        labels,
        taints: node
            .spec
            .iter()
            .flat_map(|s| s.taints.iter().flatten())
            .map(|t| Taint {
                key: t.key.clone(),
                value: t.value.clone().unwrap_or_default(),
                effect: t.effect.clone(),
            })
            .collect(),
        ready: ready(node),
        unschedulable: node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false),
        pressure: pressures.into_iter().find(|kind| condition(node, kind)).map(str::to_owned),
        cpu_millis: allocatable("cpu").and_then(|q| quantity::parse_cpu_millis(&q).ok()).unwrap_or(0),
        memory_bytes: allocatable("memory").and_then(|q| quantity::parse_bytes(&q).ok()).unwrap_or(0),
        pods_cpu_millis,
        pods_memory_bytes,
        fraction: own_fraction.unwrap_or(cluster),
        max_vms: positive(profile.as_ref().map(|p| p.max_imp_vms)),
        explicit_cpu_millis: explicit_cpus.map(|cpus| u64::from(cpus) * 1000),
        // As the earlier Imp: CPUs given and memory not means that nothing fits.
        explicit_memory_bytes: explicit_cpus.map(|_| explicit_mib.unwrap_or(0) << 20),
        name,
    }
}

/// "0.85" in thousandths; the API server has checked that it is 0 to 1.
fn fraction(text: &str) -> Option<u32> {
    let millis = quantity::parse_cpu_millis(text).ok()?;
    u32::try_from(millis).ok().filter(|m| *m <= 1000)
}
