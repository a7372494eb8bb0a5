//! Writes the disk: file data while the layers are read, everything else at the end.

use super::directory::{self, Name};
use super::format::{
    BLOCK_SIZE, INODE_SIZE, Layout, RawInode, SLOT, SUPER_OFFSET, device_number, super_block, xattr_body,
};
use crate::layer::tree::{Extent, Inode, InodeId, Kind, ROOT, Tree};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

/// Bytes held in memory while data is copied.
const WINDOW: usize = 1 << 20;

/// Appends the data of files.
#[derive(Debug)]
pub(crate) struct DataWriter<'f> {
    file: &'f File,
    /// The next free block.
    next: u32,
    limit_blocks: u64,
    buffer: Vec<u8>,
    pending: Pending,
}

/// Data that is gathered to be written at once: most files are small and stand one behind the other.
#[derive(Debug, Default)]
struct Pending {
    /// Where it goes, in bytes.
    at: u64,
    data: Vec<u8>,
}

impl Pending {
    /// Takes data for `at`, writing what was there if this does not follow it within a block.
    fn push(&mut self, file: &File, at: u64, data: &[u8]) -> io::Result<()> {
        let end = self.at + self.data.len() as u64;
        let gap = at.checked_sub(end).filter(|&gap| gap < BLOCK_SIZE && !self.data.is_empty());
        match gap {
            // The rest of a file's last block.
            Some(gap) => self.data.resize(self.data.len() + gap as usize, 0),
            None => {
                self.flush(file)?;
                self.at = at;
            }
        }
        self.data.extend_from_slice(data);
        if self.data.len() >= WINDOW { self.flush(file) } else { Ok(()) }
    }

    fn flush(&mut self, file: &File) -> io::Result<()> {
        file.write_all_at(&self.data, self.at)?;
        self.at += self.data.len() as u64;
        self.data.clear();
        Ok(())
    }
}

impl<'f> DataWriter<'f> {
    /// On an empty file; at most `limit` bytes will be written.
    pub(crate) fn new(file: &'f File, limit: u64) -> Self {
        // EROFS numbers blocks in 32 bits.
        let limit_blocks = (limit / BLOCK_SIZE).min(u64::from(u32::MAX - 1));
        Self { file, next: 1, limit_blocks, buffer: vec![0; WINDOW], pending: Pending::default() }
    }

    /// Reserves room for a file of `size` bytes, or nothing if the disk would be too large.
    pub(crate) fn reserve(&mut self, size: u64) -> Option<Extent> {
        let count = size.div_ceil(BLOCK_SIZE);
        let end = u64::from(self.next).checked_add(count).filter(|&end| end <= self.limit_blocks)?;
        let extent =
            Extent { block: if count == 0 { 0 } else { self.next }, count: u32::try_from(count).ok()? };
        self.next = u32::try_from(end).ok()?;
        Some(extent)
    }

    /// Copies `len` bytes to `offset` in the extent. Blocks of zeros become holes.
    pub(crate) fn copy(
        &mut self,
        from: &mut impl Read,
        extent: Extent,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let mut at = u64::from(extent.block) * BLOCK_SIZE + offset;
        let mut left = len;
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(WINDOW).min(WINDOW);
            let window = &mut self.buffer[..wanted];
            from.read_exact(window)?;
            write_sparse(self.file, &mut self.pending, window, at)?;
            at += wanted as u64;
            left -= wanted as u64;
        }
        Ok(())
    }

    /// Gives the blocks of an extent back to the host's file system. They read as zeros afterwards, so that the disk depends on
    /// the image alone and nothing shows that the image deleted.
    pub(crate) fn release(&mut self, extent: Extent) -> io::Result<()> {
        if extent.count == 0 {
            return Ok(());
        }
        self.pending.flush(self.file)?;
        let (start, len) = (u64::from(extent.block) * BLOCK_SIZE, u64::from(extent.count) * BLOCK_SIZE);
        let end = start + len;
        if end > self.file.metadata()?.len() {
            self.file.set_len(end)?;
        }
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self.file, flags, start, len) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => {
                let zeros = vec![0; WINDOW];
                let mut at = start;
                while at < end {
                    let count = usize::try_from(end - at).unwrap_or(WINDOW).min(WINDOW);
                    self.file.write_all_at(&zeros[..count], at)?;
                    at += count as u64;
                }
                Ok(())
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

fn write_sparse(file: &File, pending: &mut Pending, data: &[u8], at: u64) -> io::Result<()> {
    // Runs of blocks that hold something are written at once.
    let is_zero = |block: &[u8]| block.iter().all(|&b| b == 0);
    let mut start = 0;
    let mut offset = 0;
    for block in data.chunks(BLOCK_SIZE as usize) {
        let end = offset + block.len();
        if is_zero(block) {
            if start < offset {
                pending.push(file, at + start as u64, &data[start..offset])?;
            }
            start = end;
        }
        offset = end;
    }
    if start < data.len() { pending.push(file, at + start as u64, &data[start..]) } else { Ok(()) }
}

/// Where an inode and its data go.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// In bytes from the first inode.
    offset: u64,
    layout: Layout,
    size: u64,
    /// First block of a directory's or long link's data.
    block: u32,
}

