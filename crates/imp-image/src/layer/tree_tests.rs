use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// What a generated entry does, in a world of few names so that they meet.
#[derive(Clone, Debug)]
enum Act {
    File(String),
    Directory(String),
    Whiteout(String),
    Opaque(String),
}

fn entry(kind: EntryKind, path: &str) -> Entry {
    Entry {
        kind,
        path: path.as_bytes().to_vec(),
        link: Vec::new(),
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime: (0, 0),
        device: (0, 0),
        size: 0,
        sparse: None,
        xattrs: Vec::new(),
    }
}

fn apply(tree: &mut Tree, act: &Act) -> Result<(), Refusal> {
    let entry = match act {
        Act::File(path) => entry(EntryKind::File, path),
        Act::Directory(path) => entry(EntryKind::Directory, path),
        Act::Whiteout(path) => {
            let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
            entry(EntryKind::File, &format!("{parent}/.wh.{name}"))
        }
        Act::Opaque(path) => entry(EntryKind::File, &format!("{path}/.wh..wh..opq")),
    };
    tree.apply(entry, Extent::default(), &Limits::default())
}

/// Paths in the tree; directories end in a slash.
fn paths(tree: &Tree) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut todo = vec![(ROOT, String::new())];
    while let Some((id, path)) = todo.pop() {
        match &tree.inodes[id as usize].kind {
            Kind::Directory { entries, .. } => {
                if !path.is_empty() {
                    found.insert(format!("{path}/"));
                }
                for (name, child) in entries {
                    let name = String::from_utf8_lossy(name);
                    todo.push((child.inode, format!("{path}/{name}")));
                }
            }
            _ => drop(found.insert(path)),
        }
    }
    found
}

/// The specification, told in another way: a layer first takes away from what is below, then adds its own.
fn model(layers: &[Vec<Act>]) -> BTreeSet<String> {
    let mut all: BTreeSet<String> = BTreeSet::new();
    for layer in layers {
        for act in layer {
            match act {
                Act::Whiteout(path) => {
                    all.retain(|p| *p != format!("/{path}") && !p.starts_with(&format!("/{path}/")));
                }
                Act::Opaque(path) => {
                    all.retain(|p| !p.starts_with(&format!("/{path}/")) || *p == format!("/{path}/"));
                }
                _ => {}
            }
        }
        for act in layer {
            let (Act::File(path) | Act::Directory(path)) = act else { continue };
            let mut parent = String::new();
            for part in path.split('/').take(path.split('/').count() - 1) {
                parent = format!("{parent}/{part}");
                all.insert(format!("{parent}/"));
            }
            match act {
                Act::File(_) => {
                    all.retain(|p| !p.starts_with(&format!("/{path}/")));
                    all.insert(format!("/{path}"));
                }
                _ => {
                    all.remove(&format!("/{path}"));
                    all.insert(format!("/{path}/"));
                }
            }
        }
    }
    all
}

/// Directories have names a and b, files x and y, so that nothing needs a directory where a file is.
fn acts() -> impl Strategy<Value = Act> {
    let directory = proptest::collection::vec("[ab]", 1..3).prop_map(|parts| parts.join("/"));
    let file = (proptest::option::of(directory.clone()), "[xy]")
        .prop_map(|(parent, name)| parent.map_or_else(|| name.clone(), |parent| format!("{parent}/{name}")));
    let any_path = prop_oneof![directory.clone(), file.clone()];
    prop_oneof![
        4 => file.prop_map(Act::File),
        3 => directory.clone().prop_map(Act::Directory),
        2 => any_path.prop_map(Act::Whiteout),
        1 => directory.prop_map(Act::Opaque),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn layers_merge_as_the_specification_says(layers in proptest::collection::vec(proptest::collection::vec(acts(), 0..8), 1..5)) {
        let mut tree = Tree::new();
        for layer in &layers {
            for act in layer {
                prop_assert_eq!(apply(&mut tree, act), Ok(()));
            }
            tree.next_layer();
        }
        prop_assert_eq!(paths(&tree), model(&layers));
    }

    #[test]
    fn any_entry_is_survived(
        entries in proptest::collection::vec((0_u8..7, "[ab./]{0,12}", "[ab./]{0,12}"), 0..40),
    ) {
        let mut tree = Tree::new();
        for (kind, path, link) in entries {
            let kind = [
                EntryKind::File, EntryKind::Hardlink, EntryKind::Symlink, EntryKind::CharDevice, EntryKind::BlockDevice,
                EntryKind::Directory, EntryKind::Fifo,
            ][usize::from(kind)];
            let _ = tree.apply(Entry { link: link.into_bytes(), ..entry(kind, &path) }, Extent::default(), &Limits::default());
        }
        // Every name leads to something, and link counts are right.
        let mut links = vec![0; tree.inodes.len()];
        let mut todo = vec![ROOT];
        links[ROOT as usize] = 1;
        while let Some(id) = todo.pop() {
            if let Kind::Directory { entries, .. } = &tree.inodes[id as usize].kind {
                for child in entries.values() {
                    links[child.inode as usize] += 1;
                    if matches!(tree.inodes[child.inode as usize].kind, Kind::Directory { .. }) {
                        todo.push(child.inode);
                    }
                }
            }
        }
        for (inode, links) in tree.inodes.iter().zip(links) {
            prop_assert_eq!(inode.links, links);
            prop_assert_eq!(matches!(inode.kind, Kind::Gone), links == 0);
        }
    }
}
