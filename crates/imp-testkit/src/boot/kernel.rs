//! Debian's cloud kernel: fetched, taken apart, kept.

use std::fs;
use std::process::{Command, Output};

use anyhow::{Context as _, Result, bail, ensure};
use camino::{Utf8Path, Utf8PathBuf};

/// The package whose dependency is the current cloud kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
/// Linux, `include/linux/decompress/unlz4.h`: what scripts/Makefile.lib makes with `lz4 -l`.
const LZ4_LEGACY_MAGIC: u32 = 0x184C_2102;
/// Blocks of the legacy frame decompress to at most this much.
const LZ4_LEGACY_BLOCK: usize = 8 << 20;

/// Modules of the guest, in the order they have to be loaded, in groups: the guest loads the first before it opens
/// its channel and the others while it says hello.
pub(super) const MODULES: [&[&str]; 3] = [
    &["virtio_ring", "virtio", "virtio_mmio", "virtio_console"],
    &["virtio_blk", "libcrc32c", "erofs", "overlay"],
    &["failover", "net_failover", "virtio_net"],
];

/// One version of the kernel as apt knows it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Package {
    /// `linux-image-6.1.0-57-cloud-amd64`.
    pub(super) name: String,
    /// `linux-image-6.1.0-57-cloud-amd64_6.1.192-3_amd64.deb`.
    pub(super) file: String,
}

impl Package {
    /// What apt would fetch today, from its lists on this machine.
    pub(super) fn current() -> Result<Self> {
        let depends = run(Command::new("apt-cache").args(["depends", META_PACKAGE]))?;
        let name = depends
            .lines()
            .find_map(|l| l.trim().strip_prefix("Depends: "))
            .with_context(|| {
                format!(
                    "apt knows no package {META_PACKAGE}: run `apt-get update` on a Debian 12 machine first"
                )
            })?
            .to_owned();
        let uris = run(Command::new("apt-get").args(["download", "--print-uris", &name]))?;
        let file = uris
            .split_whitespace()
            .find(|w| w.ends_with(".deb"))
            .with_context(|| format!("apt can't say where to fetch {name}: {}", uris.trim()))?
            .replace("%3a", ":");
        ensure!(!file.contains('/'), "apt names a strange file for {name}: {file}");
        Ok(Self { name, file })
    }

    /// Fetches and unpacks the package below `dir` and returns the unpacked tree. Nothing is installed.
    fn unpack(&self, dir: &Utf8Path) -> Result<Utf8PathBuf> {
        // As root apt fetches through its own user, which can't write here; it then says so and fetches as root.
        run(Command::new("apt-get").args(["download", "-q", &self.name]).current_dir(dir))
            .with_context(|| format!("fetch Debian's kernel {}", self.name))?;
        let deb = dir
            .read_dir_utf8()?
            .flatten()
            .map(camino::Utf8DirEntry::into_path)
            .find(|p| p.extension() == Some("deb"))
            .with_context(|| format!("apt-get download {} left no .deb in {dir}", self.name))?;
        let tree = dir.join("tree");
        run(Command::new("dpkg-deb").args(["-x", deb.as_str(), tree.as_str()]))?;
        Ok(tree)
    }

    /// Makes `dir` with `vmlinux` and the modules of [`MODULES`] as `<name>.ko`; `dir` exists whole or not at all.
    pub(super) fn extract(&self, dir: &Utf8Path) -> Result<()> {
        let parent = dir.parent().context("a cache directory has a parent")?;
        let work = tempfile::Builder::new().prefix(".kernel-").tempdir_in(parent)?;
        let work = Utf8Path::from_path(work.path()).context("the cache path is not UTF-8")?;
        let tree = self.unpack(work)?;
        let made = work.join("made");
        fs::create_dir(&made)?;

        let vmlinuz = find(&tree.join("boot"), &|n| n.starts_with("vmlinuz-"))
            .with_context(|| format!("{} has no boot/vmlinuz-*", self.file))?;
        let image = fs::read(&vmlinuz).with_context(|| format!("read {vmlinuz}"))?;
        let vmlinux =
            vmlinux(&image).with_context(|| format!("take the kernel out of {}'s vmlinuz", self.file))?;
        super::write_durably(&made.join("vmlinux"), &vmlinux)?;
        for name in MODULES.iter().copied().flatten() {
            let file = format!("{name}.ko");
            let module = find(&tree.join("lib/modules"), &|n| n == file)
                .or_else(|| find(&tree.join("usr/lib/modules"), &|n| n == file))
                .with_context(|| format!("{} has no module {file}", self.file))?;
            let data = fs::read(&module).with_context(|| format!("read {module}"))?;
            super::write_durably(&made.join(&file), &data)?;
        }
        fs::rename(&made, dir).with_context(|| format!("move the kernel to {dir}"))
    }
}

