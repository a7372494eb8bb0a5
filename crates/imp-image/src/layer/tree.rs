//! The file tree of an image, in memory, without any file's data: layers are merged here.
//!
//! Nothing in here touches the host's file system; paths are looked up in the tree alone, so whatever an entry is named or
//! a symbolic link points to, it stays inside the image.

use super::tar::{Entry, EntryKind};
use crate::limits::Limits;
use std::collections::BTreeMap;

/// Index into [`Tree::inodes`].
pub(crate) type InodeId = u32;

/// The root directory.
pub(crate) const ROOT: InodeId = 0;

/// As Linux' MAXSYMLINKS.
const MAX_SYMLINKS: u32 = 40;
/// Components looked at for one path, symbolic links included.
const MAX_STEPS: usize = 16 * 1024;

/// Prefix of a whiteout's base name (OCI image specification, layer.md).
const WHITEOUT: &[u8] = b".wh.";
/// Base name that hides all lower entries of its directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of AUFS' own files, which mean nothing to us.
const AUFS: &[u8] = b".wh..wh.";

/// A name in a directory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dirent {
    pub(crate) inode: InodeId,
    /// The layer that put it there.
    layer: u32,
}

/// A run of the disk's blocks that holds one file's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) block: u32,
    pub(crate) count: u32,
}

/// What an inode is.
#[derive(Debug)]
pub(crate) enum Kind {
    Directory {
        entries: BTreeMap<Box<[u8]>, Dirent>,
        parent: InodeId,
        depth: u32,
    },
    File {
        size: u64,
        data: Extent,
    },
    Symlink(Box<[u8]>),
    CharDevice(u32, u32),
    BlockDevice(u32, u32),
    Fifo,
    /// No name leads here any more.
    Gone,
}

/// Extended attributes: full name and value, sorted by name.
pub(crate) type Xattrs = Box<[(Vec<u8>, Vec<u8>)]>;

/// Owner, permissions and the rest that is the same for every kind of inode.
#[derive(Debug)]
pub(crate) struct Attributes {
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) xattrs: Xattrs,
}

impl Attributes {
    /// Of a directory that no entry describes: 0755, root's, of the epoch.
    fn implied() -> Self {
        Self { mode: 0o755, uid: 0, gid: 0, mtime: (0, 0), xattrs: Box::default() }
    }
}

/// A file, directory or other thing.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) kind: Kind,
    pub(crate) attributes: Attributes,
    /// Names that lead here; not used for directories.
    pub(crate) links: u32,
}

/// Why an entry cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// What is wrong with it.
    Bad(String),
    /// A limit was hit: which, of what.
    Limit(u64, &'static str),
}

fn bad<T>(problem: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Bad(problem.into()))
}

/// The merged tree of the layers so far.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) inodes: Vec<Inode>,
    /// Data that nothing refers to any more, to be given back to the host.
    pub(crate) freed: Vec<Extent>,
    layer: u32,
    metadata_bytes: u64,
    entries: u64,
}

impl Tree {
    pub(crate) fn new() -> Self {
        let kind = Kind::Directory { entries: BTreeMap::new(), parent: ROOT, depth: 0 };
        let root = Inode { kind, attributes: Attributes::implied(), links: 1 };
        Self { inodes: vec![root], freed: Vec::new(), layer: 0, metadata_bytes: 0, entries: 0 }
    }

    /// What is applied from now on belongs to the layer above.
    pub(crate) const fn next_layer(&mut self) {
        self.layer += 1;
    }

    /// Merges one entry; `data` is where its contents were written.
    ///
    /// The rules are containerd's (archive/tar.go) where the specification leaves room, except that a whiteout never hides
    /// what its own layer brings, in whatever order they stand (layer.md).
    pub(crate) fn apply(&mut self, entry: Entry, data: Extent, limits: &Limits) -> Result<(), Refusal> {
        if let Err(refusal) = self.merge(entry, data, limits) {
            self.freed.push(data);
            return Err(refusal);
        }
        Ok(())
    }

