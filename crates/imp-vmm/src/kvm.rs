//! Whether hardware virtualisation truly works here: known only after a guest has said hello.
//!
//! Some hosts have a `/dev/kvm` that runs no stock kernel to user space. The answer is found by booting the real kernel
//! and initramfs once for each boot of the host, kernel and QEMU, and remembered in a file.

use crate::{Accelerator, LaunchConfig, Vmm, VmmError, process};
use camino::{Utf8Path, Utf8PathBuf};
use imp_proto::channel::{NONCE_LEN, client_hello};
use serde::{Deserialize, Serialize};
use std::{os::unix::fs::MetadataExt as _, time::Duration};

/// A guest with hardware virtualisation says hello within a second; a loaded host is given more.
const HELLO_DEADLINE: Duration = Duration::from_secs(4);

/// The trial's VMM is found by this name.
const TRIAL: &str = "kvm-trial";

/// The answer, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmProbe {
    /// A guest really ran.
    pub usable: bool,
    /// Why not, for people; empty when it is usable.
    pub reason: String,
}

/// What the answer holds for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    boot_id: String,
    kernel: (Utf8PathBuf, u64, i64),
    version: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    key: Key,
    probe: KvmProbe,
}

/// Finds out, or remembers. `scratch` is an empty directory for the sockets of the trial; `ids` as of any VM.
///
/// # Errors
/// When the host's boot id or the kernel cannot be read; a trial that fails is an answer.
pub async fn probe(
    vmm: &dyn Vmm,
    kernel: &Utf8Path,
    initrd: &Utf8Path,
    scratch: &Utf8Path,
    state_file: &Utf8Path,
    ids: (u32, u32),
) -> Result<KvmProbe, VmmError> {
    let no = |reason: &str| KvmProbe { usable: false, reason: reason.to_owned() };
    if !Utf8Path::new("/dev/kvm").exists() {
        return Ok(no("there is no /dev/kvm"));
    }
    let metadata = std::fs::metadata(kernel)
        .map_err(|source| VmmError::Io { doing: format!("cannot read {kernel}"), source })?;
    let key = Key {
        boot_id: process::boot_id()?,
        kernel: (kernel.to_owned(), metadata.len(), metadata.mtime()),
        version: vmm.capabilities().version.clone(),
    };
    let remembered = std::fs::read(state_file).ok();
    if let Some(old) = remembered.and_then(|bytes| serde_json::from_slice::<Remembered>(&bytes).ok())
        && old.key == key
    {
        return Ok(old.probe);
    }
    end_leftover(vmm, scratch).await?;
    let probe = match trial(vmm, kernel, initrd, scratch, ids).await {
        Ok(probe) => probe,
        // QEMU's own answer.
        Err(e @ VmmError::Died { .. }) => no(&format!("/dev/kvm is there, but: {e}")),
        // No guest was started: that says nothing about the next try.
        Err(e) => return Ok(no(&format!("/dev/kvm is there, but: {e}"))),
    };
    let text = serde_json::to_vec(&Remembered { key, probe: probe.clone() }).unwrap_or_default();
    // Without the file the trial is made again; nothing depends on it.
    let _ = std::fs::write(state_file, text);
    Ok(probe)
}

/// A trial whose runtime died leaves its VMM behind.
async fn end_leftover(vmm: &dyn Vmm, scratch: &Utf8Path) -> Result<(), VmmError> {
    let Some(record) = vmm.find(TRIAL).await? else { return Ok(()) };
    if let Some(instance) = vmm.adopt(&record, scratch).await? {
        instance.kill()?;
        instance.wait().await;
    }
    Ok(())
}

/// # Errors
/// When no guest could be started.
async fn trial(
    vmm: &dyn Vmm,
    kernel: &Utf8Path,
    initrd: &Utf8Path,
    scratch: &Utf8Path,
    ids: (u32, u32),
) -> Result<KvmProbe, VmmError> {
    let config = LaunchConfig {
        uid: TRIAL.to_owned(),
        run_dir: scratch.to_owned(),
        kernel: kernel.to_owned(),
        initrd: initrd.to_owned(),
        vcpus: 1,
        memory_mib: 128,
        drives: Vec::new(),
        nic: None,
        accelerator: Accelerator::Kvm,
        ids,
        cgroup: Vec::new(),
    };
    let instance = vmm.launch(&config).await?;
    let hello = async {
        let mut channel = instance.connect_guest().await.map_err(|e| e.to_string())?;
        client_hello(&mut channel, [0x4b; NONCE_LEN]).await.map_err(|e| e.to_string())
    };
    let result = tokio::select! {
        hello = tokio::time::timeout(HELLO_DEADLINE, hello) => hello,
        exit = instance.wait() => Ok(Err(format!("the VMM ended ({exit:?})"))),
    };
    // It may have ended by itself; either way it is waited for.
    let _ = instance.kill();
    instance.wait().await;
    let why = match result {
        Ok(Ok(())) => return Ok(KvmProbe { usable: true, reason: String::new() }),
        Ok(Err(why)) => why,
        Err(_) => format!("the guest said nothing for {} s", HELLO_DEADLINE.as_secs()),
    };
    let reason = format!("/dev/kvm is there, but a trial guest did not come up: {why}");
    Ok(KvmProbe { usable: false, reason })
}
