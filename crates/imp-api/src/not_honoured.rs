//! Fields that are accepted but not acted on yet. The operator names them in condition SpecHonored, so that nothing is
//! ignored in silence; whoever implements one takes it out of here and out of the field's doc comment.

use k8s_openapi::api::core::v1::{EnvVar, Toleration};

use crate::{
    FieldPath, ImpNetworkSpec, ImpVMClassSpec, ImpVMSpec, ImpVMTemplateSpec, IpamProvider, ProbeSpec,
    RestartMode, RestartPolicy, VMDesiredState,
};

/// A field that is set but not acted on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NotHonoured {
    /// Path of the field, of the VM unless it names another object: `spec.userData`, `ImpNetwork spec.groups`.
    pub path: String,
    /// What will implement it, as the end of the sentence "needs …".
    pub reason: &'static str,
}

impl std::fmt::Display for NotHonoured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (needs {})", self.path, self.reason)
    }
}

const SNAPSHOTS: &str = "snapshots, which do not exist yet";
const SUSPEND: &str = "suspend and resume, which do not exist yet";
const LAYERS: &str = "image layers, which do not exist yet";
const RUNNERS: &str = "runner pools, which do not exist yet";
const GROUPS: &str = "network groups, which do not exist yet";
const CILIUM: &str = "the Cilium integration, which does not exist yet";
const HTTP_CHECK: &str = "checks from outside the guest, which do not exist yet; use readinessProbe.http";

impl ImpVMSpec {
    /// Fields of the VM itself that are set but not acted on, in the order of the spec.
    pub fn not_honoured(&self) -> Vec<NotHonoured> {
        let mut found = Found { prefix: "spec", fields: Vec::new() };
        found.note(self.snapshot_ref.is_some(), "snapshotRef", SNAPSHOTS);
        found.tolerations(&self.tolerations);
        found.env(&self.env);
        found.note(self.user_data.is_some(), "userData", "cloud-init data sources, which do not exist yet");
        found.probes(self.probes.as_ref());
        found.note(self.network_group.is_some(), "networkGroup", GROUPS);
        found.note(self.runner_layer.is_some(), "runnerLayer", LAYERS);
        found.note(self.cilium_layer.is_some(), "ciliumLayer", LAYERS);
        found.note(self.runner_config_secret.is_some(), "runnerConfigSecret", RUNNERS);
        found.note(
            self.reschedule_on_node_loss == Some(true),
            "rescheduleOnNodeLoss",
            "fencing of lost nodes, which does not exist yet",
        );
        found.restart(self.restart_policy.as_ref());
        found.note(self.desired_state != VMDesiredState::Running, "desiredState", SUSPEND);
        found.note(self.idle_timeout.is_some(), "idleTimeout", SUSPEND);
        found.fields
    }
}

