//! Layers of every shape become the right tree: hand-made ones, read back from the disk by another reader and by erofs-utils.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod common;

use common::{chain, names, tree_of};
use imp_image::{ImageError, InvalidImage};
use imp_testkit::images::LayerBuilder;

#[tokio::test]
async fn fr1_a_whiteout_that_is_a_hard_link_hides_and_leaves_nothing() {
    let mut lower = LayerBuilder::new();
    lower.directory("tmp", 0o1777).file("tmp/a", 0o644, b"a").file("tmp/b", 0o644, b"b");
    let mut upper = LayerBuilder::new();
    upper.hardlink("tmp/.wh.a", "tmp/b");
    let tree = tree_of(&[&lower, &upper]).await.expect("a disk");
    assert_eq!(names(&tree), ["", "tmp", "tmp/b"]);
    assert_eq!(tree[&b"tmp/b"[..]].links, 1);
}

#[tokio::test]
async fn fr1_whiteouts_of_any_type_hide() {
    for flag in [b'0', b'1', b'2', b'3', b'5', b'6'] {
        let mut lower = LayerBuilder::new();
        lower.directory("d", 0o755).file("d/a", 0o644, b"a").file("d/b", 0o644, b"b");
        let mut upper = LayerBuilder::new();
        upper.entry(b"d/.wh.a", flag, b"d/b", 0o644, (0, 0), &[], b"");
        let tree = tree_of(&[&lower, &upper]).await.expect("a disk");
        assert_eq!(names(&tree), ["", "d", "d/b"], "type {}", char::from(flag));
    }
}

#[tokio::test]
async fn fr1_opaque_directories_hide_what_is_below_but_not_their_own_layer() {
    let mut lower = LayerBuilder::new();
    lower.directory("d", 0o700).file("d/old", 0o644, b"1").directory("d/sub", 0o755).file(
        "d/sub/old",
        0o644,
        b"2",
    );
    let mut upper = LayerBuilder::new();
    // The marker comes last: its own layer's files stay all the same.
    upper
        .file("d/new", 0o644, b"3")
        .directory("d/sub", 0o750)
        .file("d/sub/new", 0o644, b"4")
        .whiteout("d/.wh..wh..opq");
    let tree = tree_of(&[&lower, &upper]).await.expect("a disk");
    assert_eq!(names(&tree), ["", "d", "d/new", "d/sub", "d/sub/new"]);
    assert_eq!(tree[&b"d/sub"[..]].permissions(), 0o750);
}

#[tokio::test]
async fn fr1_hard_links_reach_into_lower_layers() {
    let mut lower = LayerBuilder::new();
    lower.file("a", 0o4755, b"shared");
    let mut middle = LayerBuilder::new();
    middle.hardlink("b", "a");
    let mut upper = LayerBuilder::new();
    upper.whiteout(".wh.a").hardlink("c", "b").symlink("s", "b").hardlink("t", "s");
    let tree = tree_of(&[&lower, &middle, &upper]).await.expect("a disk");
    assert_eq!(names(&tree), ["", "b", "c", "s", "t"]);
    let (b, c) = (&tree[&b"b"[..]], &tree[&b"c"[..]]);
    assert_eq!((b.data.as_slice(), b.permissions(), b.links), (&b"shared"[..], 0o4755, 2));
    assert_eq!(b.inode, c.inode);
    // A link to a symbolic link is one to the link itself.
    assert_eq!(tree[&b"t"[..]].data, b"b");
    assert_eq!(tree[&b"t"[..]].inode, tree[&b"s"[..]].inode);
}

#[tokio::test]
async fn fr1_a_hard_link_to_nothing_is_refused_by_name() {
    let mut layer = LayerBuilder::new();
    layer.hardlink("b", "missing/file");
    let error = tree_of(&[&layer]).await.expect_err("refused");
    let text = chain(&error);
    assert!(
        text.contains("layer 1 of 1") && text.contains("\"b\"") && text.contains("missing/file"),
        "{text}"
    );
}

