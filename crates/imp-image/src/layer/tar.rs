//! Reads a layer's tar stream entry by entry: ustar, PAX and GNU.
//!
//! Framing follows Go's archive/tar, which every image builder and containerd use, so that we never see other entries
//! than they do (CVE-2025-62518 is what happens otherwise). The `tar` crate is not used here: it reads extension headers
//! of any size into memory, splits PAX records at newlines (which binary attributes contain) and takes PAX sparse files for
//! plain ones.

use crate::limits::Limits;
use std::io::{self, Read};

const BLOCK: usize = 512;
/// Fragments of a sparse file that we are willing to keep.
const MAX_FRAGMENTS: usize = 65_536;

/// Why a tar stream could not be read on.
#[derive(Debug)]
pub(crate) enum TarError {
    /// The stream under it failed.
    Io(io::Error),
    /// It is no valid tar; the name of the entry, if known, and the problem.
    Malformed(Vec<u8>, String),
}

impl From<io::Error> for TarError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    File,
    Hardlink,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
}

/// One fragment of a sparse file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// One entry's metadata; its data is read from the [`TarReader`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: EntryKind,
    /// As it stands in the stream: not cleaned, not checked.
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    /// Permission bits with setuid, setgid and sticky.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) device: (u32, u32),
    /// Size of the file, holes included.
    pub(crate) size: u64,
    /// Where the data that follows belongs, when the file is sparse: ascending and without overlap.
    pub(crate) sparse: Option<Vec<Fragment>>,
    /// Full name to value, sorted by name.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Name (if the records have it), real size and fragments of a sparse file.
type SparseMap = (Option<Vec<u8>>, u64, Vec<Fragment>);

/// The records of a PAX header, in order; also attributes by name.
type Records = Vec<(Vec<u8>, Vec<u8>)>;

/// A stream that may know a shorter way past data than reading it.
pub(crate) trait Skip: Read + Sized {
    /// Passes `count` bytes, fewer only at the end; returns how many.
    fn skip(&mut self, count: u64) -> io::Result<u64> {
        io::copy(&mut self.by_ref().take(count), &mut io::sink())
    }
}

impl Skip for &[u8] {}

/// An iterator over entries that is at the same time the reader of the current entry's data.
#[derive(Debug)]
pub(crate) struct TarReader<'l, R> {
    inner: R,
    limits: &'l Limits,
    /// Data of the current entry not read yet.
    data: u64,
    /// Filling after that.
    padding: u64,
    ended: bool,
}

impl<'l, R: Skip> TarReader<'l, R> {
    pub(crate) const fn new(inner: R, limits: &'l Limits) -> Self {
        Self { inner, limits, data: 0, padding: 0, ended: false }
    }

