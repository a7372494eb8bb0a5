//! Log output as plain text.

use bytes::{BufMut as _, Bytes, BytesMut};
use imp_proto::v1::{LogsResponse, OutputStream};
use k8s_openapi::jiff::Timestamp;

/// Turns a node's chunks into text: with a time before each line if wanted, and no more than so many bytes.
#[derive(Debug)]
pub(super) struct Text {
    timestamps: bool,
    left: Option<u64>,
    /// What each stream's last line still lacks: [stdout, stderr].
    inside_line: [bool; 2],
}

impl Text {
    pub(super) fn new(timestamps: bool, limit: Option<u64>) -> Self {
        Self { timestamps, left: limit, inside_line: [false; 2] }
    }

    /// The text of a chunk; `None` once the limit is reached.
    pub(super) fn chunk(&mut self, chunk: LogsResponse) -> Option<Bytes> {
        if self.left == Some(0) {
            return None;
        }
        let mut text = if self.timestamps { self.stamped(&chunk) } else { chunk.data };
        if let Some(left) = &mut self.left {
            text.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= text.len() as u64;
        }
        Some(text)
    }

    fn stamped(&mut self, chunk: &LogsResponse) -> Bytes {
        let stream = usize::from(chunk.stream() == OutputStream::Stderr);
        let time = chunk
            .time
            .and_then(|time| Timestamp::new(time.seconds, time.nanos).ok())
            .unwrap_or(Timestamp::UNIX_EPOCH);
        let stamp = format!("{time:.9} ");
        let mut text = BytesMut::with_capacity(chunk.data.len() + stamp.len());
        for line in chunk.data.split_inclusive(|byte| *byte == b'\n') {
            if !self.inside_line[stream] {
                text.put_slice(stamp.as_bytes());
            }
            text.put_slice(line);
            self.inside_line[stream] = line.last() != Some(&b'\n');
        }
        text.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(data: &str) -> LogsResponse {
        let time = Some(prost_types::Timestamp { seconds: 0, nanos: 5 });
        LogsResponse { stream: OutputStream::Stdout.into(), data: data.to_owned().into(), time }
    }

    #[test]
    fn each_line_has_its_time_however_it_was_cut() {
        let mut text = Text::new(true, None);
        assert_eq!(
            text.chunk(chunk("a\nb")).unwrap(),
            "1970-01-01T00:00:00.000000005Z a\n1970-01-01T00:00:00.000000005Z b"
        );
        assert_eq!(text.chunk(chunk("c\n")).unwrap(), "c\n");
        assert_eq!(text.chunk(chunk("d\n")).unwrap(), "1970-01-01T00:00:00.000000005Z d\n");
    }

    #[test]
    fn the_limit_counts_bytes() {
        let mut text = Text::new(false, Some(4));
        assert_eq!(text.chunk(chunk("abc")).unwrap(), "abc");
        assert_eq!(text.chunk(chunk("def")).unwrap(), "d");
        assert_eq!(text.chunk(chunk("ghi")), None);
    }
}