/// The ELF kernel inside a bzImage whose payload is an LZ4 legacy frame. Where the payload lies is told by the setup
/// header (Linux, Documentation/arch/x86/boot.rst: `setup_sects`, `payload_offset`, `payload_length`).
pub(super) fn vmlinux(image: &[u8]) -> Result<Vec<u8>> {
    ensure!(image.get(0x202..0x206) == Some(b"HdrS"), "not a bzImage: no setup header");
    let setup_sectors = match image[0x1f1] {
        0 => 4,
        n => usize::from(n),
    };
    let offset = (setup_sectors + 1) * 512 + word(image, 0x248)? as usize;
    let payload = image
        .get(offset..)
        .and_then(|p| p.get(..word(image, 0x24c).ok()? as usize))
        .context("the setup header points beyond the end of the image")?;
    // The frame is followed by the size of what it holds (scripts/Makefile.lib, size_append).
    let (frame, size) =
        payload.split_at_checked(payload.len().wrapping_sub(4)).context("the payload is empty")?;
    let size = word(size, 0)? as usize;
    if word(frame, 0)? != LZ4_LEGACY_MAGIC {
        bail!("the payload is not an LZ4 legacy frame (it begins with {:02x?})", &frame[..4]);
    }
    let mut elf = Vec::with_capacity(size.min(256 << 20));
    let mut rest = &frame[4..];
    while !rest.is_empty() {
        let length = word(rest, 0)? as usize;
        let block = rest.get(4..4 + length).context("an LZ4 block reaches beyond the end of the payload")?;
        elf.extend(lz4_flex::block::decompress(block, LZ4_LEGACY_BLOCK).context("decompress an LZ4 block")?);
        rest = &rest[4 + length..];
    }
    ensure!(elf.len() == size, "the kernel should have {size} bytes but has {}", elf.len());
    ensure!(elf.starts_with(b"\x7fELF"), "the payload is not an ELF file");
    Ok(elf)
}

fn word(data: &[u8], at: usize) -> Result<u32> {
    let bytes = data.get(at..at + 4).with_context(|| format!("the file ends before byte {}", at + 4))?;
    Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// The first file below `dir` whose name fits.
fn find(dir: &Utf8Path, fits: &dyn Fn(&str) -> bool) -> Option<Utf8PathBuf> {
    let mut entries: Vec<_> = dir.read_dir_utf8().ok()?.flatten().collect();
    entries.sort_by(|a, b| a.file_name().cmp(b.file_name()));
    entries.iter().find(|e| fits(e.file_name()) && e.file_type().is_ok_and(|t| t.is_file())).map_or_else(
        || {
            entries
                .iter()
                .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
                .find_map(|e| find(e.path(), fits))
        },
        |e| Some(e.path().to_owned()),
    )
}

fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let Output { status, stdout, stderr } =
        command.output().with_context(|| format!("run {name}: is this a Debian machine?"))?;
    if !status.success() {
        let stderr = String::from_utf8_lossy(&stderr);
        bail!("{name} failed ({status}): {}", stderr.trim());
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bzImage with a setup of one sector, `frame` as payload.
    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0u8; 1024];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        image.extend_from_slice(payload);
        image.extend_from_slice(b"a signature after the payload");
        image
    }

    fn frame(blocks: &[&[u8]]) -> Vec<u8> {
        let mut out = LZ4_LEGACY_MAGIC.to_le_bytes().to_vec();
        for block in blocks {
            let packed = lz4_flex::block::compress(block);
            out.extend(u32::try_from(packed.len()).unwrap().to_le_bytes());
            out.extend(packed);
        }
        let size: usize = blocks.iter().map(|b| b.len()).sum();
        out.extend(u32::try_from(size).unwrap().to_le_bytes());
        out
    }

    #[test]
    fn a_payload_of_several_blocks_is_put_together() {
        let image = bzimage(&frame(&[b"\x7fELF first", b" second"]));
        assert_eq!(vmlinux(&image).unwrap(), b"\x7fELF first second");
    }

    #[test]
    fn truncated_and_foreign_images_are_errors() {
        let image = bzimage(&frame(&[b"\x7fELF first", b" second"]));
        for end in 0..1024 + 12 {
            assert!(vmlinux(&image[..end]).is_err(), "cut at {end}");
        }
        let error = vmlinux(&bzimage(b"\x1f\x8b gzip instead")).unwrap_err();
        assert!(error.to_string().contains("not an LZ4"), "{error}");
    }
}