#[tokio::test]
async fn fr3_owners_modes_and_special_bits_come_from_the_layer() {
    let mut layer = LayerBuilder::new();
    layer.directory("bin", 0o755).file("bin/su", 0o4755, b"su").directory("tmp", 0o1777);
    layer.entry(b"var/mail", b'5', b"", 0o2775, (8, 8), &[], b"");
    layer.entry(b"big", b'0', b"", 0o640, (70_000, 4_000_000_000), &[], b"x");
    layer.entry(b"pax", b'0', b"", 0o640, (0, 0), &[("uid", b"80000"), ("gid", b"90000")], b"x");
    let tree = tree_of(&[&layer]).await.expect("a disk");
    for (path, mode, uid, gid) in [
        ("bin/su", 0o4755, 0, 0),
        ("var/mail", 0o2775, 8, 8),
        ("tmp", 0o1777, 0, 0),
        ("big", 0o640, 70_000, 4_000_000_000),
        ("pax", 0o640, 80_000, 90_000),
        ("var", 0o755, 0, 0),
    ] {
        let node = &tree[path.as_bytes()];
        assert_eq!((node.permissions(), node.uid, node.gid), (mode, uid, gid), "{path}");
    }
}

#[tokio::test]
async fn fr4_paths_stay_inside_the_image_and_the_host_is_untouched() {
    let host = common::Dir::new();
    let secret = host.join("secret");
    std::fs::write(&secret, "host").unwrap();
    let mut layer = LayerBuilder::new();
    layer.file("../../etc/x", 0o644, b"1").file("/abs", 0o644, b"2");
    layer.symlink("d", host.path().as_str()).file("d/pwned", 0o644, b"3");
    layer.symlink("up", "../../../..").file("up/top", 0o644, b"4");
    layer.file("d/secret", 0o600, b"5");
    let tree = tree_of(&[&layer]).await.expect("re-rooted");
    let inside = |name: &str| format!("{}/{name}", host.path()).trim_start_matches('/').as_bytes().to_vec();
    assert_eq!(tree[&b"etc/x"[..]].data, b"1");
    assert_eq!(tree[&b"abs"[..]].data, b"2");
    assert_eq!(tree[&inside("pwned")].data, b"3");
    assert_eq!(tree[&b"top"[..]].data, b"4");
    assert_eq!(tree[&inside("secret")].data, b"5");
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "host");
    assert_eq!(common::files(host.path()), [secret]);
}

#[tokio::test]
async fn fr4_a_hard_link_to_a_file_of_the_host_is_refused() {
    let mut layer = LayerBuilder::new();
    layer.hardlink("shadow", "/etc/shadow");
    let error = tree_of(&[&layer]).await.expect_err("refused");
    assert!(
        matches!(&error, ImageError::Invalid { source: InvalidImage::Entry { entry, .. }, .. } if entry == "shadow")
    );
    assert!(!error.retryable());
    let mut layer = LayerBuilder::new();
    layer.symlink("e", "/etc").hardlink("shadow", "e/shadow");
    assert!(tree_of(&[&layer]).await.is_err());
}

#[tokio::test]
async fn directories_and_files_replace_each_other() {
    let mut lower = LayerBuilder::new();
    lower
        .directory("a", 0o755)
        .directory("a/b", 0o755)
        .file("a/b/c", 0o644, b"deep")
        .file("f", 0o644, b"file");
    lower.symlink("l", "a").directory("kept", 0o700).file("kept/x", 0o644, b"x");
    let mut upper = LayerBuilder::new();
    upper.file("a", 0o644, b"now a file").directory("f", 0o711).file("f/in", 0o644, b"in");
    upper.directory("l", 0o755).directory("kept", 0o711);
    let tree = tree_of(&[&lower, &upper]).await.expect("a disk");
    assert_eq!(names(&tree), ["", "a", "f", "f/in", "kept", "kept/x", "l"]);
    assert_eq!(tree[&b"a"[..]].data, b"now a file");
    assert!(tree[&b"l"[..]].is_directory() && tree[&b"f"[..]].is_directory());
    assert_eq!(tree[&b"kept"[..]].permissions(), 0o711);
}