impl Place {
    const fn nid(&self) -> u64 {
        self.offset / SLOT
    }
}

/// Writes directories, inodes and superblock behind the data. Returns the disk's size in bytes.
///
/// # Errors
/// When writing fails, or the disk would be larger than the writer's limit.
pub(crate) fn finish(writer: &mut DataWriter<'_>, tree: &Tree, uuid: [u8; 16]) -> io::Result<u64> {
    writer.pending.flush(writer.file)?;
    let order = depth_first(tree);
    let mut places: Vec<Option<Place>> = vec![None; tree.inodes.len()];
    let (meta_bytes, meta_block) = place_all(writer.next, tree, &order, &mut places)?;
    let blocks = u64::from(meta_block) + meta_bytes.div_ceil(BLOCK_SIZE);
    if blocks > writer.limit_blocks {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the disk would be larger than allowed"));
    }
    writer.file.set_len(blocks * BLOCK_SIZE)?;
    let mut output = MetaOutput::new(writer.file, u64::from(meta_block) * BLOCK_SIZE);
    for (number, (&id, parent)) in order.iter().map(|(id, parent)| (id, *parent)).enumerate() {
        let Some(place) = places[id as usize] else { continue };
        let inode = &tree.inodes[id as usize];
        let contents = contents(tree, &places, id, parent, inode);
        let xattrs = xattr_body(&inode.attributes.xattrs);
        let raw = raw_inode(tree, inode, &place, xattrs.len(), number);
        output.seek_to(place.offset)?;
        output.write_all(&raw.to_bytes())?;
        output.write_all(&xattrs)?;
        let whole = if place.layout == Layout::Inline {
            contents.len() / BLOCK_SIZE as usize * BLOCK_SIZE as usize
        } else {
            contents.len()
        };
        writer.file.write_all_at(&contents[..whole], u64::from(place.block) * BLOCK_SIZE)?;
        output.write_all(&contents[whole..])?;
    }
    output.flush()?;
    let too_many = |_| io::Error::new(io::ErrorKind::FileTooLarge, "more blocks than EROFS can number");
    let root_nid = places[ROOT as usize].map_or(0, |place| place.nid());
    let root_nid = u16::try_from(root_nid).map_err(too_many)?;
    let sb =
        super_block(root_nid, order.len() as u64, u32::try_from(blocks).map_err(too_many)?, meta_block, uuid);
    writer.file.write_all_at(&sb[SUPER_OFFSET as usize..], SUPER_OFFSET)?;
    Ok(blocks * BLOCK_SIZE)
}

/// All inodes in the order of their places, root first (its number has 16 bits only), with the directory above each directory.
fn depth_first(tree: &Tree) -> Vec<(InodeId, InodeId)> {
    let mut seen = vec![false; tree.inodes.len()];
    let mut order = Vec::new();
    let mut stack = vec![(ROOT, ROOT)];
    while let Some((id, parent)) = stack.pop() {
        if std::mem::replace(&mut seen[id as usize], true) {
            continue;
        }
        order.push((id, parent));
        if let Kind::Directory { entries, .. } = &tree.inodes[id as usize].kind {
            stack.extend(entries.values().rev().map(|entry| (entry.inode, id)));
        }
    }
    order
}

/// Places every inode and every directory's whole blocks. Returns the bytes of all inodes and the block of the first.
fn place_all(
    first_free: u32,
    tree: &Tree,
    order: &[(InodeId, InodeId)],
    places: &mut [Option<Place>],
) -> io::Result<(u64, u32)> {
    let (mut offset, mut next_block) = (0_u64, u64::from(first_free));
    for &(id, _) in order {
        let inode = &tree.inodes[id as usize];
        let head = INODE_SIZE + xattr_body(&inode.attributes.xattrs).len() as u64;
        let size = match &inode.kind {
            Kind::Directory { entries, .. } => directory::size(with_dots(entries.keys().map(AsRef::as_ref))),
            Kind::File { size, .. } => *size,
            Kind::Symlink(target) => target.len() as u64,
            _ => 0,
        };
        let in_memory = matches!(inode.kind, Kind::Directory { .. } | Kind::Symlink(_));
        let tail = if in_memory { size % BLOCK_SIZE } else { 0 };
        let inline = tail > 0 && head + tail <= BLOCK_SIZE;
        let unbroken = if inline { head + tail } else { INODE_SIZE };
        if offset % BLOCK_SIZE + unbroken > BLOCK_SIZE {
            offset = offset.next_multiple_of(BLOCK_SIZE);
        }
        let blocks = if !in_memory {
            0
        } else if inline {
            size / BLOCK_SIZE
        } else {
            size.div_ceil(BLOCK_SIZE)
        };
        let too_large = |_| io::Error::new(io::ErrorKind::FileTooLarge, "more blocks than EROFS can number");
        let block = if blocks == 0 { 0 } else { u32::try_from(next_block).map_err(too_large)? };
        let layout = if inline { Layout::Inline } else { Layout::Plain };
        places[id as usize] = Some(Place { offset, layout, size, block });
        next_block += blocks;
        offset = (offset + head + if inline { tail } else { 0 }).next_multiple_of(SLOT);
    }
    let meta_block = u32::try_from(next_block)
        .map_err(|_| io::Error::new(io::ErrorKind::FileTooLarge, "more blocks than EROFS can number"))?;
    Ok((offset, meta_block))
}

