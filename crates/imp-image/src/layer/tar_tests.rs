use super::*;
use proptest::prelude::*;

/// Reads everything, data too; what comes out does not matter.
fn read_all(bytes: &[u8]) -> Vec<Entry> {
    let limits = Limits { extension_header_bytes: 1 << 16, ..Limits::default() };
    let mut reader = TarReader::new(bytes, &limits);
    let mut entries = Vec::new();
    while let Ok(Some(entry)) = reader.next_entry() {
        if reader.read_to_end(&mut Vec::new()).is_err() {
            break;
        }
        entries.push(entry);
    }
    entries
}

/// A header of that type with a right checksum.
fn header(name: &str, flag: u8, size: u64) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[156] = flag;
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

fn extension(flag: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = header("ext", flag, body.len() as u64);
    bytes.extend_from_slice(body);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

#[test]
fn what_the_tar_crate_writes_is_read() {
    let mut builder = ::tar::Builder::new(Vec::new());
    let long = format!("dir/{}", "long/".repeat(60));
    for name in ["short", &format!("{long}name")] {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o4755);
        header.set_uid(5_000_000);
        header.set_mtime(1_700_000_000);
        builder.append_data(&mut header, name, &b"data"[..]).expect("written");
    }
    let entries = read_all(&builder.into_inner().expect("finished"));
    assert_eq!(entries.len(), 2);
    assert_eq!(entries[1].path, format!("{long}name").as_bytes());
    for entry in entries {
        assert_eq!(
            (entry.size, entry.mode, entry.uid, entry.mtime),
            (4, 0o4755, 5_000_000, (1_700_000_000, 0))
        );
    }
}

#[test]
fn data_of_what_has_none_is_not_skipped_as_go_does() {
    // A directory whose header claims data: the next block is the next header.
    let bytes = [header("d/", b'5', 512), header("f", b'0', 0), vec![0; 1024]].concat();
    assert_eq!(
        read_all(&bytes).iter().map(|e| e.path.clone()).collect::<Vec<_>>(),
        [b"d/".to_vec(), b"f".to_vec()]
    );
}

#[test]
fn a_pax_size_frames_the_data() {
    let inner = header("hidden", b'0', 0);
    let bytes = [
        extension(b'x', b"12 size=512\n"),
        header("outer", b'0', 0),
        inner,
        header("next", b'0', 0),
        vec![0; 1024],
    ]
    .concat();
    let entries = read_all(&bytes);
    assert_eq!(
        entries.iter().map(|e| e.path.clone()).collect::<Vec<_>>(),
        [b"outer".to_vec(), b"next".to_vec()]
    );
    assert_eq!(entries[0].size, 512);
}

#[test]
fn times_have_nanoseconds_and_may_be_before_the_epoch() {
    for (text, time) in [
        ("1700000000.123456789", Some((1_700_000_000, 123_456_789))),
        ("1.5", Some((1, 500_000_000))),
        ("-1.25", Some((-2, 750_000_000))),
        ("-0.5", Some((-1, 500_000_000))),
        ("7", Some((7, 0))),
        ("1.1234567891", Some((1, 123_456_789))),
        ("1.x", None),
        ("", None),
        ("-9223372036854775808.5", None),
    ] {
        assert_eq!(pax_time(text.as_bytes()), time, "{text}");
    }
}

#[test]
fn numbers_are_octal_or_base_256() {
    assert_eq!(number(b"0000755\0"), Some(0o755));
    assert_eq!(number(b"   755 \0"), Some(0o755));
    assert_eq!(number(b"\0\0\0\0\0\0\0\0"), Some(0));
    assert_eq!(number(&[0x80, 0, 0, 0, 0, 1, 0, 0]), Some(65_536));
    assert_eq!(number(&[0xff; 12]), Some(-1));
    assert_eq!(number(b"99999999"), None);
    assert_eq!(number(&[0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]), None);
}

#[test]
fn huge_extension_headers_are_refused_before_they_are_read() {
    let limits = Limits::default();
    for flag in [b'x', b'g', b'L', b'K'] {
        let bytes = header("ext", flag, 7 << 30);
        let error = TarReader::new(&bytes[..], &limits).next_entry().expect_err("refused");
        assert!(matches!(error, TarError::Malformed(_, problem) if problem.contains("at most")));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        read_all(&bytes);
    }

    #[test]
    fn any_pax_body_is_survived(flag in prop::sample::select(b"xgLK".to_vec()), body in proptest::collection::vec(any::<u8>(), 0..700)) {
        read_all(&[extension(flag, &body), header("f", b'0', 3), vec![7; 512]].concat());
    }

    #[test]
    fn any_sparse_map_is_survived(
        map in "[0-9,]{0,60}", real in any::<u32>(), one in any::<bool>(), data in "[0-9\n]{0,512}", flag in prop::sample::select(b"0S".to_vec()),
    ) {
        let key = if one { "GNU.sparse.major=1" } else { "x=y" };
        let records = [format!("GNU.sparse.size={real}"), format!("GNU.sparse.map={map}"), key.to_owned()];
        let body: String = records
            .iter()
            .filter(|record| !record.ends_with('='))
            .map(|record| {
                let length = (record.len() + 2..).find(|&l| l == record.len() + 2 + l.to_string().len()).unwrap_or(0);
                format!("{length} {record}\n")
            })
            .collect();
        let mut file = data.into_bytes();
        file.resize(1024, 0);
        for entry in read_all(&[extension(b'x', body.as_bytes()), header("f", flag, 1024), file, vec![0; 1024]].concat()) {
            if let Some(map) = entry.sparse {
                prop_assert!(map.iter().all(|f| f.offset + f.len <= entry.size));
                prop_assert!(map.windows(2).all(|pair| pair[0].offset + pair[0].len <= pair[1].offset));
            }
        }
    }
}
