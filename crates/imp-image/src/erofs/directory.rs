//! The data of a directory: blocks that each hold sorted entries and then their names.

use super::format::{BLOCK_SIZE, DIRENT_SIZE};

/// One name: where it leads and what is there (the kernel's EROFS_FT_*).
#[derive(Clone, Copy, Debug)]
pub(super) struct Name<'n> {
    pub(super) name: &'n [u8],
    pub(super) nid: u64,
    pub(super) file_type: u8,
}

/// How many names go into each block, for names that are already sorted.
fn pack<'n>(names: impl Iterator<Item = &'n [u8]>) -> (Vec<usize>, usize) {
    let (mut blocks, mut count, mut used) = (Vec::new(), 0, 0);
    for name in names {
        let need = DIRENT_SIZE + name.len();
        if used + need > BLOCK_SIZE as usize {
            blocks.push(count);
            (count, used) = (0, 0);
        }
        count += 1;
        used += need;
    }
    blocks.push(count);
    (blocks, used)
}

/// Bytes that a directory of these (sorted) names takes: whole blocks, and what is used of the last one.
pub(super) fn size<'n>(names: impl Iterator<Item = &'n [u8]>) -> u64 {
    let (blocks, used) = pack(names);
    (blocks.len() as u64 - 1) * BLOCK_SIZE + used as u64
}

/// The directory's data; all blocks but the last are full (filled with zeros).
pub(super) fn data(names: &[Name<'_>]) -> Vec<u8> {
    let (blocks, _) = pack(names.iter().map(|n| n.name));
    let mut out = Vec::new();
    let mut rest = names;
    for count in blocks {
        out.resize(out.len().next_multiple_of(BLOCK_SIZE as usize), 0);
        let (here, after) = rest.split_at(count);
        rest = after;
        let mut name_offset = count * DIRENT_SIZE;
        for name in here {
            out.extend_from_slice(&name.nid.to_le_bytes());
            // Below the size of a block, see pack().
            out.extend_from_slice(&u16::try_from(name_offset).unwrap_or(u16::MAX).to_le_bytes());
            out.extend_from_slice(&[name.file_type, 0]);
            name_offset += name.name.len();
        }
        for name in here {
            out.extend_from_slice(name.name);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_and_data_agree() {
        for count in [1_usize, 2, 50, 500, 5000] {
            let names: Vec<String> =
                (0..count).map(|i| format!("{i:0width$}", width = 1 + i % 200)).collect();
            let entries: Vec<Name<'_>> =
                names.iter().map(|n| Name { name: n.as_bytes(), nid: 1, file_type: 1 }).collect();
            assert_eq!(
                data(&entries).len() as u64,
                size(names.iter().map(String::as_bytes)),
                "{count} names"
            );
        }
    }
}
