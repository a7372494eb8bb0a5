//! A writer for the initramfs: cpio archives in the "newc" format (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
//! The same input gives the same bytes: no clock, owner root, inode numbers counted from 1.

use std::io::{self, Write};

/// `c_filesize` has eight hexadecimal digits.
const MAX_FILE: usize = u32::MAX as usize;
const TRAILER: &str = "TRAILER!!!";

/// Writes entries one after another; [`Cpio::finish`] ends the archive.
#[derive(Debug)]
pub struct Cpio<W> {
    out: W,
    inodes: u32,
}

impl<W: Write> Cpio<W> {
    /// An empty archive.
    pub fn new(out: W) -> Self {
        Self { out, inodes: 0 }
    }

    /// A directory; `mode` are the permission bits. Parents come first: the kernel makes none by itself.
    ///
    /// # Errors
    /// When writing fails.
    pub fn directory(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.entry(path, 0o040_000 | (mode & 0o7777), (0, 0), &[])
    }

    /// A regular file.
    ///
    /// # Errors
    /// When writing fails or the file has 4 GiB or more.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, 0o100_000 | (mode & 0o7777), (0, 0), data)
    }

    /// A character device.
    ///
    /// # Errors
    /// When writing fails.
    pub fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> io::Result<()> {
        self.entry(path, 0o020_000 | (mode & 0o7777), (major, minor), &[])
    }

    /// Writes the trailer and returns the writer.
    ///
    /// # Errors
    /// When writing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.inodes = 0;
        self.entry(TRAILER, 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) -> io::Result<()> {
        if data.len() > MAX_FILE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{path} is too large for a cpio archive"),
            ));
        }
        let inode = if path == TRAILER { 0 } else { self.inodes + 1 };
        self.inodes = inode;
        let name_len = path.len() + 1;
        // magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        let header = format!(
            "070701{inode:08X}{mode:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{name_len:08X}{:08X}",
            0,
            0,
            1,
            0,
            data.len(),
            0,
            0,
            device.0,
            device.1,
            0
        );
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(header.len() + name_len)?;
        self.out.write_all(data)?;
        self.pad(data.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        let zeros = [0u8; 3];
        self.out.write_all(&zeros[..written.next_multiple_of(4) - written])
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn sample() -> Vec<u8> {
        let mut cpio = Cpio::new(Vec::new());
        cpio.directory("lib", 0o755).unwrap();
        cpio.file("lib/odd", 0o640, b"seven..").unwrap();
        cpio.file("init", 0o755, &vec![7u8; 10_000]).unwrap();
        cpio.finish().unwrap()
    }

    #[test]
    fn the_same_input_gives_the_same_bytes() {
        assert_eq!(sample(), sample());
        assert_eq!(sample().len() % 4, 0);
    }

    #[test]
    fn cpio_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new("cpio")
            .args(["-idm", "--quiet"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .spawn()
            .expect("cpio(1) is needed (Debian package cpio)");
        child.stdin.take().unwrap().write_all(&sample()).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(std::fs::read(dir.path().join("lib/odd")).unwrap(), b"seven..");
        assert_eq!(std::fs::read(dir.path().join("init")).unwrap().len(), 10_000);
        let mode =
            std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(dir.path().join("lib/odd")).unwrap());
        assert_eq!(mode & 0o7777, 0o640);
    }
}