/// A directory's names with "." and ".." where they sort.
fn with_dots<'n>(names: impl Iterator<Item = &'n [u8]>) -> impl Iterator<Item = &'n [u8]> {
    let mut dots = [b".".as_slice(), b".."].into_iter().peekable();
    let mut names = names.peekable();
    std::iter::from_fn(move || match (dots.peek(), names.peek()) {
        (Some(dot), Some(name)) if dot < name => dots.next(),
        (Some(_), None) => dots.next(),
        _ => names.next(),
    })
}

/// What is stored with an inode: a directory's names or a link's target. The data of files is on the disk already.
fn contents(tree: &Tree, places: &[Option<Place>], id: InodeId, parent: InodeId, inode: &Inode) -> Vec<u8> {
    match &inode.kind {
        Kind::Symlink(target) => target.to_vec(),
        Kind::Directory { entries, .. } => {
            let names: Vec<Name<'_>> = with_dots(entries.keys().map(AsRef::as_ref))
                .filter_map(|name| {
                    let target = match name {
                        b"." => id,
                        b".." => parent,
                        _ => entries.get(name)?.inode,
                    };
                    let nid = places[target as usize]?.nid();
                    Some(Name { name, nid, file_type: file_type(&tree.inodes[target as usize].kind) })
                })
                .collect();
            directory::data(&names)
        }
        _ => Vec::new(),
    }
}

/// EROFS_FT_*.
const fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File { .. } => 1,
        Kind::Directory { .. } => 2,
        Kind::CharDevice(..) => 3,
        Kind::BlockDevice(..) => 4,
        Kind::Fifo => 5,
        Kind::Symlink(_) => 7,
        Kind::Gone => 0,
    }
}

fn raw_inode(tree: &Tree, inode: &Inode, place: &Place, xattr_bytes: usize, number: usize) -> RawInode {
    let (type_bits, location, links) = match &inode.kind {
        Kind::Directory { entries, .. } => {
            let is_directory = |id: InodeId| matches!(tree.inodes[id as usize].kind, Kind::Directory { .. });
            let subdirectories = entries.values().filter(|entry| is_directory(entry.inode)).count();
            (0o040_000, place.block, u32::try_from(2 + subdirectories).unwrap_or(u32::MAX))
        }
        Kind::File { data, .. } => (0o100_000, data.block, inode.links),
        Kind::Symlink(_) => (0o120_000, place.block, inode.links),
        Kind::CharDevice(major, minor) => (0o020_000, device_number(*major, *minor), inode.links),
        Kind::BlockDevice(major, minor) => (0o060_000, device_number(*major, *minor), inode.links),
        Kind::Fifo | Kind::Gone => (0o010_000, 0, inode.links),
    };
    RawInode {
        layout: place.layout,
        xattr_bytes,
        mode: type_bits | inode.attributes.mode,
        size: place.size,
        location,
        number: u32::try_from(number + 1).unwrap_or(u32::MAX),
        uid: inode.attributes.uid,
        gid: inode.attributes.gid,
        mtime: inode.attributes.mtime,
        links,
    }
}

/// Inodes one after the other, in large writes.
struct MetaOutput<'f> {
    file: &'f File,
    start: u64,
    /// Bytes from `start` to the beginning of the buffer.
    flushed: u64,
    buffer: Vec<u8>,
}

impl<'f> MetaOutput<'f> {
    fn new(file: &'f File, start: u64) -> Self {
        Self { file, start, flushed: 0, buffer: Vec::with_capacity(WINDOW) }
    }

    /// Fills with zeros up to `offset`, which is never before what was written.
    fn seek_to(&mut self, offset: u64) -> io::Result<()> {
        let here = self.flushed + self.buffer.len() as u64;
        let gap = usize::try_from(offset.saturating_sub(here)).map_err(io::Error::other)?;
        self.buffer.resize(self.buffer.len() + gap, 0);
        Ok(())
    }
}

impl Write for MetaOutput<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= WINDOW {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.buffer, self.start + self.flushed)?;
        self.flushed += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}