    fn merge(&mut self, mut entry: Entry, data: Extent, limits: &Limits) -> Result<(), Refusal> {
        self.account(&entry, limits)?;
        let raw = std::mem::take(&mut entry.path);
        let path = clean(&raw, limits)?;
        let Some((&name, parents)) = path.split_last() else { return self.apply_root(entry) };
        if name.starts_with(WHITEOUT) {
            return self.apply_whiteout(parents, name, limits);
        }
        if parents.iter().any(|component| component.starts_with(WHITEOUT)) {
            return bad("a directory's name begins with .wh., which is kept for whiteouts");
        }
        let parent = self.directory(parents, limits)?;
        match entry.kind {
            EntryKind::Hardlink => self.apply_hardlink(parent, name, &entry.link, limits),
            EntryKind::Directory => self.apply_directory(parent, name, entry, limits),
            _ => {
                let (kind, attributes) = leaf(entry, data)?;
                self.remove(parent, name);
                let inode = self.add_inode(Inode { kind, attributes, links: 1 });
                self.put(parent, name, inode);
                Ok(())
            }
        }
    }

    fn account(&mut self, entry: &Entry, limits: &Limits) -> Result<(), Refusal> {
        let xattrs: usize = entry.xattrs.iter().map(|(name, value)| name.len() + value.len() + 48).sum();
        self.entries += 1;
        self.metadata_bytes += (entry.path.len() + entry.link.len() + xattrs) as u64;
        if self.entries > limits.entries {
            return Err(Refusal::Limit(limits.entries, "entries in all layers"));
        }
        if self.metadata_bytes > limits.metadata_bytes {
            return Err(Refusal::Limit(limits.metadata_bytes, "bytes of names, links and attributes"));
        }
        Ok(())
    }

    fn apply_root(&mut self, entry: Entry) -> Result<(), Refusal> {
        if entry.kind != EntryKind::Directory {
            return bad("it would replace the root directory by something else");
        }
        self.inodes[ROOT as usize].attributes = attributes(entry);
        Ok(())
    }

    fn apply_whiteout(&mut self, parents: &[&[u8]], name: &[u8], limits: &Limits) -> Result<(), Refusal> {
        let Some(parent) = self.find(parents, limits)? else { return Ok(()) };
        if name == OPAQUE {
            for child in self.names(parent) {
                self.hide(parent, &child);
            }
            return Ok(());
        }
        if name.starts_with(AUFS) {
            return Ok(());
        }
        match &name[WHITEOUT.len()..] {
            b"" | b"." | b".." => bad("a whiteout that names nothing"),
            hidden => {
                self.hide(parent, hidden);
                Ok(())
            }
        }
    }

    fn apply_hardlink(
        &mut self,
        parent: InodeId,
        name: &[u8],
        link: &[u8],
        limits: &Limits,
    ) -> Result<(), Refusal> {
        let shown = String::from_utf8_lossy(link).into_owned();
        let target = clean(link, limits)?;
        let Some((&target_name, target_parents)) = target.split_last() else {
            return bad("a hard link to the root directory");
        };
        let found = self.find(target_parents, limits)?.and_then(|dir| self.child(dir, target_name));
        let Some(inode) = found else {
            return bad(format!(
                "a hard link to \"{shown}\", which is not in this layer above it nor in a lower one"
            ));
        };
        if matches!(self.inodes[inode as usize].kind, Kind::Directory { .. }) {
            return bad(format!("a hard link to \"{shown}\", which is a directory"));
        }
        // The new name first: replacing the old one must not free what both share.
        let links = &mut self.inodes[inode as usize].links;
        *links = links.checked_add(1).ok_or_else(|| Refusal::Limit(u64::from(u32::MAX), "hard links"))?;
        self.remove(parent, name);
        self.put(parent, name, inode);
        Ok(())
    }

    fn apply_directory(
        &mut self,
        parent: InodeId,
        name: &[u8],
        entry: Entry,
        limits: &Limits,
    ) -> Result<(), Refusal> {
        if let Some(inode) = self.child(parent, name)
            && matches!(self.inodes[inode as usize].kind, Kind::Directory { .. })
        {
            self.inodes[inode as usize].attributes = attributes(entry);
            self.put(parent, name, inode);
            return Ok(());
        }
        self.remove(parent, name);
        self.add_directory(parent, name, attributes(entry), limits).map(drop)
    }

