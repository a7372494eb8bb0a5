//! What holds for a VM once its template and class are taken in.
//!
//! Precedence: what the VM says, then its template, then its class. Structures (probes, restart policy) are taken as a
//! whole, never merged field by field; tolerations are the union of VM and class.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Toleration;

use crate::{
    Arch, DurationString, ImagePullPolicy, ImpVMClassSpec, ImpVMSpec, ImpVMTemplateSpec, ProbeSpec,
    RestartPolicy, RootDisk, VMLifecycle,
};

/// What holds for a VM once its template and class are taken in. Environment and pull secrets are the VM's own and
/// are resolved elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct EffectiveVm {
    /// OCI image reference, never empty.
    pub image: String,
    /// When the image is pulled; `None`: Kubernetes' rule.
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Virtual CPUs, at least 1.
    pub vcpus: u32,
    /// Memory in MiB, at least 128.
    pub memory_mib: u64,
    /// Size of the writable disk in GiB, at least 1.
    pub disk_gib: u64,
    /// CPU architecture that the node must have.
    pub arch: Arch,
    /// Name of the ImpNetwork in the VM's namespace; `None`: no network device.
    pub network: Option<String>,
    /// Labels that the node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Taints that the VM tolerates: its own and its class's, each once.
    pub tolerations: Vec<Toleration>,
    /// Probes.
    pub probes: ProbeSpec,
    /// Exec, probes and the like are allowed.
    pub guest_agent: bool,
    /// What happens after a failure; `None`: no restart.
    pub restart_policy: Option<RestartPolicy>,
    /// Delete the VM this long after it first ran; `None`: never.
    pub expire_after: Option<std::time::Duration>,
    /// What the workload's end means.
    pub lifecycle: VMLifecycle,
    /// How the image becomes the root disk.
    pub root_disk: RootDisk,
    /// Seconds from the stop signal to SIGKILL.
    pub termination_grace_period_seconds: u32,
    /// As in a Pod: replaces the image's ENTRYPOINT when not empty.
    pub command: Vec<String>,
    /// As in a Pod: replaces the image's CMD when not empty.
    pub args: Vec<String>,
    /// Working directory; `None`: the image's.
    pub working_dir: Option<String>,
    /// User; `None`: the image's.
    pub user: Option<String>,
}

/// Why a VM cannot be acted on; [`InvalidVm::field`] says which field is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidVm {
    /// The VM has a templateRef, but no template was given.
    #[error(
        "ImpVMTemplate {name:?} does not exist in the VM's namespace; create it or change spec.templateRef"
    )]
    TemplateNotFound {
        /// Name in the reference.
        name: String,
    },
    /// No class was given.
    #[error("ImpVMClass {name:?} does not exist; create it or change {field}")]
    ClassNotFound {
        /// Name in the reference.
        name: String,
        /// The field that refers to it: of the VM, or of its template.
        field: &'static str,
    },
    /// Neither classRef nor templateRef (an object from before the rule).
    #[error("one of spec.classRef and spec.templateRef is required")]
    NoClass,
    /// Neither VM nor template name an image.
    #[error("no image: set spec.image of the VM{}", if *.template { " or of its ImpVMTemplate" } else { "" })]
    NoImage {
        /// The VM has a template.
        template: bool,
    },
    /// A field holds what its schema refuses (an object from before the rule).
    #[error("{field}: {problem}")]
    BadField {
        /// Path of the field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
}

impl InvalidVm {
    /// Path of the field at fault.
    pub fn field(&self) -> &'static str {
        match self {
            Self::TemplateNotFound { .. } => "spec.templateRef",
            Self::ClassNotFound { field, .. } | Self::BadField { field, .. } => field,
            Self::NoClass => "spec.classRef",
            Self::NoImage { .. } => "spec.image",
        }
    }

    /// Whether an object is missing that may yet come, so that the VM waits for it.
    pub fn is_missing_reference(&self) -> bool {
        matches!(self, Self::TemplateNotFound { .. } | Self::ClassNotFound { .. })
    }
}

/// Name of the class of a VM: its own, or its template's.
pub fn class_name<'a>(vm: &'a ImpVMSpec, template: Option<&'a ImpVMTemplateSpec>) -> Option<&'a str> {
    vm.class_ref
        .as_ref()
        .or_else(|| template.map(|template| &template.class_ref))
        .map(|class| class.name.as_str())
}