    /// The next entry, or none at the end of the archive.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        let mut long_path: Option<Vec<u8>> = None;
        let mut long_link: Option<Vec<u8>> = None;
        let mut pax: Records = Vec::new();
        loop {
            self.skip_rest()?;
            let Some(header) = self.read_header()? else { return Ok(None) };
            let size = number(&header[124..136]).and_then(|n| u64::try_from(n).ok());
            match header[156] {
                b'L' => long_path = Some(until_nul(self.read_extension(size, "GNU long name")?)),
                b'K' => long_link = Some(until_nul(self.read_extension(size, "GNU long link")?)),
                b'x' | b'X' => {
                    let body = self.read_extension(size, "PAX header")?;
                    pax = parse_pax(&body)
                        .map_err(|problem| malformed(&body[..body.len().min(64)], problem))?;
                }
                // Go hands global headers out and applies none of them; so does containerd.
                b'g' => drop(self.read_extension(size, "global PAX header")?),
                flag => return self.finish_entry(&header, flag, long_path, long_link, &pax).map(Some),
            }
        }
    }

    /// The stream that it reads.
    pub(crate) const fn inner(&self) -> &R {
        &self.inner
    }

    /// The stream that it reads, for good.
    pub(crate) fn into_inner(self) -> R {
        self.inner
    }

    /// Reads the archive's end marker and whatever follows, so that the whole stream went through its hash.
    pub(crate) fn drain(&mut self) -> io::Result<()> {
        io::copy(&mut self.inner, &mut io::sink()).map(drop)
    }

    fn skip_rest(&mut self) -> io::Result<()> {
        let rest = self.data + self.padding;
        (self.data, self.padding) = (0, 0);
        let skipped = self.inner.skip(rest)?;
        if skipped == rest { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn read_header(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        if self.ended {
            return Ok(None);
        }
        let mut block = [0; BLOCK];
        for zero_blocks in 0..2 {
            if !read_block(&mut self.inner, &mut block)? {
                self.ended = true;
                return Ok(None);
            }
            if block.iter().any(|&b| b != 0) {
                if zero_blocks > 0 {
                    return Err(malformed(b"", "data after an empty header block".into()));
                }
                check_sum(&block)?;
                return Ok(Some(block));
            }
        }
        self.ended = true;
        Ok(None)
    }

    /// The body of an extension header, which must be small.
    fn read_extension(&mut self, size: Option<u64>, what: &str) -> Result<Vec<u8>, TarError> {
        let size = size.ok_or_else(|| malformed(b"", format!("{what} without a valid size")))?;
        let limit = self.limits.extension_header_bytes;
        if size > limit {
            return Err(malformed(b"", format!("{what} of {size} bytes; at most {limit} are allowed")));
        }
        self.set_data(size);
        let mut body = vec![0; usize::try_from(size).unwrap_or(0)];
        self.read_exact(&mut body)?;
        Ok(body)
    }

    const fn set_data(&mut self, size: u64) {
        self.data = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    fn finish_entry(
        &mut self,
        header: &[u8; BLOCK],
        flag: u8,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
        pax: &Records,
    ) -> Result<Entry, TarError> {
        let mut path = last(pax, b"path")
            .map_or_else(|| long_path.unwrap_or_else(|| header_path(header)), <[u8]>::to_vec);
        let link = last(pax, b"linkpath").map_or_else(
            || long_link.unwrap_or_else(|| until_nul(header[157..257].to_vec())),
            <[u8]>::to_vec,
        );
        let bad = |path: &[u8], field: &str| malformed(path, format!("the {field} is not a valid number"));
        let kind = kind_of(flag, &path)
            .ok_or_else(|| malformed(&path, format!("its type {:?} is not supported", char::from(flag))))?;
        let field = |name: &str, key: &[u8], range: std::ops::Range<usize>| {
            last(pax, key).map_or_else(|| number(&header[range]), decimal).ok_or_else(|| bad(&path, name))
        };
        let uid = u32::try_from(field("owner", b"uid", 108..116)?).map_err(|_| bad(&path, "owner"))?;
        let gid = u32::try_from(field("group", b"gid", 116..124)?).map_err(|_| bad(&path, "group"))?;
        let mode = number(&header[100..108]).ok_or_else(|| bad(&path, "mode"))?;
        let mtime = match last(pax, b"mtime") {
            Some(text) => pax_time(text).ok_or_else(|| bad(&path, "mtime"))?,
            None => (
                number(&header[136..148])
                    .and_then(|n| i64::try_from(n).ok())
                    .ok_or_else(|| bad(&path, "mtime"))?,
                0,
            ),
        };
        let device = if matches!(kind, EntryKind::CharDevice | EntryKind::BlockDevice) {
            let part =
                |range: std::ops::Range<usize>| number(&header[range]).and_then(|n| u32::try_from(n).ok());
            (
                part(329..337).ok_or_else(|| bad(&path, "device"))?,
                part(337..345).ok_or_else(|| bad(&path, "device"))?,
            )
        } else {
            (0, 0)
        };
        // As Go: only files have data, whatever the size field of the others says.
        let stored = if kind == EntryKind::File {
            u64::try_from(field("size", b"size", 124..136)?).map_err(|_| bad(&path, "size"))?
        } else {
            0
        };
        if stored > i64::MAX as u64 {
            return Err(bad(&path, "size"));
        }
        self.set_data(stored);
        let (mut size, mut sparse) = (stored, None);
        if kind == EntryKind::File
            && let Some((name, real_size, map)) = self.sparse_map(header, flag, pax, &path)?
        {
            path = name.unwrap_or(path);
            check_map(&map, real_size, self.data).map_err(|problem| malformed(&path, problem))?;
            (size, sparse) = (real_size, Some(map));
        }
        let mode = u16::try_from(mode & 0o7777).map_err(|_| bad(&path, "mode"))?;
        let xattrs = self.xattrs(pax, &path)?;
        Ok(Entry { kind, path, link, mode, uid, gid, mtime, device, size, sparse, xattrs })
    }

    fn xattrs(&self, pax: &Records, path: &[u8]) -> Result<Records, TarError> {
        let mut found = std::collections::BTreeMap::new();
        for (key, value) in pax {
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                found.insert(name.to_vec(), value.clone());
            }
        }
        let total: usize = found.iter().map(|(name, value)| name.len() + value.len()).sum();
        if found.len() > self.limits.xattrs || total > self.limits.xattr_bytes {
            return Err(malformed(
                path,
                format!(
                    "{} extended attributes of {total} bytes; at most {} of {} bytes are allowed",
                    found.len(),
                    self.limits.xattrs,
                    self.limits.xattr_bytes
                ),
            ));
        }
        Ok(found.into_iter().collect())
    }

    /// The map of a sparse file in any of GNU tar's four formats: name (if it stands in the records), real size, fragments.
    fn sparse_map(
        &mut self,
        header: &[u8; BLOCK],
        flag: u8,
        pax: &Records,
        path: &[u8],
    ) -> Result<Option<SparseMap>, TarError> {
        let bad = || malformed(path, "its map of a sparse file is not valid".into());
        if flag == b'S' {
            let real = number(&header[483..495]).and_then(|n| u64::try_from(n).ok()).ok_or_else(bad)?;
            return Ok(Some((None, real, self.old_gnu_map(header, path)?)));
        }
        let name = last(pax, b"GNU.sparse.name").map(<[u8]>::to_vec);
        let real = last(pax, b"GNU.sparse.realsize").or_else(|| last(pax, b"GNU.sparse.size"));
        let Some(real) = real else { return Ok(None) };
        let real = decimal(real).and_then(|n| u64::try_from(n).ok()).ok_or_else(bad)?;
        if last(pax, b"GNU.sparse.major") == Some(b"1") {
            return Ok(Some((name, real, self.map_in_data(path)?)));
        }
        let numbers: Vec<u64> = if let Some(map) = last(pax, b"GNU.sparse.map") {
            let parse = |n: &[u8]| decimal(n).and_then(|n| u64::try_from(n).ok());
            map.split(|&b| b == b',')
                .filter(|n| !n.is_empty())
                .map(parse)
                .collect::<Option<_>>()
                .ok_or_else(bad)?
        } else {
            let wanted = pax.iter().filter(|(k, _)| k == b"GNU.sparse.offset" || k == b"GNU.sparse.numbytes");
            wanted
                .map(|(_, v)| decimal(v).and_then(|n| u64::try_from(n).ok()))
                .collect::<Option<_>>()
                .ok_or_else(bad)?
        };
        if !numbers.len().is_multiple_of(2) || numbers.len() / 2 > MAX_FRAGMENTS {
            return Err(bad());
        }
        Ok(Some((name, real, numbers.chunks(2).map(|p| Fragment { offset: p[0], len: p[1] }).collect())))
    }

    /// GNU's format before PAX: four fragments in the header, 21 in each block after it.
    fn old_gnu_map(&mut self, header: &[u8; BLOCK], path: &[u8]) -> Result<Vec<Fragment>, TarError> {
        let mut map = Vec::new();
        let mut add = |area: &[u8]| -> Option<()> {
            for pair in area.chunks_exact(24) {
                if pair[0] == 0 {
                    break;
                }
                let offset = u64::try_from(number(&pair[..12])?).ok()?;
                let len = u64::try_from(number(&pair[12..])?).ok()?;
                map.push(Fragment { offset, len });
            }
            (map.len() <= MAX_FRAGMENTS).then_some(())
        };
        let bad = || malformed(path, "its map of a sparse file is not valid".into());
        add(&header[386..482]).ok_or_else(bad)?;
        let mut more = header[482] != 0;
        while more {
            let mut block = [0; BLOCK];
            if !read_block(&mut self.inner, &mut block)? {
                return Err(bad());
            }
            add(&block[..504]).ok_or_else(bad)?;
            more = block[504] != 0;
        }
        Ok(map)
    }

    /// PAX format 1.0: decimal numbers, a line each, in whole blocks before the data.
    fn map_in_data(&mut self, path: &[u8]) -> Result<Vec<Fragment>, TarError> {
        let bad = || malformed(path, "its map of a sparse file is not valid".into());
        let mut numbers: Vec<u64> = Vec::new();
        let mut wanted = 1;
        let mut current: Option<u64> = None;
        while numbers.len() < wanted {
            let mut block = [0; BLOCK];
            self.read_exact(&mut block)?;
            for byte in block {
                match byte {
                    b'0'..=b'9' => {
                        let digit = u64::from(byte - b'0');
                        current = Some(
                            current
                                .unwrap_or(0)
                                .checked_mul(10)
                                .and_then(|n| n.checked_add(digit))
                                .ok_or_else(bad)?,
                        );
                    }
                    b'\n' if numbers.len() < wanted => numbers.push(current.take().ok_or_else(bad)?),
                    _ if numbers.len() >= wanted => break,
                    _ => return Err(bad()),
                }
                if numbers.len() == 1 {
                    let fragments =
                        usize::try_from(numbers[0]).ok().filter(|&n| n <= MAX_FRAGMENTS).ok_or_else(bad)?;
                    wanted = 1 + 2 * fragments;
                }
            }
        }
        Ok(numbers[1..].chunks(2).map(|p| Fragment { offset: p[0], len: p[1] }).collect())
    }
}

impl<R: Read> Read for TarReader<'_, R> {
    /// Data of the current entry.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = usize::try_from(self.data).unwrap_or(usize::MAX).min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        let count = self.inner.read(&mut buffer[..wanted])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.data -= count as u64;
        Ok(count)
    }
}

