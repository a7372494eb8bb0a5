//! Names that several programs must spell alike: labels, annotations, finalizers, field managers, condition types and
//! reasons, well-known objects and ports. `docs/architecture.md` lists who writes what.

/// Labels.
pub mod label {
    /// On a Node, value `true`: the node may host VMs. Set by an administrator.
    pub const ENABLED: &str = "imp/enabled";
    /// On an ImpVM: the ImpWarmPool that it belongs to.
    pub const WARM_POOL: &str = "imp.dev/warm-pool";
    /// On an ImpVM: the ImpVMRunnerPool that it belongs to.
    pub const RUNNER_POOL: &str = "imp.dev/runner-pool";
    /// On an ImpVMSnapshot: the snapshot of which it is an execution.
    pub const SNAPSHOT_PARENT: &str = "imp.dev/snapshot-parent";
    /// Name of the VM that an object belongs to.
    pub const VM: &str = "imp.dev/vm";
    /// Name of the network that an object belongs to.
    pub const NETWORK: &str = "imp.dev/network";
    /// Namespace of the object that a cluster-scoped object belongs to.
    pub const NAMESPACE: &str = "imp.dev/namespace";
}

/// Annotations.
pub mod annotation {
    /// On an ImpVM, value `true`, by the user: clear the restart counters.
    pub const RESET_RETRIES: &str = "imp/reset-retries";
    /// On an ImpVM: W3C traceparent of the operator's placing.
    pub const TRACE_CONTEXT: &str = "imp.dev/trace-context";
    /// On an ImpVM: W3C tracestate of the operator's placing.
    pub const TRACE_STATE: &str = "imp.dev/trace-state";
    /// On an ImpVMRunnerPool: wanted number of runners.
    pub const RUNNER_DEMAND: &str = "imp.dev/runner-demand";
}

/// Guards the teardown of an ImpVM.
pub const VM_FINALIZER: &str = "imp.dev/vm";
/// The finalizer of earlier versions on ImpVMs; taken off where it is found.
pub const LEGACY_VM_FINALIZER: &str = "imp/finalizer";
/// The finalizer of earlier versions on ImpNetworks; taken off where it is found.
pub const LEGACY_NETWORK_FINALIZER: &str = "imp/network-finalizer";

/// Managers of fields, for server-side apply.
pub mod field_manager {
    /// The operator.
    pub const OPERATOR: &str = "imp-operator";
    /// The agent.
    pub const AGENT: &str = "imp-agent";
    /// The command line tool.
    pub const CLI: &str = "imp-cli";
}

/// Namespace of Imp's own objects.
pub const SYSTEM_NAMESPACE: &str = "imp-system";
/// The operator's Deployment, Service, ServiceAccount and Lease.
pub const OPERATOR_NAME: &str = "imp-controller-manager";
/// The agent's DaemonSet and ServiceAccount.
pub const AGENT_NAME: &str = "imp-agent";
/// The runtime's DaemonSet and ServiceAccount.
pub const RUNTIME_NAME: &str = "imp-runtime";
/// ConfigMap (certificate) and Secret (certificate and key) of Imp's own CA.
pub const CA_NAME: &str = "imp-ca";
/// Name of the only ClusterImpConfig that is read.
pub const CONFIG_NAME: &str = "cluster";
/// Group of the aggregated API.
pub const SUBRESOURCES_GROUP: &str = "subresources.imp.dev";
/// Key of the node's name in the extra fields of a pod-bound ServiceAccount token.
pub const NODE_NAME_CLAIM: &str = "authentication.kubernetes.io/node-name";

/// TCP ports.
pub mod port {
    /// Metrics of operator and agent.
    pub const METRICS: u16 = 8080;
    /// `/healthz` and `/readyz` of operator and agent.
    pub const PROBES: u16 = 8081;
    /// Metrics of the runtime.
    pub const RUNTIME_METRICS: u16 = 8082;
    /// `/healthz` and `/readyz` of the runtime.
    pub const RUNTIME_PROBES: u16 = 8083;
    /// The operator's aggregated API and node API (HTTPS).
    pub const OPERATOR_API: u16 = 8443;
    /// The agent's streams (mutual TLS).
    pub const AGENT_STREAMS: u16 = 9443;
}

/// The runtime's unix socket.
pub const RUNTIME_SOCKET: &str = "/run/imp/runtime.sock";

/// Declares an enum of names with `as_str`, `ALL`, `Display` and `FromStr`.
macro_rules! names {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$variant_meta])* $variant),+ }

        impl $name {
            /// Every name.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The spelling of the wire.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => stringify!($variant)),+ }
            }

            /// The name spelled `text`, if there is one.
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|name| name.as_str() == text)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