    fn add_directory(
        &mut self,
        parent: InodeId,
        name: &[u8],
        attributes: Attributes,
        limits: &Limits,
    ) -> Result<InodeId, Refusal> {
        let depth = match self.inodes[parent as usize].kind {
            Kind::Directory { depth, .. } => depth + 1,
            _ => return bad("its parent is not a directory"),
        };
        if depth > limits.path_depth {
            return Err(Refusal::Limit(u64::from(limits.path_depth), "directories above each other"));
        }
        let kind = Kind::Directory { entries: BTreeMap::new(), parent, depth };
        let inode = self.add_inode(Inode { kind, attributes, links: 1 });
        self.put(parent, name, inode);
        Ok(inode)
    }

    fn add_inode(&mut self, inode: Inode) -> InodeId {
        self.inodes.push(inode);
        // Limits::entries and the directories each entry may imply stay far below 2^32.
        InodeId::try_from(self.inodes.len() - 1).unwrap_or(InodeId::MAX)
    }

    fn put(&mut self, parent: InodeId, name: &[u8], inode: InodeId) {
        let layer = self.layer;
        if let Kind::Directory { entries, .. } = &mut self.inodes[parent as usize].kind {
            entries.insert(name.into(), Dirent { inode, layer });
        }
    }

    fn child(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        match &self.inodes[directory as usize].kind {
            Kind::Directory { entries, .. } => entries.get(name).map(|entry| entry.inode),
            _ => None,
        }
    }

    fn names(&self, directory: InodeId) -> Vec<Box<[u8]>> {
        match &self.inodes[directory as usize].kind {
            Kind::Directory { entries, .. } => entries.keys().cloned().collect(),
            _ => Vec::new(),
        }
    }

    /// Removes what lower layers put at a name; what this layer put there or below stays, with the directories above it.
    /// Returns whether nothing is left.
    fn hide(&mut self, parent: InodeId, name: &[u8]) -> bool {
        let Kind::Directory { entries, .. } = &self.inodes[parent as usize].kind else { return true };
        let Some(&Dirent { inode, layer }) = entries.get(name) else { return true };
        let mut keep = layer == self.layer;
        for child in self.names(inode) {
            keep |= !self.hide(inode, &child);
        }
        if !keep {
            self.remove(parent, name);
        }
        !keep
    }

    /// Removes a name and everything below it.
    fn remove(&mut self, parent: InodeId, name: &[u8]) {
        let Kind::Directory { entries, .. } = &mut self.inodes[parent as usize].kind else { return };
        let Some(removed) = entries.remove(name) else { return };
        let mut unlink = vec![removed.inode];
        while let Some(id) = unlink.pop() {
            let inode = &mut self.inodes[id as usize];
            inode.links -= 1;
            if inode.links > 0 {
                continue;
            }
            inode.attributes.xattrs = Box::default();
            match std::mem::replace(&mut inode.kind, Kind::Gone) {
                Kind::Directory { entries, .. } => unlink.extend(entries.values().map(|entry| entry.inode)),
                Kind::File { data, .. } => self.freed.push(data),
                _ => {}
            }
        }
    }

    /// The directory at a path; what is missing is made, as containerd does.
    fn directory(&mut self, path: &[&[u8]], limits: &Limits) -> Result<InodeId, Refusal> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_component()? {
            match self.step(&mut walk, &name)? {
                Step::Done => {}
                Step::Missing => {
                    let here = walk.here;
                    self.metadata_bytes += name.len() as u64;
                    walk.here = self.add_directory(here, &name, Attributes::implied(), limits)?;
                }
            }
        }
        Ok(walk.here)
    }

    /// The directory at a path, if there is one.
    fn find(&self, path: &[&[u8]], _limits: &Limits) -> Result<Option<InodeId>, Refusal> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_component()? {
            match self.step(&mut walk, &name)? {
                Step::Done => {}
                Step::Missing => return Ok(None),
            }
        }
        Ok(Some(walk.here))
    }

    fn step(&self, walk: &mut Walk, name: &[u8]) -> Result<Step, Refusal> {
        if name == b".." {
            if let Kind::Directory { parent, .. } = self.inodes[walk.here as usize].kind {
                walk.here = parent;
            }
            return Ok(Step::Done);
        }
        let Some(inode) = self.child(walk.here, name) else { return Ok(Step::Missing) };
        match &self.inodes[inode as usize].kind {
            Kind::Directory { .. } => walk.here = inode,
            Kind::Symlink(target) => walk.follow(target)?,
            _ => {
                return bad(format!("\"{}\" above it is not a directory", String::from_utf8_lossy(name)));
            }
        }
        Ok(Step::Done)
    }
}