fn malformed(path: &[u8], problem: String) -> TarError {
    TarError::Malformed(path.to_vec(), problem)
}

/// Fills the block; false at a clean end of the stream.
fn read_block(reader: &mut impl Read, block: &mut [u8; BLOCK]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < BLOCK {
        match reader.read(&mut block[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn check_sum(block: &[u8; BLOCK]) -> Result<(), TarError> {
    let stored = number(&block[148..156]);
    let blanked = |(i, &b): (usize, &u8)| if (148..156).contains(&i) { b' ' } else { b };
    let unsigned: i128 = block.iter().enumerate().map(blanked).map(i128::from).sum();
    // Some old writers sum signed bytes; POSIX says unsigned.
    let signed: i128 = block.iter().enumerate().map(blanked).map(|b| i128::from(b.cast_signed())).sum();
    if stored == Some(unsigned) || stored == Some(signed) {
        return Ok(());
    }
    Err(malformed(&header_path(block), "the checksum of its header is wrong; this is no tar stream".into()))
}

fn kind_of(flag: u8, path: &[u8]) -> Option<EntryKind> {
    Some(match flag {
        // Before POSIX a directory was a file whose name ends in a slash.
        0 if path.ends_with(b"/") => EntryKind::Directory,
        0 | b'0' | b'7' | b'S' => EntryKind::File,
        b'1' => EntryKind::Hardlink,
        b'2' => EntryKind::Symlink,
        b'3' => EntryKind::CharDevice,
        b'4' => EntryKind::BlockDevice,
        b'5' => EntryKind::Directory,
        b'6' => EntryKind::Fifo,
        _ => return None,
    })
}

fn header_path(header: &[u8; BLOCK]) -> Vec<u8> {
    let name = until_nul(header[..100].to_vec());
    let prefix = until_nul(header[345..500].to_vec());
    // GNU's magic ("ustar  ") has other things where POSIX has the prefix.
    if &header[257..263] == b"ustar\0" && !prefix.is_empty() {
        [&prefix[..], b"/", &name[..]].concat()
    } else {
        name
    }
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|&b| b == 0) {
        bytes.truncate(end);
    }
    bytes
}

/// A numeric header field: octal text, or GNU's base 256 when the first bit is set. Empty is zero, as for Go.
fn number(field: &[u8]) -> Option<i128> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        // Two's complement over the field's bits but the first.
        let mut value: i128 = if first & 0x40 != 0 { -1 } else { 0 };
        for (i, &byte) in field.iter().enumerate() {
            let byte = if i == 0 && value == 0 { byte & 0x7f } else { byte };
            value = (value << 8) | i128::from(byte);
        }
        return i64::try_from(value).ok().map(i128::from);
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok().map(i128::from) }
}

fn decimal(text: &[u8]) -> Option<i128> {
    std::str::from_utf8(text).ok()?.parse::<i64>().ok().map(i128::from)
}

/// Seconds and nanoseconds since the epoch from "1350244992.023960108" or "-1.5".
fn pax_time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain(std::iter::repeat('0')).take(9).collect();
    let nanos: u32 = digits.parse().ok()?;
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

/// The last value of a key: later records override earlier ones.
fn last<'p>(pax: &'p Records, key: &[u8]) -> Option<&'p [u8]> {
    // An empty value takes a record back (POSIX pax, "extended header").
    pax.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v.as_slice()).filter(|v| !v.is_empty())
}

