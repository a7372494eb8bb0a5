//! EROFS structures as bytes (Linux, fs/erofs/erofs_fs.h; all numbers little endian).

use crate::layer::tree::Xattrs;

/// Bytes of a block.
pub(crate) const BLOCK_SIZE: u64 = 4096;
pub(super) const BLOCK_BITS: u8 = 12;

pub(super) const SUPER_OFFSET: u64 = 1024;
const SUPER_MAGIC: u32 = 0xE0F5_E1E2;
/// The superblock carries a checksum.
const COMPAT_SB_CHKSUM: u32 = 1;
/// Inodes carry mtime, not ctime.
const COMPAT_MTIME: u32 = 2;

/// Inodes are numbered by their place in units of this many bytes.
pub(super) const SLOT: u64 = 32;
/// Bytes of an extended inode.
pub(super) const INODE_SIZE: u64 = 64;
/// Bytes of a directory entry without its name.
pub(super) const DIRENT_SIZE: usize = 12;

const XATTR_HEADER: usize = 12;
const XATTR_ENTRY: usize = 4;

/// Where an inode's data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// In whole blocks.
    Plain = 0,
    /// In whole blocks, the rest right behind the inode.
    Inline = 2,
}

/// An extended inode.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawInode {
    pub(super) layout: Layout,
    pub(super) xattr_bytes: usize,
    /// Type and permissions as st_mode.
    pub(super) mode: u16,
    pub(super) size: u64,
    /// First block of the data, or the device's number.
    pub(super) location: u32,
    pub(super) number: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: (i64, u32),
    pub(super) links: u32,
}

impl RawInode {
    pub(super) fn to_bytes(self) -> [u8; INODE_SIZE as usize] {
        let mut out = [0; INODE_SIZE as usize];
        // Bit 0: extended; bits 1 to 3: layout.
        put(&mut out, 0, &(1 | ((self.layout as u16) << 1)).to_le_bytes());
        put(&mut out, 2, &xattr_count(self.xattr_bytes).to_le_bytes());
        put(&mut out, 4, &self.mode.to_le_bytes());
        put(&mut out, 8, &self.size.to_le_bytes());
        put(&mut out, 16, &self.location.to_le_bytes());
        put(&mut out, 20, &self.number.to_le_bytes());
        put(&mut out, 24, &self.uid.to_le_bytes());
        put(&mut out, 28, &self.gid.to_le_bytes());
        put(&mut out, 32, &self.mtime.0.to_le_bytes());
        put(&mut out, 40, &self.mtime.1.to_le_bytes());
        put(&mut out, 44, &self.links.to_le_bytes());
        out
    }
}

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The superblock's block with its checksum.
pub(super) fn super_block(
    root_nid: u16,
    inodes: u64,
    blocks: u32,
    meta_block: u32,
    uuid: [u8; 16],
) -> Vec<u8> {
    let mut block = vec![0; crate::erofs::BLOCK_SIZE as usize];
    let sb = &mut block[SUPER_OFFSET as usize..];
    put(sb, 0, &SUPER_MAGIC.to_le_bytes());
    put(sb, 8, &(COMPAT_SB_CHKSUM | COMPAT_MTIME).to_le_bytes());
    sb[12] = BLOCK_BITS;
    put(sb, 14, &root_nid.to_le_bytes());
    put(sb, 16, &inodes.to_le_bytes());
    put(sb, 36, &blocks.to_le_bytes());
    put(sb, 40, &meta_block.to_le_bytes());
    put(sb, 48, &uuid);
    put(sb, 64, b"imp-root");
    // From the superblock to the end of its block, with the checksum's own field zero.
    let sum = crc32c(sb);
    put(sb, 4, &sum.to_le_bytes());
    block
}

/// CRC-32C as the kernel's crc32c(~0, ...): without the final inversion.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(
            crc ^ u32::from(byte),
            |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 },
        )
    })
}

/// A device's number as new_encode_dev(): 12 bits of major within 20 bits of minor.
pub(super) const fn device_number(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// The number that stands for the beginning of an attribute's name, and the rest of the name; none if EROFS cannot keep it.
pub(crate) fn xattr_index(name: &[u8]) -> Option<(u8, &[u8])> {
    match name {
        b"system.posix_acl_access" => return Some((2, b"")),
        b"system.posix_acl_default" => return Some((3, b"")),
        _ => {}
    }
    [(1, b"user.".as_slice()), (4, b"trusted."), (6, b"security.")]
        .into_iter()
        .find_map(|(index, prefix)| Some((index, name.strip_prefix(prefix)?)))
        .filter(|(_, rest)| !rest.is_empty() && rest.len() <= 255)
}

/// i_xattr_icount: the header counts as one, then units of four bytes.
fn xattr_count(bytes: usize) -> u16 {
    if bytes == 0 {
        return 0;
    }
    // Limits::xattr_bytes keeps this in range; a count that is too small would be seen by fsck and by the tests.
    u16::try_from((bytes - XATTR_HEADER) / 4 + 1).unwrap_or(u16::MAX)
}

/// The attributes behind an inode; empty when there are none.
pub(super) fn xattr_body(xattrs: &Xattrs) -> Vec<u8> {
    if xattrs.is_empty() {
        return Vec::new();
    }
    let mut out = vec![0; XATTR_HEADER];
    for (name, value) in xattrs {
        let Some((index, rest)) = xattr_index(name) else { continue };
        let (Ok(name_len), Ok(value_len)) = (u8::try_from(rest.len()), u16::try_from(value.len())) else {
            continue;
        };
        out.push(name_len);
        out.push(index);
        out.extend_from_slice(&value_len.to_le_bytes());
        out.extend_from_slice(rest);
        out.extend_from_slice(value);
        out.resize(out.len().next_multiple_of(XATTR_ENTRY), 0);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_the_kernels() {
        // RFC 3720, B.4: 32 bytes of zeros give 8a9136aa, inverted at the end.
        assert_eq!(!crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn attributes_are_counted_in_units_of_four() {
        let body = xattr_body(&vec![(b"user.a".to_vec(), b"xyz".to_vec())].into());
        assert_eq!(body.len(), 12 + 8);
        assert_eq!(xattr_count(body.len()), 3);
        assert_eq!(xattr_body(&Box::default()).len(), 0);
    }
}