/// Name of the network of a VM: its own, or its template's. `None`: no network device.
pub fn network_name<'a>(vm: &'a ImpVMSpec, template: Option<&'a ImpVMTemplateSpec>) -> Option<&'a str> {
    vm.network_ref
        .as_ref()
        .or_else(|| template.and_then(|template| template.network_ref.as_ref()))
        .map(|network| network.name.as_str())
}

/// What holds for `vm`. `template` is the object that `spec.templateRef` names and `class` the one that [`class_name`]
/// names; `None` when there is no such object. A template is ignored when the VM has no templateRef.
///
/// # Errors
/// [`InvalidVm`] when a reference leads nowhere or no image is named; the message is fit for a condition.
pub fn effective(
    vm: &ImpVMSpec,
    class: Option<&ImpVMClassSpec>,
    template: Option<&ImpVMTemplateSpec>,
) -> Result<EffectiveVm, InvalidVm> {
    let template = match &vm.template_ref {
        Some(reference) => {
            Some(template.ok_or_else(|| InvalidVm::TemplateNotFound { name: reference.name.clone() })?)
        }
        None => None,
    };
    let class_name = class_name(vm, template).ok_or(InvalidVm::NoClass)?;
    let class = class.ok_or_else(|| InvalidVm::ClassNotFound {
        name: class_name.to_owned(),
        field: if vm.class_ref.is_some() { "spec.classRef" } else { "spec.classRef of its ImpVMTemplate" },
    })?;
    let image = [vm.image.as_deref(), template.and_then(|template| template.image.as_deref())]
        .into_iter()
        .flatten()
        .find(|image| !image.is_empty())
        .ok_or_else(|| InvalidVm::NoImage { template: template.is_some() })?;

    Ok(EffectiveVm {
        image: image.to_owned(),
        image_pull_policy: vm.image_pull_policy,
        vcpus: positive(class.vcpu, "spec.vcpu of its ImpVMClass")?,
        memory_mib: positive(class.memory_mib, "spec.memoryMiB of its ImpVMClass")?.into(),
        disk_gib: positive(class.disk_gib, "spec.diskGiB of its ImpVMClass")?.into(),
        arch: class.arch,
        network: network_name(vm, template).map(str::to_owned),
        node_selector: vm.node_selector.clone(),
        tolerations: tolerations(vm, class),
        probes: vm
            .probes
            .clone()
            .or_else(|| template.and_then(|template| template.probes.clone()))
            .or_else(|| class.probes.clone())
            .unwrap_or_default(),
        guest_agent: [vm.guest_agent, template.and_then(|template| template.guest_agent), class.guest_agent]
            .into_iter()
            .find_map(|config| config.and_then(|config| config.enabled))
            .unwrap_or(true),
        restart_policy: vm
            .restart_policy
            .clone()
            .or_else(|| template.and_then(|template| template.restart_policy.clone()))
            .or_else(|| class.restart_policy.clone()),
        expire_after: expire_after(vm, template)?,
        lifecycle: vm.lifecycle,
        root_disk: vm.root_disk.unwrap_or_default(),
        termination_grace_period_seconds: u32::try_from(vm.termination_grace_period_seconds).map_err(
            |_| InvalidVm::BadField {
                field: "spec.terminationGracePeriodSeconds",
                problem: format!("{} is out of range", vm.termination_grace_period_seconds),
            },
        )?,
        command: vm.command.clone(),
        args: vm.args.clone(),
        working_dir: vm.working_dir.clone(),
        user: vm.user.clone(),
    })
}

fn positive(value: i32, field: &'static str) -> Result<u32, InvalidVm> {
    u32::try_from(value)
        .ok()
        .filter(|value| *value > 0)
        .ok_or_else(|| InvalidVm::BadField { field, problem: format!("{value} is not positive") })
}

fn tolerations(vm: &ImpVMSpec, class: &ImpVMClassSpec) -> Vec<Toleration> {
    let mut all = class.tolerations.clone();
    for toleration in &vm.tolerations {
        if !all.contains(toleration) {
            all.push(toleration.clone());
        }
    }
    all
}

