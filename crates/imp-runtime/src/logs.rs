//! The workload's output on disk: bounded, with the stream and time of each piece, readable while it is written.
//!
//! Segments `<attempt>-<n>.log` of length-delimited `OutputChunk` messages; the oldest go when there are too many.

use bytes::{Bytes, BytesMut};
use camino::{Utf8Path, Utf8PathBuf};
use imp_proto::v1 as pb;
use prost::Message as _;
use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    sync::{Mutex, PoisonError},
};
use tokio::sync::watch;

/// Most bytes of a segment.
const SEGMENT_BYTES: u64 = 4 << 20;
/// Segments that are kept.
const SEGMENTS: usize = 4;

/// Number of an attempt and of a segment in it; their order is the order of what is in them.
type Name = (u32, u32);

/// The log of one VM.
#[derive(Debug)]
pub(crate) struct LogStore {
    dir: Utf8PathBuf,
    writer: Mutex<Option<Writer>>,
    changes: watch::Sender<Change>,
}

#[derive(Debug)]
struct Writer {
    name: Name,
    file: File,
    length: u64,
    sequence: u64,
}

/// What readers wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Change {
    appended: u64,
    closed: bool,
}

impl LogStore {
    /// The log in `dir`, which is made when it is first written to.
    pub(crate) fn new(dir: Utf8PathBuf) -> Self {
        Self {
            dir,
            writer: Mutex::default(),
            changes: watch::Sender::new(Change { appended: 0, closed: true }),
        }
    }

    /// Goes on with an attempt's log (or begins it) and returns the position of the next byte in the attempt's output.
    ///
    /// # Errors
    /// When the files cannot be read or written.
    pub(crate) fn open(&self, attempt: u32) -> io::Result<u64> {
        std::fs::create_dir_all(&self.dir)?;
        let last = self.segments()?.into_iter().rfind(|name| name.0 == attempt);
        let name = last.unwrap_or((attempt, 0));
        let path = self.path(name);
        let mut sequence = 0;
        let mut good = 0;
        if last.is_some() {
            // A crash may have cut the last message short; what follows it would never be read.
            let mut reader = SegmentReader::open(&path)?;
            while let Some(chunk) = reader.next()? {
                sequence = chunk.sequence + chunk.data.len() as u64;
                good = reader.consumed;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        file.set_len(good)?;
        *self.lock() = Some(Writer { name, file, length: good, sequence });
        self.changes.send_modify(|change| change.closed = false);
        Ok(sequence)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Writer>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, name: Name) -> Utf8PathBuf {
        self.dir.join(format!("{}-{}.log", name.0, name.1))
    }

    fn segments(&self) -> io::Result<Vec<Name>> {
        let entries = match self.dir.read_dir_utf8() {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(e),
        };
        let mut names: Vec<Name> = entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let (attempt, n) = entry.file_name().strip_suffix(".log")?.split_once('-')?;
                Some((attempt.parse().ok()?, n.parse().ok()?))
            })
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Appends a piece; one that is known already (after a reconnection) is left out.
    ///
    /// # Errors
    /// When the disk refuses.
    pub(crate) fn append(&self, chunk: &pb::OutputChunk) -> io::Result<()> {
        let mut guard = self.lock();
        let Some(writer) = guard.as_mut() else { return Ok(()) };
        let end = chunk.sequence + chunk.data.len() as u64;
        if end <= writer.sequence {
            return Ok(());
        }
        if writer.length >= SEGMENT_BYTES {
            let name = (writer.name.0, writer.name.1 + 1);
            let file = OpenOptions::new().create(true).append(true).open(self.path(name))?;
            *writer = Writer { name, file, length: 0, sequence: writer.sequence };
            let names = self.segments()?;
            for old in &names[..names.len().saturating_sub(SEGMENTS)] {
                std::fs::remove_file(self.path(*old))?;
            }
        }
        let bytes = chunk.encode_length_delimited_to_vec();
        writer.file.write_all(&bytes)?;
        writer.length += bytes.len() as u64;
        writer.sequence = end;
        drop(guard);
        self.changes.send_modify(|change| change.appended += 1);
        Ok(())
    }

    /// Nothing more comes in this attempt; those who follow get their end.
    pub(crate) fn close(&self) {
        *self.lock() = None;
        self.changes.send_modify(|change| change.closed = true);
    }

    /// A reader from the beginning of what is kept.
    pub(crate) fn reader(&self) -> LogReader {
        LogReader { changes: self.changes.subscribe(), position: None }
    }

    /// How many pieces at the beginning hold all but the last `lines` lines.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub(crate) fn skip_to_tail(&self, lines: u64) -> io::Result<Vec<pb::OutputChunk>> {
        let mut reader = self.reader();
        let mut kept: std::collections::VecDeque<pb::OutputChunk> = std::collections::VecDeque::new();
        let mut breaks = 0u64;
        let count = |data: &Bytes| data.iter().filter(|b| **b == b'\n').count() as u64;
        while let Some(chunk) = reader.read(self)? {
            breaks += count(&chunk.data);
            kept.push_back(chunk);
            while let Some(first) = kept.front() {
                // The unfinished last line may be one of those wanted, so that one more break is kept.
                if breaks - count(&first.data) <= lines {
                    break;
                }
                breaks -= count(&first.data);
                kept.pop_front();
            }
        }
        let ends_in_break = kept.back().is_none_or(|c| c.data.ends_with(b"\n"));
        let mut surplus = breaks.saturating_sub(if ends_in_break { lines } else { lines.saturating_sub(1) });
        let mut kept = Vec::from(kept);
        if lines == 0 {
            kept.clear();
        }
        for chunk in &mut kept {
            while surplus > 0 {
                let Some(at) = chunk.data.iter().position(|b| *b == b'\n') else { break };
                let skipped = chunk.data.split_to(at + 1);
                chunk.sequence += skipped.len() as u64;
                surplus -= 1;
            }
            if surplus == 0 {
                break;
            }
            chunk.data.clear();
        }
        kept.retain(|c| !c.data.is_empty());
        Ok(kept)
    }
}

