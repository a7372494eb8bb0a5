//! Writes EROFS: the read-only file system of a root disk.
//!
//! Uncompressed, 4 KiB blocks, extended inodes (nanosecond times, 32-bit owners and link counts), attributes inline. Needs Linux 5.4.
//! Layout: superblock in block 0, file data as it came from the layers, then full blocks of directories, then inodes. The format is
//! in Linux' fs/erofs/erofs_fs.h and Documentation/filesystems/erofs.rst.
//!
//! Own code, because what there is does not fit: `mkfs.erofs` wants the files unpacked on the host (version 1.5 has no tar mode), and
//! the crates either write metadata alone or want a directory too. The same layers always give the same bytes.

mod directory;
mod format;
mod writer;

pub(crate) use format::{BLOCK_SIZE, xattr_index};
pub(crate) use writer::{DataWriter, finish};