#[tokio::test]
async fn entries_through_a_lower_layers_symbolic_link_go_where_it_points() {
    // As Debian's merged /usr: /lib -> usr/lib, and a later layer writes lib/x.
    let mut lower = LayerBuilder::new();
    lower.directory("usr/lib", 0o755).symlink("lib", "usr/lib").file("usr/lib/old", 0o644, b"old");
    let mut upper = LayerBuilder::new();
    upper.file("lib/new", 0o644, b"new").whiteout("lib/.wh.old");
    let tree = tree_of(&[&lower, &upper]).await.expect("a disk");
    assert_eq!(names(&tree), ["", "lib", "usr", "usr/lib", "usr/lib/new"]);
    assert_eq!(tree[&b"lib"[..]].data, b"usr/lib");
}

#[tokio::test]
async fn every_kind_of_inode_time_and_attribute_survives() {
    let long = "n".repeat(200);
    let capability = b"\x01\0\0\x02\0\x20\0\0\x0a\0\0\0\0\0\0\0\0\0\0\0";
    let mut layer = LayerBuilder::new();
    layer.device("dev/null", b'3', 0o666, 1, 3).device("dev/big", b'4', 0o660, 259, 70_000);
    layer.entry(b"fifo", b'6', b"", 0o600, (0, 0), &[], b"");
    layer.entry(
        b"bin/ping",
        b'0',
        b"",
        0o755,
        (0, 0),
        &[
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.user.empty", b""),
            ("SCHILY.xattr.user.big", &[7; 9000]),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.system.posix_acl_access", b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff"),
            ("mtime", b"-1.25"),
        ],
        b"ping",
    );
    layer.entry(b"time", b'0', b"", 0o644, (0, 0), &[("mtime", b"1700000000.123456789")], b"");
    layer.entry(b"raw-\xff\xfe", b'0', b"", 0o644, (0, 0), &[], b"bytes");
    layer.file(&format!("{long}/{long}/file"), 0o644, b"long").symlink("ln", &"x/".repeat(2000));
    let tree = tree_of(&[&layer]).await.expect("a disk");
    assert_eq!((tree[&b"dev/null"[..]].mode, tree[&b"dev/null"[..]].device), (0o020_666, 0x0103));
    assert_eq!(tree[&b"dev/big"[..]].device, (70_000 & 0xff) | (259 << 8) | ((70_000 & !0xff) << 12));
    assert_eq!(tree[&b"fifo"[..]].mode, 0o010_600);
    let ping = &tree[&b"bin/ping"[..]];
    assert_eq!(ping.xattrs[&b"security.capability"[..]], capability);
    assert_eq!(ping.xattrs[&b"user.empty"[..]], b"");
    assert_eq!(ping.xattrs[&b"user.big"[..]], [7; 9000]);
    assert_eq!(ping.xattrs.len(), 4, "overlayfs' own attributes are left out");
    assert_eq!(ping.mtime, (-2, 750_000_000));
    assert_eq!(tree[&b"time"[..]].mtime, (1_700_000_000, 123_456_789));
    assert_eq!(tree[&b"raw-\xff\xfe"[..]].data, b"bytes");
    assert_eq!(tree[format!("{long}/{long}/file").as_bytes()].data, b"long");
    assert_eq!(tree[&b"ln"[..]].data.len(), 4000);
}

