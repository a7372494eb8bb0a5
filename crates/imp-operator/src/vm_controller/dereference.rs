//! Fetches what a VM names, from what is watched. No judgement.

use super::world::{Binding, Reservation, World};
use imp_api::{ImpNetwork, ImpVM, ImpVMClass, ImpVMTemplate, effective};
use k8s_openapi::api::core::v1::Node;
use kube::{ResourceExt as _, runtime::reflector::ObjectRef};
use std::sync::Arc;

/// What a VM names.
#[derive(Debug, Default)]
pub(super) struct Referenced {
    pub(super) template: Option<Arc<ImpVMTemplate>>,
    pub(super) class: Option<Arc<ImpVMClass>>,
    pub(super) network: Option<Arc<ImpNetwork>>,
}

pub(super) fn dereference(world: &World, vm: &ImpVM) -> Referenced {
    let namespace = vm.namespace().unwrap_or_default();
    let template = vm
        .spec
        .template_ref
        .as_ref()
        .and_then(|r| world.templates.get(&ObjectRef::new(&r.name).within(&namespace)));
    let spec = template.as_ref().map(|t| &t.spec);
    let class =
        effective::class_name(&vm.spec, spec).and_then(|name| world.classes.get(&ObjectRef::new(name)));
    let network = effective::network_name(&vm.spec, spec)
        .and_then(|name| world.networks.get(&ObjectRef::new(name).within(&namespace)));
    Referenced { template, class, network }
}

/// The node of a bound VM, and whether it is bound.
#[derive(Debug)]
pub(super) enum NodeOf {
    Unbound,
    /// The object is gone.
    Gone(String),
    There(Arc<Node>),
}

pub(super) fn node(world: &World, vm: &ImpVM) -> NodeOf {
    let Some(name) = vm.status.as_ref().and_then(|s| s.node_name.clone()) else { return NodeOf::Unbound };
    world.nodes.get(&ObjectRef::new(&name)).map_or(NodeOf::Gone(name), NodeOf::There)
}

/// The binding that stands in a VM's status.
pub(super) fn bound(world: &World, vm: &ImpVM) -> Option<Binding> {
    let status = vm.status.as_ref()?;
    let node = status.node_name.clone()?;
    // Which network it is in is not in the status: it is the one that is named now.
    let namespace = vm.namespace().unwrap_or_default();
    let template = vm.spec.template_ref.as_ref();
    let template = template.and_then(|r| world.templates.get(&ObjectRef::new(&r.name).within(&namespace)));
    let network = effective::network_name(&vm.spec, template.as_ref().map(|t| &t.spec)).unwrap_or_default();
    let reservation = status.ip.as_ref().and_then(|ip| ip.parse().ok()).map(|address| Reservation {
        network: (namespace.clone(), network.to_owned()),
        address,
        mac: status.mac_address.clone().unwrap_or_default(),
    });
    Some(Binding { node, reservation })
}