/// Reads a log from its beginning, and waits for more at its end.
#[derive(Debug)]
pub(crate) struct LogReader {
    changes: watch::Receiver<Change>,
    position: Option<(Name, SegmentReader)>,
}

impl LogReader {
    /// The next piece; `None` at the end of what is there now.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(crate) fn read(&mut self, store: &LogStore) -> io::Result<Option<pb::OutputChunk>> {
        loop {
            if let Some((_, reader)) = &mut self.position
                && let Some(chunk) = reader.next()?
            {
                return Ok(Some(chunk));
            }
            let after = self.position.as_ref().map(|(name, _)| *name);
            let Some(next) = store.segments()?.into_iter().find(|name| after.is_none_or(|a| *name > a))
            else {
                return Ok(None);
            };
            match SegmentReader::open(&store.path(next)) {
                Ok(reader) => self.position = Some((next, reader)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// The next piece, waiting for it; `None` once the log is closed and read to its end.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(crate) async fn follow(&mut self, store: &LogStore) -> io::Result<Option<pb::OutputChunk>> {
        loop {
            // What is appended after this look wakes the wait below.
            let change = *self.changes.borrow_and_update();
            if let Some(chunk) = self.read(store)? {
                return Ok(Some(chunk));
            }
            if change.closed || self.changes.changed().await.is_err() {
                return Ok(None);
            }
        }
    }
}

#[derive(Debug)]
struct SegmentReader {
    file: File,
    buffer: BytesMut,
    /// Bytes of whole messages that were returned.
    consumed: u64,
}

impl SegmentReader {
    fn open(path: &Utf8Path) -> io::Result<Self> {
        Ok(Self { file: File::open(path)?, buffer: BytesMut::new(), consumed: 0 })
    }

    fn next(&mut self) -> io::Result<Option<pb::OutputChunk>> {
        loop {
            if let Ok(length) = prost::decode_length_delimiter(&self.buffer[..]) {
                let total = prost::length_delimiter_len(length) + length;
                if self.buffer.len() >= total {
                    let message = self.buffer.split_to(total).freeze();
                    self.consumed += total as u64;
                    let chunk = pb::OutputChunk::decode_length_delimited(message);
                    return chunk.map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
                }
            }
            let mut block = [0u8; 64 << 10];
            let n = self.file.read(&mut block)?;
            if n == 0 {
                return Ok(None);
            }
            self.buffer.extend_from_slice(&block[..n]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, LogStore) {
        let dir = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(dir.path().join("log")).unwrap();
        (dir, LogStore::new(path))
    }

    fn chunk(sequence: u64, data: &str) -> pb::OutputChunk {
        pb::OutputChunk { sequence, data: data.to_owned().into(), ..Default::default() }
    }

    fn text(chunks: &[pb::OutputChunk]) -> String {
        chunks.iter().map(|c| String::from_utf8_lossy(&c.data).into_owned()).collect()
    }

    #[tokio::test]
    async fn fr48_a_reconnection_neither_loses_nor_repeats_output() {
        let (_dir, log) = store();
        assert_eq!(log.open(0).unwrap(), 0);
        log.append(&chunk(0, "one\n")).unwrap();
        log.append(&chunk(4, "two\n")).unwrap();
        let path = log.path((0, 0));
        OpenOptions::new().append(true).open(path).unwrap().write_all(&[200, 1, 2]).unwrap();
        let log = LogStore::new(log.dir.clone());
        assert_eq!(log.open(0).unwrap(), 8, "the message that was cut short is gone");
        log.append(&chunk(4, "two\n")).unwrap();
        log.append(&chunk(8, "three\n")).unwrap();
        log.close();
        let mut reader = log.reader();
        let mut all = Vec::new();
        while let Some(chunk) = reader.follow(&log).await.unwrap() {
            all.push(chunk);
        }
        assert_eq!(text(&all), "one\ntwo\nthree\n");
    }

    #[tokio::test]
    async fn a_follower_is_told_and_gets_its_end() {
        let (_dir, log) = store();
        log.open(0).unwrap();
        let mut reader = log.reader();
        let (seen, ()) = tokio::join!(reader.follow(&log), async {
            tokio::task::yield_now().await;
            log.append(&chunk(0, "late")).unwrap();
        });
        assert_eq!(text(&[seen.unwrap().unwrap()]), "late");
        let (end, ()) = tokio::join!(reader.follow(&log), async { log.close() });
        assert_eq!(end.unwrap(), None);
    }

    #[test]
    fn the_log_is_bounded() {
        let (_dir, log) = store();
        log.open(0).unwrap();
        let data = "x".repeat(100_000);
        for n in 0..400u64 {
            log.append(&chunk(n * 100_000, &data)).unwrap();
        }
        let bytes: u64 = log.segments().unwrap().iter().map(|s| log.path(*s).metadata().unwrap().len()).sum();
        assert!(bytes <= SEGMENTS as u64 * (SEGMENT_BYTES + 200_000), "{bytes}");
    }

    #[test]
    fn the_tail_is_counted_in_lines() {
        let (_dir, log) = store();
        log.open(0).unwrap();
        for (n, data) in [(0, "a\nb"), (3, "c\nd\n"), (7, "e")] {
            log.append(&chunk(n, data)).unwrap();
        }
        assert_eq!(text(&log.skip_to_tail(2).unwrap()), "d\ne");
        assert_eq!(text(&log.skip_to_tail(1).unwrap()), "e");
        assert_eq!(text(&log.skip_to_tail(3).unwrap()), "bc\nd\ne");
        assert_eq!(text(&log.skip_to_tail(99).unwrap()), "a\nbc\nd\ne");
        assert_eq!(text(&log.skip_to_tail(0).unwrap()), "");
    }
}