/// Fields that are set but not acted on, of a VM and of all that it takes in: its class, its template and its network
/// where it has them. A field that the VM overrides is not named. In a fixed order, so that equal specs give equal
/// messages.
pub fn not_honoured(
    vm: &ImpVMSpec,
    class: Option<&ImpVMClassSpec>,
    template: Option<&ImpVMTemplateSpec>,
    network: Option<&ImpNetworkSpec>,
) -> Vec<NotHonoured> {
    let mut all = vm.not_honoured();
    if let Some(template) = template {
        let mut found = Found { prefix: "ImpVMTemplate spec", fields: Vec::new() };
        if vm.probes.is_none() {
            found.probes(template.probes.as_ref());
        }
        if vm.restart_policy.is_none() {
            found.restart(template.restart_policy.as_ref());
        }
        found.note(vm.network_group.is_none() && template.network_group.is_some(), "networkGroup", GROUPS);
        found.note(vm.runner_layer.is_none() && template.runner_layer.is_some(), "runnerLayer", LAYERS);
        found.note(vm.cilium_layer.is_none() && template.cilium_layer.is_some(), "ciliumLayer", LAYERS);
        all.append(&mut found.fields);
    }
    if let Some(class) = class {
        let mut found = Found { prefix: "ImpVMClass spec", fields: Vec::new() };
        if vm.probes.is_none() && template.is_none_or(|template| template.probes.is_none()) {
            found.probes(class.probes.as_ref());
        }
        if vm.restart_policy.is_none() && template.is_none_or(|template| template.restart_policy.is_none()) {
            found.restart(class.restart_policy.as_ref());
        }
        found.tolerations(&class.tolerations);
        all.append(&mut found.fields);
    }
    if let Some(network) = network {
        let mut found = Found { prefix: "ImpNetwork spec", fields: Vec::new() };
        let cilium = network.cilium.unwrap_or_default();
        found.note(cilium.exclude_from_ipam == Some(true), "cilium.excludeFromIPAM", CILIUM);
        found.note(cilium.masquerade_via_cilium == Some(true), "cilium.masqueradeViaCilium", CILIUM);
        found.note(
            network.ipam.as_ref().is_some_and(|ipam| ipam.provider == IpamProvider::Cilium),
            "ipam.provider",
            CILIUM,
        );
        found.note(!network.groups.is_empty(), "groups", GROUPS);
        found.note(
            network.firewall.as_ref().is_some_and(|firewall| !firewall.deny_cidrs.is_empty()),
            "firewall.denyCidrs",
            "egress rules, which do not exist yet",
        );
        all.append(&mut found.fields);
    }
    all
}

struct Found {
    prefix: &'static str,
    fields: Vec<NotHonoured>,
}

impl Found {
    fn note(&mut self, is_set: bool, path: impl std::fmt::Display, reason: &'static str) {
        if is_set {
            self.fields.push(NotHonoured { path: format!("{}.{path}", self.prefix), reason });
        }
    }

    fn restart(&mut self, policy: Option<&RestartPolicy>) {
        let reschedule = policy.is_some_and(|policy| policy.mode == RestartMode::Reschedule);
        self.note(
            reschedule,
            "restartPolicy.mode",
            "moves between nodes, which do not exist yet; restarts stay on the node",
        );
    }

    fn probes(&mut self, probes: Option<&ProbeSpec>) {
        let enabled = probes.and_then(|probes| probes.http_check.as_ref()).is_some_and(|check| check.enabled);
        self.note(enabled, "probes.httpCheck", HTTP_CHECK);
    }

    fn tolerations(&mut self, tolerations: &[Toleration]) {
        for (index, toleration) in tolerations.iter().enumerate() {
            self.note(
                toleration.toleration_seconds.is_some(),
                format_args!("tolerations[{index}].tolerationSeconds"),
                "eviction by taints, which does not exist yet",
            );
        }
    }

