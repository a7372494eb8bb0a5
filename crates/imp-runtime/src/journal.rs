//! What the runtime must remember of each VM: written, and on disk, before anything is done.
//!
//! One file for each VM, `vms/<uid>/vm.json`, replaced as a whole. Secrets are never in it.

use camino::{Utf8Path, Utf8PathBuf};
use imp_core::request_queue::{Stage, Wish};
use imp_net::Attachment;
use imp_proto::v1 as pb;
use imp_vmm::ProcessRecord;
use prost::Message as _;
use serde::{Deserialize, Serialize};
use std::{fs::File, io, io::Write as _};

/// Version of the record's format. An unknown one is left alone and told.
const VERSION: u32 = 1;
const FILE: &str = "vm.json";

/// A record of a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    /// The wanted VM: a `VmSpec` in its wire format.
    #[serde(with = "wire")]
    pub(crate) spec: pb::VmSpec,
    /// Being deleted, with so many seconds of grace (none: the spec's).
    pub(crate) delete: Option<Deletion>,
    /// Number of the VM's user: the base plus this.
    pub(crate) slot: u32,
    /// The attempt that was begun last.
    pub(crate) attempt: Option<Attempt>,
    /// The VM's place in its network, from before it is made until after it is gone.
    pub(crate) attachment: Option<Attachment>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Deletion {
    pub(crate) grace_seconds: Option<u32>,
}

/// One run of a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Attempt {
    pub(crate) number: u32,
    /// Boot of the host that it belongs to.
    pub(crate) boot_id: String,
    pub(crate) progress: Progress,
    /// The last status that was told, in its wire format; `state`, `exit`, `failure` and timings live on in it.
    #[serde(with = "wire")]
    pub(crate) status: pb::VmStatus,
}

/// How far an attempt is, as far as a crash must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Progress {
    /// No VMM was started.
    Preparing,
    /// A VMM is about to be started, or was.
    Launching,
    /// This process was started.
    Launched(ProcessRecord),
    /// The guest was configured: the workload was started, or could not be.
    Configured(ProcessRecord),
    /// Over. What was made for the attempt may still have to be freed.
    Ended,
    /// Over, and freed.
    Freed,
}

impl Record {
    pub(crate) fn new(spec: pb::VmSpec, slot: u32) -> Self {
        Self { version: VERSION, spec, delete: None, slot, attempt: None, attachment: None }
    }

    pub(crate) fn wish(&self) -> Wish {
        Wish {
            generation: self.spec.generation,
            attempt: self.spec.attempt,
            run: self.spec.run_state() != pb::RunState::Stopped,
            delete: self.delete.is_some(),
        }
    }

    /// The attempt and its stage, as the decider wants it.
    pub(crate) fn begun(&self) -> Option<(u32, Stage)> {
        let attempt = self.attempt.as_ref()?;
        let stage = match attempt.progress {
            Progress::Preparing | Progress::Launching => Stage::Starting,
            // Ended and not freed: the driver goes on to free it.
            Progress::Launched(_) | Progress::Configured(_) | Progress::Ended => Stage::Alive,
            Progress::Freed => Stage::Ended,
        };
        Some((attempt.number, stage))
    }

    pub(crate) fn uid(&self) -> &str {
        self.spec.vm.as_ref().map_or("", |vm| vm.uid.as_str())
    }
}

/// The directory of all records.
#[derive(Clone, Debug)]
pub(crate) struct Journal {
    root: Utf8PathBuf,
}

impl Journal {
    /// # Errors
    /// When the directory cannot be made.
    pub(crate) fn open(state_dir: &Utf8Path) -> io::Result<Self> {
        let root = state_dir.join("vms");
        std::fs::create_dir_all(&root)?;
        Ok(Self { root })
    }

    /// The VM's own directory.
    pub(crate) fn dir(&self, uid: &str) -> Utf8PathBuf {
        self.root.join(uid)
    }

    /// Writes a record through to the disk.
    ///
    /// # Errors
    /// When the disk refuses; the old record is still there then.
    pub(crate) fn write(&self, record: &Record) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt as _;
        let dir = self.dir(record.uid());
        if !dir.exists() {
            std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
            File::open(&self.root)?.sync_all()?;
        }
        let new = dir.join("vm.json.new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec_pretty(record)?)?;
        file.sync_all()?;
        std::fs::rename(&new, dir.join(FILE))?;
        File::open(&dir)?.sync_all()
    }

