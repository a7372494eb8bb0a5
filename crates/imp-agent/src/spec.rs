//! From the API's objects to what the runtime is told: a pure function.

use std::net::Ipv4Addr;

use imp_api::{
    Arch, EffectiveVm, ImagePullPolicy, ImpNetwork, ImpVM, ImpVMClass, ImpVMTemplate, InvalidVm, ProbeSpec,
    RootDiskMode, VMLifecycle,
};
use imp_proto::v1;
use kube::ResourceExt as _;

/// The objects that a VM refers to, those that exist.
#[derive(Clone, Debug, Default)]
pub struct References {
    /// Its class, its own or its template's.
    pub class: Option<ImpVMClass>,
    /// Its template.
    pub template: Option<ImpVMTemplate>,
    /// Its network, its own or its template's.
    pub network: Option<ImpNetwork>,
}

/// Why no VM can be made of an object.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The object lacks what the API server always sets.
    #[error("the ImpVM has no {0}")]
    Incomplete(&'static str),
    /// The spec, or what it refers to, cannot be acted on.
    #[error(transparent)]
    Invalid(#[from] InvalidVm),
    /// The operator reserved no address.
    #[error(
        "the ImpVM is on network {network} but has no address yet: the operator reserves one in status.ip and status.macAddress"
    )]
    NoAddress {
        /// Name of the network.
        network: String,
    },
    /// The network's subnet is no IPv4 network.
    #[error(
        "ImpNetwork {network} has subnet {subnet}, which is no IPv4 network such as 192.168.100.0/24: correct spec.subnet"
    )]
    Subnet {
        /// Name of the network.
        network: String,
        /// Its subnet.
        subnet: String,
    },
}

/// Whether the VM's environment or pull secrets have to come from the operator before it may start.
#[must_use]
pub fn needs_secrets(vm: &ImpVM) -> bool {
    let spec = &vm.spec;
    !spec.env_from.is_empty()
        || !spec.image_pull_secrets.is_empty()
        || spec.env.iter().any(|var| var.value_from.is_some())
}

/// What the runtime is told of a bound VM: the VM's own settings over its template's over its class's.
///
/// # Errors
/// When something is missing without which the VM cannot be started.
pub fn build(vm: &ImpVM, references: &References) -> Result<v1::VmSpec, SpecError> {
    let uid = vm.uid().ok_or(SpecError::Incomplete("metadata.uid"))?;
    let template = references.template.as_ref().map(|template| &template.spec);
    let class = references.class.as_ref().map(|class| &class.spec);
    let effective = imp_api::effective(&vm.spec, class, template)?;
    Ok(v1::VmSpec {
        vm: Some(v1::VmRef { uid, namespace: vm.namespace().unwrap_or_default(), name: vm.name_any() }),
        generation: vm.metadata.generation.unwrap_or_default(),
        attempt: attempt(vm),
        run_state: v1::RunState::Running.into(),
        resources: Some(v1::Resources {
            vcpus: effective.vcpus,
            memory_mib: effective.memory_mib,
            disk_gib: effective.disk_gib,
        }),
        image: Some(v1::ImageSpec {
            reference: effective.image.clone(),
            pull_policy: pull_policy(effective.image_pull_policy).into(),
            architecture: if effective.arch == Arch::Multi {
                String::new()
            } else {
                effective.arch.as_str().to_owned()
            },
        }),
        root_disk: Some(root_disk(&effective)),
        network: references.network.as_ref().map(|network| network_of(vm, network)).transpose()?,
        probes: Some(probes_of(&effective.probes)).filter(|probes| *probes != v1::Probes::default()),
        needs_secrets: needs_secrets(vm),
        guest_agent: effective.guest_agent,
        persistent: effective.lifecycle == VMLifecycle::Persistent,
        workload: Some(workload(vm, effective)),
    })
}

/// The attempt that the object is at: how often it was restarted.
#[must_use]
pub fn attempt(vm: &ImpVM) -> u32 {
    vm.status.as_ref().and_then(|status| status.restart_count).map_or(0, unsigned)
}