    fn env(&mut self, env: &[EnvVar]) {
        for (index, source) in
            env.iter().enumerate().filter_map(|(index, var)| Some((index, var.value_from.as_ref()?)))
        {
            let kind = if let Some(field) = &source.field_ref {
                if FieldPath::parse(&field.field_path).is_some() {
                    continue;
                }
                "fieldRef"
            } else if source.resource_field_ref.is_some() {
                "resourceFieldRef"
            } else if source.config_map_key_ref.is_none() && source.secret_key_ref.is_none() {
                "source"
            } else {
                continue;
            };
            self.note(
                true,
                format_args!("env[{index}].valueFrom.{kind}"),
                "that source of environment, which does not exist yet; use configMapKeyRef, secretKeyRef, or fieldRef of the VM's own metadata, spec.nodeName or status.podIP",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn paths(fields: &[NotHonoured]) -> Vec<&str> {
        fields.iter().map(|field| field.path.as_str()).collect()
    }

    #[test]
    fn a_vm_of_fields_that_work_has_nothing_to_tell() {
        let vm: ImpVMSpec = serde_json::from_value(json!({
            "classRef": {"name": "small"}, "image": "x", "networkRef": {"name": "n"}, "expireAfter": "1h", "nodeName": "n1",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "tolerations": [{"operator": "Exists"}], "probes": {"httpCheck": {"enabled": false}}, "rescheduleOnNodeLoss": false,
            "restartPolicy": {"mode": "in-place"}, "rootDisk": {"mode": "Flat"},
        }))
        .unwrap();
        let network = serde_json::from_value(
            json!({"subnet": "10.0.0.0/24", "ipam": {"provider": "internal"}, "cilium": {}}),
        );
        assert_eq!(not_honoured(&vm, None, None, Some(&network.unwrap())), []);
    }

    #[test]
    fn everything_else_is_named() {
        let vm: ImpVMSpec = serde_json::from_value(json!({
            "templateRef": {"name": "t"}, "snapshotRef": "s", "restartPolicy": {"mode": "reschedule"}, "userData": {"configMapRef": {"name": "c"}}, "networkGroup": "g",
            "runnerLayer": "r", "ciliumLayer": "c", "runnerConfigSecret": "s", "rescheduleOnNodeLoss": true,
            "desiredState": "ScaleToZero", "idleTimeout": "5m", "probes": {"httpCheck": {"enabled": true, "port": 80}},
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
            "tolerations": [{"operator": "Exists", "tolerationSeconds": 5}],
        }))
        .unwrap();
        assert_eq!(
            paths(&vm.not_honoured()),
            [
                "spec.snapshotRef",
                "spec.tolerations[0].tolerationSeconds",
                "spec.env[0].valueFrom.fieldRef",
                "spec.userData",
                "spec.probes.httpCheck",
                "spec.networkGroup",
                "spec.runnerLayer",
                "spec.ciliumLayer",
                "spec.runnerConfigSecret",
                "spec.rescheduleOnNodeLoss",
                "spec.restartPolicy.mode",
                "spec.desiredState",
                "spec.idleTimeout",
            ]
        );
    }

    #[test]
    fn what_a_vm_takes_in_is_named_unless_it_overrides_it() {
        let check = json!({"httpCheck": {"enabled": true, "port": 80}});
        let template = serde_json::from_value(json!({
            "classRef": {"name": "c"}, "probes": check, "networkGroup": "g", "runnerLayer": "r", "ciliumLayer": "c",
        }))
        .unwrap();
        let class =
            serde_json::from_value(json!({"vcpu": 1, "memoryMiB": 128, "diskGiB": 1, "probes": check}))
                .unwrap();
        let network = serde_json::from_value(json!({
            "subnet": "10.0.0.0/24", "ipam": {"provider": "cilium"}, "groups": [{"name": "g"}],
            "cilium": {"masqueradeViaCilium": true}, "firewall": {"denyCidrs": ["10.0.0.0/8"]},
        }))
        .unwrap();
        let vm: ImpVMSpec =
            serde_json::from_value(json!({"templateRef": {"name": "t"}, "runnerLayer": "own"})).unwrap();
        assert_eq!(
            paths(&not_honoured(&vm, Some(&class), Some(&template), Some(&network))),
            [
                "spec.runnerLayer",
                "ImpVMTemplate spec.probes.httpCheck",
                "ImpVMTemplate spec.networkGroup",
                "ImpVMTemplate spec.ciliumLayer",
                "ImpNetwork spec.cilium.masqueradeViaCilium",
                "ImpNetwork spec.ipam.provider",
                "ImpNetwork spec.groups",
                "ImpNetwork spec.firewall.denyCidrs",
            ]
        );
        let vm: ImpVMSpec = serde_json::from_value(json!({"classRef": {"name": "c"}, "image": "x"})).unwrap();
        assert_eq!(paths(&not_honoured(&vm, Some(&class), None, None)), ["ImpVMClass spec.probes.httpCheck"]);
    }
}
