//! The other way: free what an attempt used, and at last everything of the VM. Each step may be repeated.

use super::failure::Fault;
use crate::vm::Vm;
use camino::Utf8Path;
use imp_killpoint::runtime as killpoint;
use imp_proto::v1::FailureReason;
use imp_vmm::cgroup::Cgroup;
use std::io;

/// Frees tap, control group and sockets of an attempt whose VMM is gone.
pub(super) async fn free(vm: &Vm) -> Result<(), Fault> {
    if let Some(attachment) = vm.record().attachment {
        let remaining = vm.shared.without_attachment(&vm.uid);
        let detached = vm.shared.network.detach(&vm.uid, &attachment.network, &remaining).await;
        detached.map_err(|e| Fault::of(FailureReason::NetworkFailed, &e))?;
        killpoint("network-freed");
        vm.journal(|record| record.attachment = None)?;
    }
    let cgroup = Cgroup::of(&vm.shared.config.cgroup_parent, &vm.uid);
    let cgroup = cgroup.map_err(|e| Fault::of(FailureReason::Internal, &e))?;
    cgroup.remove().await.map_err(|e| Fault::of(FailureReason::Internal, &e))?;
    killpoint("cgroup-freed");
    remove_dir(&vm.run_dir())
}

/// Frees everything of a VM that does not run, its record last.
pub(super) async fn remove(vm: &Vm) -> Result<(), Fault> {
    free(vm).await?;
    remove_file(&vm.disk())?;
    killpoint("disk-freed");
    vm.remove_record()?;
    killpoint("record-removed");
    tracing::info!("nothing is left");
    Ok(())
}

pub(super) fn remove_file(path: &Utf8Path) -> Result<(), Fault> {
    gone(path, std::fs::remove_file(path))
}

fn remove_dir(path: &Utf8Path) -> Result<(), Fault> {
    gone(path, std::fs::remove_dir_all(path))
}

fn gone(path: &Utf8Path, result: io::Result<()>) -> Result<(), Fault> {
    match result {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Fault::new(FailureReason::DiskFailed, format!("cannot remove {path}: {e}")))
        }
        _ => Ok(()),
    }
}
