//! From raw objects to what later steps alone accept.

use super::dereference::Referenced;
use imp_api::{
    Arch, EffectiveVm, ImpVM, ImpVMClassSpec, OnExhaustion, RestartMode, RestartPolicy, effective,
    names::Reason, not_honoured,
};
use imp_core::{
    ipam,
    placement::{Request, Toleration},
    restart::{Exhaustion, Policy},
};
use ipnet::Ipv4Net;
use std::{net::Ipv4Addr, time::Duration};

/// A VM whose references lead somewhere.
#[derive(Debug)]
pub(super) struct Validated {
    pub(super) effective: EffectiveVm,
    pub(super) request: Request,
    pub(super) network: Option<Network>,
    pub(super) policy: Option<Policy>,
}

/// A network with its texts read.
#[derive(Clone, Debug)]
pub(super) struct Network {
    pub(super) key: (String, String),
    pub(super) subnet: Ipv4Net,
    pub(super) gateway: Ipv4Addr,
}

/// Why a VM cannot be bound.
#[derive(Debug)]
pub(super) struct Invalid {
    pub(super) reason: Reason,
    pub(super) message: String,
    /// Only an edit of the VM helps; else another object may come.
    pub(super) terminal: bool,
}

pub(super) fn validate(vm: &ImpVM, referenced: &Referenced) -> Result<Validated, Invalid> {
    let class = referenced.class.as_ref().map(|c| &c.spec);
    let template = referenced.template.as_ref().map(|t| &t.spec);
    let effective = effective(&vm.spec, class, template).map_err(|error| {
        let missing = error.is_missing_reference();
        let reason = if missing { Reason::ReferenceNotFound } else { Reason::SpecInvalid };
        Invalid { reason, message: error.to_string(), terminal: !missing }
    })?;
    let network = effective.network.as_ref().map(|name| network(vm, name, referenced)).transpose()?;
    let mut request = Request::of_size(effective.vcpus, effective.memory_mib);
    request.arch = match effective.arch {
        Arch::Multi => None,
        Arch::Amd64 => Some("amd64".to_owned()),
        Arch::Arm64 => Some("arm64".to_owned()),
    };
    request.node_selector = effective.node_selector.clone();
    request.tolerations = effective
        .tolerations
        .iter()
        .map(|t| Toleration {
            key: t.key.clone().unwrap_or_default(),
            operator: t.operator.clone().unwrap_or_default(),
            value: t.value.clone().unwrap_or_default(),
            effect: t.effect.clone().unwrap_or_default(),
        })
        .collect();
    request.node_name = vm.spec.node_name.clone().filter(|name| !name.is_empty());
    let policy = effective.restart_policy.as_ref().map(policy);
    Ok(Validated { effective, request, network, policy })
}

fn network(vm: &ImpVM, name: &str, referenced: &Referenced) -> Result<Network, Invalid> {
    let namespace = vm.metadata.namespace.clone().unwrap_or_default();
    let wait = |reason, message| Invalid { reason, message, terminal: false };
    let Some(network) = &referenced.network else {
        let message = format!(
            "ImpNetwork {name:?} does not exist in namespace {namespace}: create it or change spec.networkRef"
        );
        return Err(wait(Reason::ReferenceNotFound, message));
    };
    let bad = |what: &str, text: &str| {
        wait(Reason::SpecInvalid, format!("ImpNetwork {name:?}: {what} {text:?} makes no sense"))
    };
    let subnet: Ipv4Net = network.spec.subnet.parse().map_err(|_| bad("subnet", &network.spec.subnet))?;
    let wanted = network.spec.gateway.as_ref().filter(|g| !g.is_empty());
    let wanted = wanted.map(|g| g.parse().map_err(|_| bad("gateway", g))).transpose()?;
    let gateway = ipam::gateway(subnet.trunc(), wanted)
        .map_err(|error| wait(Reason::SpecInvalid, format!("ImpNetwork {name:?}: {error}")))?;
    Ok(Network { key: (namespace, name.to_owned()), subnet: subnet.trunc(), gateway })
}

/// The texts were checked by the API server; one that cannot be read falls back to the default.
fn policy(policy: &RestartPolicy) -> Policy {
    let backoff = policy.backoff.clone().unwrap_or_default();
    let or = |text: &imp_api::DurationString, default: Duration| text.parse().unwrap_or(default);
    let default = Policy::default();
    Policy {
        reschedule: policy.mode == RestartMode::Reschedule,
        max_retries: u32::try_from(backoff.max_retries).unwrap_or(0),
        initial_delay: or(&backoff.initial_delay, default.initial_delay),
        max_delay: or(&backoff.max_delay, default.max_delay),
        on_exhaustion: match policy.on_exhaustion {
            OnExhaustion::Fail => Exhaustion::Fail,
            OnExhaustion::ManualReset => Exhaustion::ManualReset,
            OnExhaustion::CoolDown => {
                Exhaustion::CoolDown(or(&policy.cool_down_period, Duration::from_secs(3600)))
            }
        },
    }
}

/// What a class of a bound VM takes of its node; for VMs whose references are gone nothing is known.
pub(super) fn request_of(class: &ImpVMClassSpec) -> Option<Request> {
    Some(Request::of_size(u32::try_from(class.vcpu).ok()?, u64::try_from(class.memory_mib).ok()?))
}

/// Fields that are set and have no effect, in one sentence; `None` when there is none.
pub(super) fn not_honoured_text(vm: &ImpVM, referenced: &Referenced) -> Option<String> {
    let fields = not_honoured(
        &vm.spec,
        referenced.class.as_ref().map(|c| &c.spec),
        referenced.template.as_ref().map(|t| &t.spec),
        referenced.network.as_ref().map(|n| &n.spec),
    );
    let texts: Vec<String> = fields.iter().map(ToString::to_string).collect();
    (!texts.is_empty()).then(|| format!("These fields have no effect: {}", texts.join(", ")))
}