enum Step {
    Done,
    Missing,
}

/// A lookup under way.
struct Walk {
    here: InodeId,
    /// Components still to go, the next one last.
    rest: Vec<Box<[u8]>>,
    links: u32,
    steps: usize,
}

impl Walk {
    fn new(path: &[&[u8]]) -> Self {
        Self { here: ROOT, rest: path.iter().rev().map(|&c| c.into()).collect(), links: 0, steps: 0 }
    }

    fn next_component(&mut self) -> Result<Option<Box<[u8]>>, Refusal> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(Refusal::Limit(MAX_STEPS as u64, "steps to find its directory"));
        }
        Ok(self.rest.pop())
    }

    fn follow(&mut self, target: &[u8]) -> Result<(), Refusal> {
        self.links += 1;
        if self.links > MAX_SYMLINKS {
            return Err(Refusal::Limit(u64::from(MAX_SYMLINKS), "symbolic links above it"));
        }
        if target.starts_with(b"/") {
            self.here = ROOT;
        }
        self.rest.extend(components(target).map(Into::into).collect::<Vec<_>>().into_iter().rev());
        if self.rest.len() > MAX_STEPS {
            return Err(Refusal::Limit(MAX_STEPS as u64, "steps to find its directory"));
        }
        Ok(())
    }
}

fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|&b| b == b'/').filter(|c| !c.is_empty() && *c != b".")
}

/// The components of an entry's name, taken relative to the image's root whether it begins with a slash or climbs above it.
fn clean<'p>(path: &'p [u8], limits: &Limits) -> Result<Vec<&'p [u8]>, Refusal> {
    if path.len() > limits.path_bytes {
        return Err(Refusal::Limit(limits.path_bytes as u64, "bytes of path"));
    }
    if path.is_empty() {
        return bad("a name that is empty");
    }
    if path.contains(&0) {
        return bad("a name with a NUL in it");
    }
    let mut clean: Vec<&[u8]> = Vec::new();
    for component in components(path) {
        if component == b".." {
            clean.pop();
        } else if component.len() > 255 {
            return Err(Refusal::Limit(255, "bytes in one name"));
        } else {
            clean.push(component);
        }
    }
    Ok(clean)
}

/// Makes an entry that has no children an inode.
fn leaf(entry: Entry, data: Extent) -> Result<(Kind, Attributes), Refusal> {
    let kind = match entry.kind {
        EntryKind::File => Kind::File { size: entry.size, data },
        EntryKind::Symlink => {
            if entry.link.is_empty() || entry.link.len() > 4095 || entry.link.contains(&0) {
                return bad(
                    "a symbolic link whose target is empty, longer than 4095 bytes or has a NUL in it",
                );
            }
            Kind::Symlink(entry.link.as_slice().into())
        }
        EntryKind::CharDevice | EntryKind::BlockDevice => {
            let (major, minor) = entry.device;
            // Linux has 12 and 20 bits for them.
            if major >= 1 << 12 || minor >= 1 << 20 {
                return bad(format!("a device {major}:{minor}, a number that Linux does not have"));
            }
            if entry.kind == EntryKind::CharDevice {
                Kind::CharDevice(major, minor)
            } else {
                Kind::BlockDevice(major, minor)
            }
        }
        EntryKind::Fifo => Kind::Fifo,
        EntryKind::Hardlink | EntryKind::Directory => return bad("of a type that was to be handled before"),
    };
    Ok((kind, attributes(entry)))
}

fn attributes(entry: Entry) -> Attributes {
    let xattrs = entry.xattrs.into_iter().filter(|(name, _)| kept_xattr(name)).collect();
    Attributes { mode: entry.mode, uid: entry.uid, gid: entry.gid, mtime: entry.mtime, xattrs }
}

/// Attributes that file systems keep. overlayfs' own are left out: the disk is a lower layer of an overlay in the guest and an
/// image must not steer that.
fn kept_xattr(name: &[u8]) -> bool {
    const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];
    if OVERLAY.iter().any(|prefix| name.starts_with(prefix)) {
        return false;
    }
    crate::erofs::xattr_index(name).is_some()
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