/// Records of the form "LENGTH KEY=VALUE\n", where LENGTH counts the whole record and VALUE may be any bytes.
fn parse_pax(mut body: &[u8]) -> Result<Records, String> {
    let mut records = Vec::new();
    while !body.is_empty() {
        let bad = || "its PAX header is not valid".to_owned();
        let space = body.iter().take(20).position(|&b| b == b' ').ok_or_else(bad)?;
        let length =
            std::str::from_utf8(&body[..space]).ok().and_then(|t| t.parse::<usize>().ok()).ok_or_else(bad)?;
        if length <= space + 1 || length > body.len() || body[length - 1] != b'\n' {
            return Err(bad());
        }
        let record = &body[space + 1..length - 1];
        let equals = record.iter().position(|&b| b == b'=').ok_or_else(bad)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        // A NUL would cut a name short for others and not for us.
        if key.contains(&0) || (!key.starts_with(b"SCHILY.xattr.") && value.contains(&0)) {
            return Err("its PAX header holds a NUL".to_owned());
        }
        records.push((key.to_vec(), value.to_vec()));
        body = &body[length..];
    }
    Ok(records)
}

fn check_map(map: &[Fragment], real_size: u64, stored: u64) -> Result<(), String> {
    let (mut end, mut total) = (0_u64, 0_u64);
    for fragment in map {
        let fragment_end = fragment.offset.checked_add(fragment.len).filter(|&e| e <= real_size);
        if fragment.offset < end || fragment_end.is_none() {
            return Err("the fragments of a sparse file overlap or go beyond its size".into());
        }
        end = fragment_end.unwrap_or(end);
        total += fragment.len;
    }
    if total > stored {
        return Err("a sparse file has less data than its map says".into());
    }
    Ok(())
}

#[cfg(test)]
#[path = "tar_tests.rs"]
mod tests;