#[tokio::test]
async fn sparse_files_keep_their_size_and_holes() {
    let mut layer = LayerBuilder::new();
    let data = [[b'A'; 512], [b'B'; 512]].concat();
    layer.entry(
        b"pax01",
        b'0',
        b"",
        0o644,
        (0, 0),
        &[
            ("GNU.sparse.size", b"10000"),
            ("GNU.sparse.map", b"0,512,8192,512"),
            ("GNU.sparse.name", b"sparse01"),
        ],
        &data,
    );
    let map = b"2\n0\n512\n8192\n512\n";
    let mut with_map = map.to_vec();
    with_map.resize(512, 0);
    with_map.extend_from_slice(&data);
    layer.entry(
        b"pax10",
        b'0',
        b"",
        0o644,
        (0, 0),
        &[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"sparse10"),
            ("GNU.sparse.realsize", b"10000"),
        ],
        &with_map,
    );
    layer.file("after", 0o644, b"after");
    let tree = tree_of(&[&layer]).await.expect("a disk");
    assert_eq!(names(&tree), ["", "after", "sparse01", "sparse10"]);
    let mut expected = vec![0; 10_000];
    expected[..512].fill(b'A');
    expected[8192..8704].fill(b'B');
    assert!(tree[&b"sparse01"[..]].data == expected && tree[&b"sparse10"[..]].data == expected);
}

#[tokio::test]
async fn directories_of_many_names_and_files_of_many_blocks_are_whole() {
    let mut layer = LayerBuilder::new();
    let big: Vec<u8> = (0..3_000_001_u32).map(|i| (i % 251) as u8).collect();
    layer.file("big", 0o644, &big).file("empty", 0o644, b"").file("zeros", 0o644, &[0; 50_000]);
    for index in 0..3000 {
        layer.file(&format!("many/{index}-{}", "x".repeat(index % 90)), 0o644, index.to_string().as_bytes());
    }
    // Sorts before "." and "..".
    layer.file("many/!first", 0o644, b"1").file("many/-", 0o644, b"2").file("many/.a", 0o644, b"3");
    let tree = tree_of(&[&layer]).await.expect("a disk");
    assert!(tree[&b"big"[..]].data == big);
    assert!(tree[&b"zeros"[..]].data == [0; 50_000] && tree[&b"empty"[..]].data.is_empty());
    assert_eq!(tree.keys().filter(|name| name.starts_with(b"many/")).count(), 3003);
    assert_eq!(
        tree[&b"many/77-".to_vec()[..]
            .iter()
            .copied()
            .chain(std::iter::repeat_n(b'x', 77))
            .collect::<Vec<_>>()]
            .data,
        b"77"
    );
}

#[tokio::test]
async fn what_is_hidden_takes_no_room_and_leaves_no_trace() {
    let mut lower = LayerBuilder::new();
    lower.file("secret", 0o600, &[b'S'; 4 << 20]).file("kept", 0o644, b"kept");
    let mut upper = LayerBuilder::new();
    upper.whiteout(".wh.secret");
    let dir = common::Dir::new();
    let reference = common::layout(&dir.join("layout"), &[&lower, &upper]);
    let store = imp_image::ImageStore::open(&dir.join("store")).unwrap();
    let disk = common::ensure(&store, &common::request(&reference)).await.expect("a disk");
    let bytes = std::fs::read(&disk.path).unwrap();
    assert!(!bytes.windows(8).any(|window| window == b"SSSSSSSS"));
    let stored = store.list().await.unwrap();
    assert!(stored[0].disk_bytes < 1 << 20, "{} bytes", stored[0].disk_bytes);
}

#[tokio::test]
async fn an_image_without_layers_is_an_empty_root() {
    let tree = tree_of(&[]).await.expect("a disk");
    assert_eq!(names(&tree), [""]);
    assert_eq!((tree[&b""[..]].mode, tree[&b""[..]].links), (0o040_755, 2));
    // And a layer may say what the root is.
    let mut layer = LayerBuilder::new();
    layer.entry(b"./", b'5', b"", 0o2750, (7, 8), &[("SCHILY.xattr.user.a", b"b")], b"");
    let root = &tree_of(&[&layer]).await.expect("a disk")[&b""[..]];
    assert_eq!((root.permissions(), root.uid, root.gid, root.xattrs.len()), (0o2750, 7, 8, 1));
}