    /// Forgets a VM and removes its directory. The record goes first: what is left without one belongs to nobody.
    ///
    /// # Errors
    /// When the disk refuses.
    pub(crate) fn remove(&self, uid: &str) -> io::Result<()> {
        let dir = self.dir(uid);
        for result in [std::fs::remove_file(dir.join(FILE)), std::fs::remove_dir_all(&dir)] {
            match result {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        File::open(&self.root)?.sync_all()
    }

    /// Asked for a VM that is not known: one with a record is one whose record could not be read.
    ///
    /// # Errors
    /// When there is a record.
    pub(crate) fn refuse_unreadable(&self, uid: &str) -> Result<(), Unreadable> {
        let record = self.dir(uid).join(FILE);
        if !uid.is_empty() && record.exists() { Err(Unreadable(record)) } else { Ok(()) }
    }

    /// All records. Directories without a record are what a crash left, and are removed.
    ///
    /// # Errors
    /// When the directory cannot be read. A record that cannot be is told in the log and left alone, with its VM.
    pub(crate) fn load(&self) -> io::Result<Loaded> {
        let mut records = Vec::new();
        let mut unreadable = Vec::new();
        for entry in self.root.read_dir_utf8()? {
            let dir = entry?.into_path();
            match std::fs::read(dir.join(FILE)) {
                Ok(bytes) => match serde_json::from_slice::<Record>(&bytes) {
                    Ok(record) if record.version == VERSION && dir.file_name() == Some(record.uid()) => {
                        records.push(record);
                    }
                    Ok(record) => {
                        tracing::error!(%dir, version = record.version, "this record is none of this version's; its VM is left alone");
                        unreadable.extend(dir.file_name().map(str::to_owned));
                    }
                    Err(error) => {
                        tracing::error!(%dir, %error, "this record cannot be read; its VM is left alone");
                        unreadable.extend(dir.file_name().map(str::to_owned));
                    }
                },
                Err(e) if e.kind() == io::ErrorKind::NotFound => std::fs::remove_dir_all(&dir)?,
                Err(e) => return Err(e),
            }
        }
        Ok(Loaded { records, unreadable })
    }
}

/// A VM that nothing may be done with.
#[derive(Debug, thiserror::Error)]
#[error(
    "the record {0} cannot be read, and its VM may run: repair it, or end the VM and remove its directory, then restart the runtime"
)]
pub struct Unreadable(Utf8PathBuf);

/// What was found at start.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) records: Vec<Record>,
    /// Names of directories, which are UIDs, of records that cannot be read. Their VMs may run.
    pub(crate) unreadable: Vec<String>,
}

/// Protobuf messages inside JSON, as base64.
mod wire {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use prost::Message;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<M: Message, S: Serializer>(message: &M, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(&STANDARD.encode(message.encode_to_vec()))
    }

    pub(super) fn deserialize<'de, M: Message + Default, D: Deserializer<'de>>(
        input: D,
    ) -> Result<M, D::Error> {
        let text = String::deserialize(input)?;
        let bytes = STANDARD.decode(text).map_err(D::Error::custom)?;
        M::decode(bytes.as_slice()).map_err(D::Error::custom)
    }
}

/// A specification and what it must have to be journaled.
///
/// # Errors
/// Says what is missing.
pub(crate) fn check(spec: &pb::VmSpec) -> Result<(), String> {
    let vm = spec.vm.as_ref().ok_or("the VM has no reference")?;
    let valid = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if vm.uid.is_empty() || vm.uid.len() > 63 || !vm.uid.chars().all(valid) {
        return Err(format!("{:?} is no UID: 1 to 63 letters, digits and '-'", vm.uid));
    }
    let resources = spec.resources.as_ref().ok_or("the VM has no resources")?;
    if resources.vcpus == 0 || resources.memory_mib < 64 || resources.disk_gib == 0 {
        return Err("a VM has at least 1 vCPU, 64 MiB of memory and 1 GiB of disk".to_owned());
    }
    spec.image.as_ref().ok_or("the VM has no image")?;
    if spec.encoded_len() > 1 << 20 {
        return Err("the specification is larger than 1 MiB".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(uid: &str) -> pb::VmSpec {
        pb::VmSpec {
            vm: Some(pb::VmRef { uid: uid.into(), namespace: "n".into(), name: "v".into() }),
            generation: 3,
            resources: Some(pb::Resources { vcpus: 1, memory_mib: 128, disk_gib: 1 }),
            image: Some(pb::ImageSpec::default()),
            ..Default::default()
        }
    }

    #[test]
    fn what_is_written_is_read_and_what_has_no_record_goes() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(Utf8Path::from_path(dir.path()).unwrap()).unwrap();
        journal.write(&Record::new(spec("u1"), 7)).unwrap();
        std::fs::create_dir(journal.dir("half-made")).unwrap();
        std::fs::create_dir(journal.dir("broken")).unwrap();
        std::fs::write(journal.dir("broken").join(FILE), "{").unwrap();
        let Loaded { records, unreadable } = journal.load().unwrap();
        assert_eq!(unreadable, ["broken"]);
        assert_eq!((records.len(), records[0].uid(), records[0].slot), (1, "u1", 7));
        assert_eq!(records[0].spec, spec("u1"));
        assert!(!journal.dir("half-made").exists());
        assert!(journal.dir("broken").exists(), "what cannot be read is left for people");
        journal.remove("u1").unwrap();
        journal.remove("u1").unwrap();
        assert!(!journal.dir("u1").exists());
    }

    #[test]
    fn a_uid_is_no_path() {
        for bad in ["", "..", "a/b", "a b", &"x".repeat(64)] {
            assert!(check(&spec(bad)).is_err(), "{bad}");
        }
        check(&spec("6f1a-x")).unwrap();
    }
}
