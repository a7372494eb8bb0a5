//! The workload's output: a ring that holds the workload back while somebody reads and forgets the oldest otherwise.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use imp_proto::v1::{OutputChunk, OutputStream};
use tokio::sync::watch;

/// What the ring holds at most, in bytes.
pub(crate) const CAPACITY: usize = 1 << 20;
/// What keeping a chunk costs beside its bytes; many tiny writes must not fill the memory.
const CHUNK_COST: usize = 64;

struct Chunk {
    sequence: u64,
    stream: OutputStream,
    data: Bytes,
    time: SystemTime,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.sequence + self.data.len() as u64
    }

    fn cost(&self) -> usize {
        self.data.len() + CHUNK_COST
    }
}

#[derive(Default)]
struct State {
    chunks: VecDeque<Chunk>,
    /// Sum of the chunks' costs.
    cost: usize,
    /// Position of the next byte.
    next: u64,
    ended: bool,
    /// Up to where each connected reader has taken the output.
    readers: HashMap<u64, u64>,
    next_reader: u64,
}

impl State {
    /// Makes room for `cost`, never at the expense of a connected reader.
    fn make_room(&mut self, cost: usize, capacity: usize) -> bool {
        let needed_from = self.readers.values().copied().min().unwrap_or(u64::MAX);
        while self.cost + cost > capacity {
            match self.chunks.front() {
                // One chunk larger than the ring is taken all the same.
                None => return true,
                Some(oldest) if oldest.end() > needed_from => return false,
                Some(oldest) => {
                    self.cost -= oldest.cost();
                    self.chunks.pop_front();
                }
            }
        }
        true
    }

    /// The first output at or after `position`.
    fn at(&self, position: u64) -> Option<OutputChunk> {
        let index = self.chunks.partition_point(|c| c.end() <= position);
        let chunk = self.chunks.get(index)?;
        let skip = usize::try_from(position.saturating_sub(chunk.sequence)).unwrap_or(0);
        Some(OutputChunk {
            sequence: chunk.sequence + skip as u64,
            stream: chunk.stream.into(),
            data: chunk.data.slice(skip..),
            time: Some(chunk.time.into()),
            end: false,
        })
    }
}

/// The ring.
pub(crate) struct Output {
    state: Mutex<State>,
    capacity: usize,
    /// Tells readers of output and writers of room.
    changes: watch::Sender<()>,
}

impl Output {
    /// An empty ring of `capacity` bytes.
    pub(crate) fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), capacity, changes: watch::Sender::new(()) })
    }

    /// A panic elsewhere leaves no half-made change in here.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends `data`; waits while a connected reader still needs what would have to give way.
    pub(crate) async fn push(&self, stream: OutputStream, data: Bytes) {
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            {
                let mut state = self.state();
                if state.make_room(data.len() + CHUNK_COST, self.capacity) {
                    let chunk = Chunk { sequence: state.next, stream, data, time: SystemTime::now() };
                    state.next = chunk.end();
                    state.cost += chunk.cost();
                    state.chunks.push_back(chunk);
                    break;
                }
            }
            // Can't fail: the sender is in `self`.
            let _ = changes.changed().await;
        }
        self.changes.send_replace(());
    }

    /// The workload writes no more.
    pub(crate) fn end(&self) {
        self.state().ended = true;
        self.changes.send_replace(());
    }

    /// Connects a reader from `position` on; a position in the future counts as now.
    pub(crate) fn read_from(self: &Arc<Self>, position: u64) -> Reader {
        let mut state = self.state();
        let position = position.min(state.next);
        let id = state.next_reader;
        state.next_reader += 1;
        state.readers.insert(id, position);
        Reader { output: Arc::clone(self), changes: self.changes.subscribe(), id, position, finished: false }
    }

    /// Connects a reader to what is written from now on.
    pub(crate) fn read_new(self: &Arc<Self>) -> Reader {
        self.read_from(u64::MAX)
    }
}

/// A connected reader; dropping it disconnects it.
pub(crate) struct Reader {
    output: Arc<Output>,
    changes: watch::Receiver<()>,
    id: u64,
    position: u64,
    finished: bool,
}