/// The API's schemas refuse negative numbers; one that got past them counts as none.
fn unsigned(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

fn pull_policy(policy: Option<ImagePullPolicy>) -> v1::PullPolicy {
    match policy {
        None => v1::PullPolicy::Unspecified,
        Some(ImagePullPolicy::Always) => v1::PullPolicy::Always,
        Some(ImagePullPolicy::IfNotPresent) => v1::PullPolicy::IfNotPresent,
        Some(ImagePullPolicy::Never) => v1::PullPolicy::Never,
    }
}

fn root_disk(vm: &EffectiveVm) -> v1::RootDisk {
    let mode = match vm.root_disk.mode {
        RootDiskMode::Overlay => v1::root_disk::Mode::Overlay,
        RootDiskMode::Flat => v1::root_disk::Mode::Flat,
    };
    v1::RootDisk { mode: mode.into(), read_only: vm.root_disk.read_only }
}

fn workload(vm: &ImpVM, effective: EffectiveVm) -> v1::Workload {
    // Values from Secrets never stand here; when there are any, the operator gives the whole environment.
    let literal = vm.spec.env.iter().filter(|var| var.value_from.is_none());
    v1::Workload {
        command: effective.command,
        args: effective.args,
        working_dir: effective.working_dir.unwrap_or_default(),
        user: effective.user.unwrap_or_default(),
        env: literal
            .map(|var| v1::EnvVar { name: var.name.clone(), value: var.value.clone().unwrap_or_default() })
            .collect(),
        stdin: false,
        tty: false,
        size: None,
        termination_grace_seconds: effective.termination_grace_period_seconds,
        hostname: hostname(&vm.name_any()),
    }
}

/// The object's name as a host name: at most 63 bytes, as Linux and DNS labels have it, and no dot at the end.
fn hostname(name: &str) -> String {
    name.get(..63).unwrap_or(name).trim_end_matches(['.', '-']).to_owned()
}

fn network_of(vm: &ImpVM, network: &ImpNetwork) -> Result<v1::Network, SpecError> {
    let name = network.name_any();
    let status = vm.status.as_ref();
    let reserved = status.and_then(|status| status.ip.clone().zip(status.mac_address.clone()));
    let (ip, mac) = reserved.ok_or_else(|| SpecError::NoAddress { network: name.clone() })?;
    let spec = &network.spec;
    let subnet_error = || SpecError::Subnet { network: name.clone(), subnet: spec.subnet.clone() };
    let (base, prefix) = spec.subnet.split_once('/').ok_or_else(subnet_error)?;
    let base: Ipv4Addr = base.parse().map_err(|_| subnet_error())?;
    let prefix: u8 =
        prefix.parse().ok().filter(|prefix| (1..=30).contains(prefix)).ok_or_else(subnet_error)?;
    let first = Ipv4Addr::from((u32::from(base) & (u32::MAX << (32 - prefix))) + 1);
    let nat = spec.nat.as_ref();
    Ok(v1::Network {
        // The UID keeps networks of one name in two namespaces apart, and a new one from a deleted one.
        id: network.uid().ok_or(SpecError::Incomplete("network UID"))?,
        mac,
        address: format!("{ip}/{prefix}"),
        gateway: spec
            .gateway
            .clone()
            .filter(|gateway| !gateway.is_empty())
            .unwrap_or_else(|| first.to_string()),
        dns: spec.dns.clone(),
        search: Vec::new(),
        mtu: 0,
        masquerade: nat.is_some_and(|nat| nat.enabled),
        egress_interface: nat.and_then(|nat| nat.egress_interface.clone()).unwrap_or_default(),
        ports: Vec::new(),
    })
}

fn probes_of(probes: &ProbeSpec) -> v1::Probes {
    let probe = |probe: &Option<imp_api::Probe>| probe.as_ref().map(probe_of);
    v1::Probes {
        startup: probe(&probes.startup_probe),
        readiness: probe(&probes.readiness_probe),
        liveness: probe(&probes.liveness_probe),
    }
}

fn probe_of(probe: &imp_api::Probe) -> v1::Probe {
    let exec = probe
        .exec
        .as_ref()
        .map(|exec| v1::probe::Check::Exec(v1::ExecCheck { command: exec.command.clone() }));
    let http = probe.http.as_ref().map(|http| {
        v1::probe::Check::Http(v1::HttpCheck { path: http.path.clone(), port: unsigned(http.port) })
    });
    v1::Probe {
        check: exec.or(http),
        initial_delay_seconds: unsigned(probe.initial_delay_seconds),
        period_seconds: unsigned(probe.period_seconds),
        timeout_seconds: unsigned(probe.timeout_seconds),
        failure_threshold: unsigned(probe.failure_threshold),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn vm(spec: &serde_json::Value) -> ImpVM {
        serde_json::from_value(json!({
            "apiVersion": "imp.dev/v1alpha1", "kind": "ImpVM",
            "metadata": {"name": "a", "namespace": "n", "uid": "u-1", "generation": 4},
            "spec": spec, "status": {"ip": "10.1.2.7", "macAddress": "02:00:00:00:00:07", "restartCount": 2}
        }))
        .unwrap()
    }

    fn references() -> References {
        References {
            class: Some(serde_json::from_value(json!({
                "apiVersion": "imp.dev/v1alpha1", "kind": "ImpVMClass", "metadata": {"name": "small"},
                "spec": {"vcpu": 2, "memoryMiB": 256, "diskGiB": 3, "arch": "arm64", "guestAgent": {"enabled": false}}
            }))
            .unwrap()),
            template: None,
            network: None,
        }
    }

    #[test]
    fn settings_of_the_vm_win_over_template_over_class() {
        let mut references = references();
        let own = build(&vm(&json!({"classRef": {"name": "small"}, "image": "a:1"})), &references).unwrap();
        assert!(!own.guest_agent, "inherited from the class");
        assert_eq!(own.image.as_ref().unwrap().architecture, "arm64");
        assert_eq!(own.resources, Some(v1::Resources { vcpus: 2, memory_mib: 256, disk_gib: 3 }));
        assert_eq!((own.generation, own.attempt), (4, 2));
        references.template = Some(
            serde_json::from_value(json!({
                "apiVersion": "imp.dev/v1alpha1", "kind": "ImpVMTemplate", "metadata": {"name": "t"},
                "spec": {"classRef": {"name": "small"}, "image": "t:1", "guestAgent": {"enabled": true},
                         "probes": {"readinessProbe": {"http": {"path": "/", "port": 80}}}}
            }))
            .unwrap(),
        );
        let inherited = build(&vm(&json!({"templateRef": {"name": "t"}})), &references).unwrap();
        assert_eq!(inherited.image.as_ref().unwrap().reference, "t:1");
        assert!(inherited.guest_agent);
        let probe = inherited.probes.unwrap().readiness.unwrap();
        assert_eq!((probe.period_seconds, probe.timeout_seconds, probe.failure_threshold), (10, 5, 3));
        let overridden =
            build(&vm(&json!({"templateRef": {"name": "t"}, "image": "o:1"})), &references).unwrap();
        assert_eq!(overridden.image.unwrap().reference, "o:1");
    }

    #[test]
    fn the_network_is_what_the_operator_reserved() {
        let mut references = references();
        references.network = Some(serde_json::from_value(json!({
            "apiVersion": "imp.dev/v1alpha1", "kind": "ImpNetwork", "metadata": {"name": "net", "uid": "nu"},
            "spec": {"subnet": "10.1.2.0/24", "nat": {"enabled": true}, "dns": ["10.9.9.9"]}
        })).unwrap());
        let mut object =
            vm(&json!({"classRef": {"name": "small"}, "image": "a:1", "networkRef": {"name": "net"}}));
        let network = build(&object, &references).unwrap().network.unwrap();
        assert_eq!((network.address.as_str(), network.gateway.as_str()), ("10.1.2.7/24", "10.1.2.1"));
        assert_eq!(
            (network.id.as_str(), network.masquerade, network.dns),
            ("nu", true, vec!["10.9.9.9".to_owned()])
        );
        object.status = None;
        assert!(matches!(build(&object, &references), Err(SpecError::NoAddress { .. })));
    }

    #[test]
    fn values_from_secrets_are_not_in_the_spec() {
        let object = vm(&json!({"classRef": {"name": "small"}, "image": "a:1",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}));
        let spec = build(&object, &references()).unwrap();
        assert!(spec.needs_secrets);
        assert_eq!(spec.workload.unwrap().env, vec![v1::EnvVar { name: "A".into(), value: "1".into() }]);
    }

    #[test]
    fn without_an_image_there_is_no_vm() {
        assert!(matches!(
            build(&vm(&json!({"classRef": {"name": "small"}})), &references()),
            Err(SpecError::Invalid(InvalidVm::NoImage { .. }))
        ));
    }
}