#[tokio::test]
async fn the_same_layers_give_the_same_bytes() {
    let mut lower = LayerBuilder::new();
    lower.directory("z", 0o755).file("z/1", 0o644, b"1").file("a", 0o644, &[1; 10_000]).symlink("l", "z/1");
    let mut upper = LayerBuilder::new();
    upper.file("z/2", 0o644, b"2").whiteout(".wh.a");
    let mut disks = Vec::new();
    for name in ["one", "two"] {
        let dir = common::Dir::new();
        let reference = common::layout(&dir.join(name), &[&lower, &upper]);
        let store = imp_image::ImageStore::open(&dir.join("store")).unwrap();
        let disk = common::ensure(&store, &common::request(&reference)).await.expect("a disk");
        disks.push(std::fs::read(&disk.path).unwrap());
    }
    assert!(disks[0] == disks[1]);
}

#[tokio::test]
async fn hostile_layers_are_refused_with_the_entrys_name() {
    let refused = |build: fn(&mut LayerBuilder), words: &'static [&'static str]| async move {
        let mut layer = LayerBuilder::new();
        layer.file("good", 0o644, b"good");
        build(&mut layer);
        let error = tree_of(&[&layer]).await.expect_err(words[0]);
        let text = chain(&error);
        assert!(words.iter().all(|word| text.contains(word)), "{words:?} in {text}");
        assert!(matches!(error, ImageError::Invalid { .. }), "{text}");
    };
    refused(
        |l| {
            l.file("f", 0o644, b"").file("f/below", 0o644, b"");
        },
        &["f/below", "not a directory"],
    )
    .await;
    refused(
        |l| {
            l.symlink("a", "b").symlink("b", "a").file("a/x", 0o644, b"");
        },
        &["a/x", "symbolic links"],
    )
    .await;
    refused(
        |l| {
            l.file(".", 0o644, b"");
        },
        &["root directory"],
    )
    .await;
    refused(
        |l| {
            l.file(".wh.", 0o644, b"");
        },
        &["whiteout"],
    )
    .await;
    refused(
        |l| {
            l.file(".wh.a/b", 0o644, b"");
        },
        &[".wh.a/b", "kept for whiteouts"],
    )
    .await;
    refused(
        |l| {
            l.file(&format!("long/{}", "x".repeat(300)), 0o644, b"");
        },
        &["255", "bytes in one name"],
    )
    .await;
    refused(
        |l| {
            l.file(&"a/".repeat(1000), 0o644, b"");
        },
        &["512", "directories"],
    )
    .await;
    refused(
        |l| {
            l.file(&"a".repeat(5000), 0o644, b"");
        },
        &["4095", "bytes of path"],
    )
    .await;
    refused(
        |l| {
            l.directory("d", 0o755).hardlink("h", "d");
        },
        &["\"h\"", "directory"],
    )
    .await;
    refused(
        |l| {
            l.entry(b"odd", b'Z', b"", 0o644, (0, 0), &[], b"");
        },
        &["odd", "'Z'"],
    )
    .await;
    refused(
        |l| {
            l.entry(b"own", b'0', b"", 0o644, (0, 0), &[("uid", b"5000000000")], b"");
        },
        &["own", "owner"],
    )
    .await;
    refused(
        |l| {
            l.raw(&[b'x'; 512]);
        },
        &["checksum"],
    )
    .await;
    refused(
        |l| {
            l.device("dev", b'3', 0o600, 5000, 1);
        },
        &["dev", "5000:1"],
    )
    .await;
}