impl Reader {
    /// The next chunk; the last one has `end`, then nothing. Asking says that the chunk before has been taken.
    pub(crate) async fn next(&mut self) -> Option<OutputChunk> {
        if self.finished {
            return None;
        }
        loop {
            self.changes.mark_unchanged();
            {
                let mut state = self.output.state();
                if let Some(acknowledged) = state.readers.get_mut(&self.id)
                    && *acknowledged != self.position
                {
                    *acknowledged = self.position;
                    self.output.changes.send_replace(());
                    self.changes.mark_unchanged();
                }
                if let Some(chunk) = state.at(self.position) {
                    self.position = chunk.sequence + chunk.data.len() as u64;
                    return Some(chunk);
                }
                if state.ended {
                    self.finished = true;
                    return Some(OutputChunk { sequence: state.next, end: true, ..OutputChunk::default() });
                }
            }
            // Can't fail: the sender is in `self.output`.
            let _ = self.changes.changed().await;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.output.state().readers.remove(&self.id);
        self.output.changes.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use futures::{FutureExt as _, poll};
    use proptest::prelude::*;

    use super::*;

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    async fn push(output: &Output, text: &str) {
        output.push(OutputStream::Stdout, Bytes::copy_from_slice(text.as_bytes())).await;
    }

    #[test]
    fn without_a_reader_the_oldest_gives_way_and_the_gap_shows() {
        block_on(async {
            let output = Output::new(2 * (10 + CHUNK_COST));
            for text in ["0123456789", "abcdefghij", "ABCDEFGHIJ"] {
                push(&output, text).await;
            }
            output.end();
            let mut reader = output.read_from(0);
            let first = reader.next().await.unwrap();
            assert_eq!((first.sequence, &first.data[..]), (10, &b"abcdefghij"[..]));
            assert_eq!(reader.next().await.unwrap().sequence, 20);
            let end = reader.next().await.unwrap();
            assert!(end.end && end.sequence == 30);
            assert!(reader.next().await.is_none());
        });
    }

    #[test]
    fn a_connected_reader_holds_the_writer_back_until_it_has_taken_or_gone() {
        block_on(async {
            let output = Output::new(10 + CHUNK_COST);
            let mut reader = output.read_from(0);
            push(&output, "0123456789").await;
            let mut second = Box::pin(push(&output, "abcdefghij"));
            assert!(matches!(poll!(&mut second), Poll::Pending));
            assert_eq!(reader.next().await.unwrap().sequence, 0);
            assert!(matches!(poll!(&mut second), Poll::Pending), "handed out is not yet taken");
            assert!(reader.next().now_or_never().is_none());
            second.await;
            assert_eq!(reader.next().await.unwrap().sequence, 10);

            let mut third = Box::pin(push(&output, "ABCDEFGHIJ"));
            assert!(matches!(poll!(&mut third), Poll::Pending));
            drop(reader);
            third.await;
        });
    }

    #[test]
    fn a_reader_starts_in_the_middle_of_a_chunk() {
        block_on(async {
            let output = Output::new(CAPACITY);
            push(&output, "0123456789").await;
            let chunk = output.read_from(4).next().await.unwrap();
            assert_eq!((chunk.sequence, &chunk.data[..]), (4, &b"456789"[..]));
            let mut reader = output.read_new();
            assert!(reader.next().now_or_never().is_none());
            push(&output, "new").await;
            assert_eq!(reader.next().await.unwrap().data, "new");
        });
    }

    proptest! {
        #[test]
        fn a_reader_from_the_start_gets_every_byte_in_order(writes in prop::collection::vec(1usize..40, 1..60)) {
            block_on(async {
                let output = Output::new(300);
                let mut reader = output.read_from(0);
                let total: usize = writes.iter().sum();
                let write = async {
                    let mut next = 0u8;
                    for size in writes {
                        let data: Vec<u8> = (0..size).map(|_| { next = next.wrapping_add(1); next }).collect();
                        output.push(OutputStream::Stderr, data.into()).await;
                    }
                    output.end();
                };
                let read = async {
                    let mut got = Vec::new();
                    while let Some(chunk) = reader.next().await {
                        assert_eq!(chunk.sequence, got.len() as u64);
                        got.extend_from_slice(&chunk.data);
                    }
                    got
                };
                let ((), got) = futures::join!(write, read);
                assert_eq!(got.len(), total);
                assert!(got.iter().enumerate().all(|(i, b)| *b == ((i + 1) % 256) as u8));
            });
        }
    }
}
