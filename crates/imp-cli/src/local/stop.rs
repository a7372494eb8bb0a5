//! `imp stop` and `imp rm`.

use super::{
    args::{Paths, RmArgs, StopArgs},
    client,
};
use imp_proto::v1::{self as pb, runtime_client::RuntimeClient, watch_vms_response::Event};
use tonic::transport::Channel;

/// Stops VMs and waits until nothing of them runs; the disks stay.
pub(super) async fn stop(paths: &Paths, args: &StopArgs) -> anyhow::Result<u8> {
    let mut client = client::connect(paths).await?;
    for name in &args.names {
        let vm = client::find(&mut client, name).await?;
        if !vm.ended() {
            let mut spec = vm.spec.clone();
            spec.generation += 1;
            spec.run_state = pb::RunState::Stopped.into();
            if let (Some(workload), Some(seconds)) = (spec.workload.as_mut(), args.time) {
                workload.termination_grace_seconds = seconds;
            }
            let request = pb::PutVmRequest { spec: Some(spec), secrets: None };
            client.put_vm(request).await.map_err(client::failure)?;
            wait(&mut client, &vm.vm_ref(), |event| match event {
                Event::Vm(status) => client::ended(status),
                Event::Removed(_) => true,
                Event::Synced(_) => false,
            })
            .await?;
        }
        println!("{name}");
    }
    Ok(0)
}

/// Removes VMs and their disks.
pub(super) async fn rm(paths: &Paths, args: &RmArgs) -> anyhow::Result<u8> {
    let mut client = client::connect(paths).await?;
    for name in &args.names {
        let vm = client::find(&mut client, name).await?;
        anyhow::ensure!(
            vm.ended() || args.force,
            "{name} is running: stop it first (`imp stop {name}`), or use -f to end it now"
        );
        remove(&mut client, &vm.vm_ref()).await?;
        println!("{name}");
    }
    Ok(0)
}

/// Ends a VM at once and waits until nothing of it is left.
///
/// # Errors
/// When the runtime does not answer.
pub(super) async fn remove(client: &mut RuntimeClient<Channel>, vm: &pb::VmRef) -> anyhow::Result<()> {
    let request = pb::DeleteVmRequest { vm: Some(vm.clone()), grace_seconds: Some(0) };
    if client.delete_vm(request).await.map_err(client::failure)?.into_inner().gone {
        return Ok(());
    }
    wait(client, vm, |event| matches!(event, Event::Removed(_))).await
}

/// Watches until `done` says so of an event of this VM, or the VM is not among what the watch begins with.
async fn wait(
    client: &mut RuntimeClient<Channel>,
    vm: &pb::VmRef,
    done: impl Fn(&Event) -> bool,
) -> anyhow::Result<()> {
    let mut events = client.watch_vms(pb::WatchVmsRequest {}).await.map_err(client::failure)?.into_inner();
    let mut seen = false;
    while let Some(event) = events.message().await.map_err(client::failure)? {
        let Some(event) = event.event else { continue };
        let ours = match &event {
            Event::Vm(status) => status.vm.as_ref().is_some_and(|v| v.uid == vm.uid),
            Event::Removed(uid) => *uid == vm.uid,
            Event::Synced(_) if !seen => return Ok(()),
            Event::Synced(_) => false,
        };
        seen |= ours;
        if ours && done(&event) {
            return Ok(());
        }
    }
    anyhow::bail!("the local runtime went away while {} ended: try again", vm.name)
}
