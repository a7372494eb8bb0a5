//! A reader of EROFS that shares nothing with the writer: made from the kernel's documentation, for uncompressed images.

use camino::Utf8Path;
use std::collections::BTreeMap;

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub inode: u64,
    /// st_mode
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub mtime: (i64, u32),
    /// Device number as in the inode.
    pub device: u32,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Contents of a file, target of a link.
    pub data: Vec<u8>,
}

impl Node {
    pub fn is_directory(&self) -> bool {
        self.mode & 0o170_000 == 0o040_000
    }

    pub fn permissions(&self) -> u16 {
        self.mode & 0o7777
    }
}

struct Image {
    bytes: Vec<u8>,
    meta: usize,
}

const BLOCK: usize = 4096;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Everything in the image by its path without a leading slash; the root is "".
pub fn read(path: &Utf8Path) -> BTreeMap<Vec<u8>, Node> {
    let bytes = std::fs::read(path).expect("the disk");
    let sb = &bytes[1024..];
    assert_eq!(u32_at(sb, 0), 0xE0F5_E1E2, "magic");
    assert_eq!(bytes.len(), u32_at(sb, 36) as usize * BLOCK, "size as the superblock says");
    let (root, meta) = (u64::from(u16_at(sb, 14)), u32_at(sb, 40) as usize * BLOCK);
    let image = Image { meta, bytes };
    let mut tree = BTreeMap::new();
    image.walk(root, Vec::new(), root, &mut tree);
    tree
}

impl Image {
    fn walk(&self, nid: u64, path: Vec<u8>, parent: u64, tree: &mut BTreeMap<Vec<u8>, Node>) {
        let node = self.node(nid);
        if node.is_directory() {
            let entries = self.entries(&node.data);
            let sorted = entries.windows(2).all(|pair| pair[0].0 < pair[1].0);
            assert!(sorted, "names in {:?} are sorted", String::from_utf8_lossy(&path));
            for (name, child, file_type) in entries {
                match name.as_slice() {
                    b"." => assert_eq!(child, nid),
                    b".." => assert_eq!(child, parent),
                    _ => {
                        let mut below = path.clone();
                        if !below.is_empty() {
                            below.push(b'/');
                        }
                        below.extend_from_slice(&name);
                        self.walk(child, below.clone(), nid, tree);
                        let expected = match tree[&below].mode >> 12 {
                            0o10 => 1,
                            0o04 => 2,
                            0o02 => 3,
                            0o06 => 4,
                            0o01 => 5,
                            0o12 => 7,
                            other => panic!("type {other}"),
                        };
                        assert_eq!(file_type, expected);
                    }
                }
            }
        }
        let data = if node.is_directory() { Vec::new() } else { node.data };
        tree.insert(path, Node { data, ..node });
    }

    fn node(&self, nid: u64) -> Node {
        let at = self.meta + nid as usize * 32;
        let raw = &self.bytes[at..];
        let format = u16_at(raw, 0);
        assert_eq!(format & 1, 1, "extended inode");
        let icount = usize::from(u16_at(raw, 2));
        let xattr_bytes = if icount == 0 { 0 } else { 12 + 4 * (icount - 1) };
        let (mode, size, location) = (u16_at(raw, 4), u64_at(raw, 8) as usize, u32_at(raw, 16));
        let has_data = matches!(mode >> 12, 0o04 | 0o10 | 0o12);
        let data =
            if has_data { self.data(at, xattr_bytes, format >> 1 & 7, location, size) } else { Vec::new() };
        Node {
            inode: nid,
            mode,
            uid: u32_at(raw, 24),
            gid: u32_at(raw, 28),
            links: u32_at(raw, 44),
            mtime: (u64_at(raw, 32).cast_signed(), u32_at(raw, 40)),
            device: if has_data { 0 } else { location },
            xattrs: self.xattrs(&raw[64..64 + xattr_bytes]),
            data,
        }
    }

    fn data(&self, at: usize, xattr_bytes: usize, layout: u16, location: u32, size: usize) -> Vec<u8> {
        let whole = match layout {
            0 => size,
            2 => size / BLOCK * BLOCK,
            other => panic!("layout {other}"),
        };
        let start = location as usize * BLOCK;
        let mut data = self.bytes[start..start + whole].to_vec();
        if layout == 2 {
            let tail = at + 64 + xattr_bytes;
            assert!(tail % BLOCK + (size - whole) <= BLOCK, "inline data crosses a block");
            data.extend_from_slice(&self.bytes[tail..tail + size - whole]);
        }
        data
    }

    fn xattrs(&self, body: &[u8]) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut at = 12;
        while at < body.len() {
            let (name_len, value_len) = (usize::from(body[at]), usize::from(u16_at(body, at + 2)));
            let prefix: &[u8] = match body[at + 1] {
                1 => b"user.",
                2 => b"system.posix_acl_access",
                3 => b"system.posix_acl_default",
                4 => b"trusted.",
                6 => b"security.",
                other => panic!("prefix {other}"),
            };
            let name = [prefix, &body[at + 4..at + 4 + name_len]].concat();
            let value = at + 4 + name_len;
            found.insert(name, body[value..value + value_len].to_vec());
            at = (value + value_len).next_multiple_of(4);
        }
        found
    }

    fn entries(&self, data: &[u8]) -> Vec<(Vec<u8>, u64, u8)> {
        let mut all = Vec::new();
        for block in data.chunks(BLOCK) {
            let count = usize::from(u16_at(block, 8)) / 12;
            for index in 0..count {
                let entry = &block[12 * index..];
                let start = usize::from(u16_at(entry, 8));
                let end = if index + 1 < count {
                    usize::from(u16_at(block, 12 * (index + 1) + 8))
                } else {
                    block.len()
                };
                let name = &block[start..end];
                let name = name.split(|&b| b == 0).next().unwrap_or_default();
                all.push((name.to_vec(), u64_at(entry, 0), entry[10]));
            }
        }
        all
    }
}
