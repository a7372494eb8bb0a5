//! A file that keeps the end of what a serial console said, and never grows beyond two parts.

use camino::{Utf8Path, Utf8PathBuf};
use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
};

/// Most bytes of one part; the file and its predecessor together hold at most twice as much.
pub const PART_BYTES: u64 = 1 << 20;

/// The log of one console. What is written is the guest's word: any bytes.
#[derive(Debug)]
pub struct ConsoleLog {
    path: Utf8PathBuf,
    file: File,
    length: u64,
}

impl ConsoleLog {
    /// Opens the log at `path`, going on where an earlier one stopped.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Utf8Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, length })
    }

    /// Appends what the console said.
    ///
    /// # Errors
    /// When the disk is full or the file cannot be replaced.
    pub fn append(&mut self, data: &[u8]) -> io::Result<()> {
        if self.length + data.len() as u64 > PART_BYTES {
            std::fs::rename(&self.path, previous(&self.path))?;
            self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            self.length = 0;
        }
        let data = &data[data.len().saturating_sub(usize::try_from(PART_BYTES).unwrap_or(usize::MAX))..];
        self.file.write_all(data)?;
        self.length += data.len() as u64;
        Ok(())
    }
}

fn previous(path: &Utf8Path) -> Utf8PathBuf {
    Utf8PathBuf::from(format!("{path}.1"))
}

/// The last `count` lines that the console at `path` said, without control characters; empty when there is no log.
#[must_use]
pub fn tail(path: &Utf8Path, count: usize) -> Vec<String> {
    let mut bytes = std::fs::read(previous(path)).unwrap_or_default();
    bytes.extend(std::fs::read(path).unwrap_or_default());
    let text = String::from_utf8_lossy(&bytes);
    let clean = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
    let lines: Vec<String> = text.lines().map(clean).filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(count)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_bounded_and_keeps_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().join("console.log")).unwrap();
        let mut log = ConsoleLog::open(&path).unwrap();
        let line = [b'x'; 1023];
        for n in 0..4000 {
            log.append(&line).unwrap();
            log.append(format!("\r\nline {n}\n").as_bytes()).unwrap();
        }
        drop(log);
        ConsoleLog::open(&path).unwrap().append(b"the \x1b[1mlast\n").unwrap();
        let kept: u64 = [path.clone(), previous(&path)].iter().map(|p| p.metadata().unwrap().len()).sum();
        assert!(kept <= 2 * PART_BYTES, "{kept}");
        assert_eq!(tail(&path, 2), ["line 3999", "the [1mlast"]);
        assert_eq!(tail(Utf8Path::new("/does/not/exist"), 3), Vec::<String>::new());
    }
}
