//! The baseline: the same kernel, disks and QEMU line, with a first user process that only says that it is there.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use camino::{Utf8Path, Utf8PathBuf};
use imp_testkit::{boot, images, netns};
use imp_vmm::qemu::{PROGRAM, Qemu};
use imp_vmm::{Accelerator, Drive, LaunchConfig, Vmm as _};
use tokio::io::AsyncReadExt as _;

/// What the first user process prints first.
const SIGN: &[u8] = b"argv=";
/// A boot that takes longer has failed.
const DEADLINE: Duration = Duration::from_secs(120);

/// What is booted, again and again.
pub(super) struct Bare {
    dir: tempfile::TempDir,
    kernel: Utf8PathBuf,
    image: Utf8PathBuf,
    qemu: Qemu,
}

impl Bare {
    /// With the disk of an image that a node has laid out.
    pub(super) fn new(guest: &Utf8Path, kernel: &Utf8Path, image: &Utf8Path) -> Result<Self> {
        let bare = Self {
            dir: tempfile::tempdir().context("make a directory")?,
            kernel: kernel.to_owned(),
            image: image.to_owned(),
            qemu: Qemu::new(Utf8Path::new(PROGRAM))?,
        };
        let initrd = boot::bare_initramfs(guest, &images::probe()?)?;
        std::fs::write(bare.path("initramfs.cpio"), initrd).context("write the initramfs")?;
        let disk = bare.path("disk.ext4");
        std::fs::File::create(&disk)?.set_len(2 << 30)?;
        netns::run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", disk.as_str()]))?;
        Ok(bare)
    }

    fn path(&self, name: &str) -> Utf8PathBuf {
        Utf8Path::from_path(self.dir.path()).unwrap_or_else(|| Utf8Path::new("/tmp")).join(name)
    }

    /// One boot, from before QEMU is started to the first user process.
    pub(super) async fn boot(&self, memory_mib: u64) -> Result<Duration> {
        let run_dir = self.path("run");
        std::fs::create_dir_all(&run_dir).context("make a directory")?;
        let config = LaunchConfig {
            uid: format!("bench-{}", std::process::id()),
            run_dir,
            kernel: self.kernel.clone(),
            initrd: self.path("initramfs.cpio"),
            vcpus: 1,
            memory_mib,
            drives: vec![
                Drive { path: self.image.clone(), read_only: true },
                Drive { path: self.path("disk.ext4"), read_only: false },
            ],
            // Nothing touches it before user space; there is no tap to give.
            nic: None,
            accelerator: Accelerator::Tcg,
            ids: (0, 0),
            cgroup: Vec::new(),
        };
        let start = Instant::now();
        let instance = self.qemu.launch(&config).await?;
        let sign = async {
            let mut console = instance.connect_console().await?;
            let mut seen = Vec::new();
            while !seen.windows(SIGN.len()).any(|w| w == SIGN) {
                let read = console.read_buf(&mut seen).await.context("read the console")?;
                ensure!(read > 0, "the console ended: {}", String::from_utf8_lossy(&seen));
            }
            anyhow::Ok(start.elapsed())
        };
        let result = tokio::time::timeout(DEADLINE, sign).await;
        instance.kill()?;
        instance.wait().await;
        result.context("the bare boot took too long")?
    }
}