fn expire_after(
    vm: &ImpVMSpec,
    template: Option<&ImpVMTemplateSpec>,
) -> Result<Option<std::time::Duration>, InvalidVm> {
    let (text, field): (Option<&DurationString>, _) = match &vm.expire_after {
        Some(own) => (Some(own), "spec.expireAfter"),
        None => (
            template.and_then(|template| template.expire_after.as_ref()),
            "spec.expireAfter of its ImpVMTemplate",
        ),
    };
    let Some(text) = text else { return Ok(None) };
    let duration = text.parse().map_err(|error| InvalidVm::BadField { field, problem: error.to_string() })?;
    Ok((!duration.is_zero()).then_some(duration))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn class() -> ImpVMClassSpec {
        spec(json!({
            "vcpu": 2, "memoryMiB": 256, "diskGiB": 3, "arch": "amd64", "guestAgent": {"enabled": false},
            "tolerations": [{"key": "a", "operator": "Exists"}], "restartPolicy": {"mode": "reschedule"},
            "probes": {"livenessProbe": {"exec": {"command": ["class"]}}},
        }))
    }

    fn template() -> ImpVMTemplateSpec {
        spec(json!({
            "classRef": {"name": "small"}, "networkRef": {"name": "net"}, "image": "from-template", "expireAfter": "2h",
            "guestAgent": {"enabled": true}, "restartPolicy": {"onExhaustion": "manual-reset"},
            "probes": {"readinessProbe": {"exec": {"command": ["template"]}}},
        }))
    }

    #[test]
    fn a_vm_with_nothing_of_its_own_takes_its_templates_then_its_classes() {
        let vm = spec(json!({"templateRef": {"name": "t"}}));
        let all = effective(&vm, Some(&class()), Some(&template())).unwrap();
        assert_eq!((all.image.as_str(), all.network.as_deref()), ("from-template", Some("net")));
        assert_eq!((all.vcpus, all.memory_mib, all.disk_gib, all.arch), (2, 256, 3, Arch::Amd64));
        assert_eq!(all.expire_after, Some(std::time::Duration::from_secs(7200)));
        assert!(all.guest_agent && all.probes.readiness_probe.is_some());
        assert!(all.probes.liveness_probe.is_none(), "probes are taken as a whole");
        assert_eq!(all.restart_policy, template().restart_policy, "so is the restart policy");

        let bare = ImpVMTemplateSpec { probes: None, restart_policy: None, guest_agent: None, ..template() };
        let all = effective(&vm, Some(&class()), Some(&bare)).unwrap();
        assert!(all.probes.liveness_probe.is_some() && !all.guest_agent);
        assert_eq!(all.restart_policy, class().restart_policy);
    }

    #[test]
    fn what_the_vm_says_wins() {
        let vm = spec(json!({
            "templateRef": {"name": "t"}, "networkRef": {"name": "other"}, "image": "own", "expireAfter": "0",
            "guestAgent": {"enabled": false}, "restartPolicy": {}, "probes": {}, "terminationGracePeriodSeconds": 0,
            "tolerations": [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}],
        }));
        let all = effective(&vm, Some(&class()), Some(&template())).unwrap();
        assert_eq!((all.image.as_str(), all.network.as_deref()), ("own", Some("other")));
        assert_eq!(
            (all.expire_after, all.termination_grace_period_seconds),
            (None, 0),
            "0 lifts the template's expiry"
        );
        assert_eq!((all.guest_agent, all.probes), (false, ProbeSpec::default()));
        assert_eq!(all.restart_policy, vm.restart_policy);
        assert_eq!(all.tolerations.len(), 2, "the union, each once");
    }

    #[test]
    fn what_is_missing_is_told_with_its_field() {
        let from_class = spec(json!({"classRef": {"name": "small"}, "image": "x"}));
        let from_template: ImpVMSpec = spec(json!({"templateRef": {"name": "t"}}));
        let no_image = ImpVMTemplateSpec { image: None, ..template() };
        for (error, field, may_come) in [
            (effective(&from_class, None, None), "spec.classRef", true),
            (effective(&from_template, Some(&class()), None), "spec.templateRef", true),
            (effective(&from_template, None, Some(&template())), "spec.classRef of its ImpVMTemplate", true),
            (effective(&from_template, Some(&class()), Some(&no_image)), "spec.image", false),
            (effective(&spec(json!({"image": "x"})), Some(&class()), None), "spec.classRef", false),
        ] {
            let error = error.unwrap_err();
            assert_eq!((error.field(), error.is_missing_reference()), (field, may_come), "{error}");
        }
        let old = ImpVMClassSpec { vcpu: 0, ..class() };
        assert_eq!(
            effective(&from_class, Some(&old), None).unwrap_err().field(),
            "spec.vcpu of its ImpVMClass"
        );
    }
}
