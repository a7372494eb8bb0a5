//! What can go wrong.

use std::io;
use std::time::Duration;

/// What went wrong with the network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A system call or file failed.
    #[error("{doing}")]
    Io {
        /// What we were doing, to which device.
        doing: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a change of links, addresses or routes.
    #[error("{doing}")]
    Netlink {
        /// What we were doing, to which device.
        doing: String,
        /// Why it failed.
        #[source]
        source: rtnetlink::Error,
    },
    /// The program that loads the packet filter's rules failed; the rules in force are those from before.
    #[error("{program} did not load the node's network rules ({status}): {message}")]
    Nft {
        /// The program.
        program: String,
        /// How it ended.
        status: String,
        /// What it printed, at most 2 KiB.
        message: String,
    },
    /// A step took too long and was given up.
    #[error("{doing} took longer than {} s", after.as_secs_f64())]
    Timeout {
        /// What we were doing, to which device.
        doing: String,
        /// The limit.
        after: Duration,
    },
    /// A process has the VM's tap open, so the VM can't start.
    #[error("tap {tap} of VM {vm} is held by {holder}; end that process, or wait until it is gone")]
    TapBusy {
        /// Name of the tap.
        tap: String,
        /// UID of the VM.
        vm: String,
        /// Process ID and name, as far as /proc tells.
        holder: String,
    },
    /// A device of the name that we would use belongs to another.
    #[error("network device {device}, wanted for {wanted}, belongs to {owner}; rename or remove that device")]
    NameTaken {
        /// Name of the device.
        device: String,
        /// Whom we wanted it for.
        wanted: String,
        /// Its alias or kind.
        owner: String,
    },
    /// An attachment that can't be made, whatever the state of the node.
    #[error("VM {vm}: {field} {why}")]
    Invalid {
        /// UID of the VM.
        vm: String,
        /// Field of the attachment.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// An attachment that can't live beside another of this node.
    #[error("VM {vm}: {what} is already used by VM {other} on this node")]
    Conflict {
        /// UID of the VM.
        vm: String,
        /// UID of the other VM.
        other: String,
        /// What both want.
        what: String,
    },
}

impl NetError {
    /// A failed system call or file.
    pub(crate) fn io(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { doing: doing.into(), source: source.into() }
    }
}