names! {
    /// Types of conditions of an ImpVM. The writer is in brackets.
    ConditionType {
        /// The VM is bound to a node (operator).
        Scheduled,
        /// The node of the VM is well (operator).
        NodeHealthy,
        /// Every field of the spec is acted on (operator).
        SpecHonored,
        /// The workload runs, and its readiness probe says so if it has one (agent; operator while there is no agent).
        Ready,
        /// The image is on the node (agent).
        ImageReady,
        /// The VM's network device works (agent).
        NetworkReady,
        /// The agent in the guest answers (agent).
        GuestReady,
        /// The startup probe succeeded (agent).
        Started,
        /// The liveness probe succeeds (agent).
        Healthy,
        /// Of a VM that is being deleted: nothing of it is left on the node, so that the finalizer may go (agent).
        NodeReleased,
    }
}

names! {
    /// Reasons of conditions and events. The first part maps one to one from `FailureReason` of the wire protocol
    /// (`FAILURE_REASON_IMAGE_NOT_FOUND` is `ImageNotFound`).
    Reason {
        /// The runtime was given a spec that it cannot act on.
        InvalidSpec,
        /// The registry has no such image.
        ImageNotFound,
        /// The registry refuses the credentials, or asks for some.
        ImagePullUnauthorized,
        /// The image could not be pulled for another reason.
        ImagePullFailed,
        /// The image is no usable image for this node.
        ImageInvalid,
        /// The VM's disk could not be made.
        DiskFailed,
        /// The VM's network device could not be made.
        NetworkFailed,
        /// The virtual machine monitor did not start.
        VmmStartFailed,
        /// The virtual machine monitor ended by itself.
        VmmCrashed,
        /// The guest's kernel panicked.
        KernelPanic,
        /// The agent in the guest never answered.
        GuestUnreachable,
        /// The workload's program could not be executed.
        WorkloadStartFailed,
        /// The node was rebooted under the VM.
        HostRebooted,
        /// The virtual machine monitor was killed because memory ran out on the node.
        VmmOomKilled,
        /// The guest could not be set up.
        GuestConfigureFailed,
        /// A fault of Imp itself.
        Internal,

        /// Bound to a node.
        NodeAssigned,
        /// No node fits.
        NoNodeAvailable,
        /// The spec, or what it refers to, cannot be acted on.
        SpecInvalid,
        /// An object that the spec refers to does not exist.
        ReferenceNotFound,
        /// The network has no free address.
        AddressesExhausted,
        /// A Secret or ConfigMap that the spec refers to is missing or lacks a key.
        SecretUnavailable,
        /// The node is Ready.
        NodeReady,
        /// The node is not Ready.
        NodeNotReady,
        /// The node is gone.
        NodeLost,
        /// Every field is acted on.
        AllFieldsHonored,
        /// Some fields are not acted on; the message names them.
        FieldsNotHonored,

        /// Waiting for an earlier step.
        Waiting,
        /// The image is being pulled.
        Pulling,
        /// The image is there.
        ImagePulled,
        /// The image has been there already.
        ImagePresent,
        /// Disk and network are being made.
        Preparing,
        /// The guest boots.
        Booting,
        /// The network device works.
        NetworkConfigured,
        /// The VM has no network.
        NoNetwork,
        /// The agent in the guest answers.
        GuestConnected,
        /// spec.guestAgent.enabled is false.
        GuestAgentDisabled,
        /// The workload runs.
        Running,
        /// The workload ended with exit code 0.
        Completed,
        /// The workload ended with another exit code, or by a signal.
        Failed,
        /// The guest's kernel ended the workload because memory ran out.
        OOMKilled,
        /// A probe succeeded.
        ProbeSucceeded,
        /// A probe failed.
        ProbeFailed,
        /// No result of the probe yet.
        ProbePending,
        /// The VM is being stopped.
        Stopping,
        /// The attempt is over.
        Ended,
        /// The channel to the agent in the guest is down; the node connects again.
        GuestDisconnected,
        /// The guest ended without telling how its workload did.
        GuestPoweredOff,
        /// The runtime does not know a VM that ran: its state on the node was removed.
        VmLost,
        /// The VM is being removed from its node (condition NodeReleased).
        Removing,
        /// Nothing of the VM is left on its node (condition NodeReleased).
        Released,

        /// Placed on a node (event).
        Scheduled,
        /// Cannot be placed (event).
        Unschedulable,
        /// Placed anew (event).
        Rescheduling,
        /// Started again (event, condition Ready).
        Restarting,
        /// All restarts are used up.
        RetryExhausted,
        /// The restart counters were cleared by the user (event).
        RetriesReset,
        /// Being deleted (event).
        Terminating,
        /// The node did not confirm the end of the VM in time (event).
        TerminationTimeout,
        /// Deleted by its expireAfter (event).
        Expired,
    }
}
