//! What fuzz targets call: everything that reads what strangers wrote. Each must take any bytes without panicking, hanging or growing past its
//! limits, and a disk that it makes must be one. `fuzz/` feeds them with a coverage-guided fuzzer; property tests feed them with noise.

#![allow(clippy::panic, reason = "a fuzz target fails by panicking")]

use crate::digest::Digest;
use crate::layer::{self, BuildError, Layer};
use crate::limits::Limits;
use crate::manifest::{self, Document};
use crate::registry::fuzzing as registry;
use crate::source::ImageSource;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::sync::Arc;

/// A target: its name, and what it does with bytes.
pub type Target = (&'static str, fn(&[u8]));

/// All targets, named as the corpora are.
pub const TARGETS: &[Target] = &[
    ("layer", one_layer),
    ("layers", two_layers),
    ("manifest", manifest),
    ("configuration", configuration),
    ("reference", reference),
    ("credentials", credentials),
    ("challenge", challenge),
];

/// Small, so that a hostile input costs little.
fn limits() -> Limits {
    const MIB: u64 = 1 << 20;
    Limits {
        layer_bytes: 16 * MIB,
        disk_bytes: 64 * MIB,
        entries: 4_000,
        metadata_bytes: 4 * MIB,
        ratio_free_bytes: 4 * MIB,
        ..Limits::default()
    }
}

fn file(bytes: &[u8]) -> File {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).map(File::from);
    let mut file = file.expect("memory for a file");
    file.write_all(bytes).expect("memory for a file");
    file.rewind().expect("a file in memory can be rewound");
    file
}

/// The bytes as a layer: decompressed, read as tar, merged, laid out.
pub fn one_layer(bytes: &[u8]) {
    build(&[bytes]);
}

/// Two layers, one above the other: whiteouts, opaque directories, links between them. The first two bytes say where the second begins.
pub fn two_layers(bytes: &[u8]) {
    let Some((length, rest)) = bytes.split_at_checked(2) else { return };
    let middle = usize::from(u16::from_le_bytes([length[0], length[1]])) * 512 % (rest.len() + 1);
    let (below, above) = rest.split_at(middle);
    build(&[below, above]);
}

fn build(layers: &[&[u8]]) {
    let layer =
        |bytes: &&[u8]| Layer { file: file(bytes), digest: Digest::of(bytes), diff_id: uncompressed(bytes) };
    let layers: Vec<Layer> = layers.iter().map(layer).collect();
    let count = layers.len();
    let disk = file(&[]);
    match layer::build(layers.into_iter(), count, &disk, &limits(), &Arc::default()) {
        Ok(size) => assert_eq!(disk.metadata().expect("a file in memory has metadata").len(), size),
        Err(BuildError::Invalid(_)) => {}
        Err(BuildError::Io(doing, error)) => panic!("{doing}: {error}"),
        Err(BuildError::Cancelled | BuildError::Broke(_)) => panic!("nobody cancelled it"),
    }
}

/// The digest that a configuration would give for the layer; of nothing where it does not decompress.
fn uncompressed(bytes: &[u8]) -> Digest {
    let mut tar = Vec::new();
    let most = limits().layer_bytes;
    let result = match bytes {
        [0x1f, 0x8b, ..] => flate2::bufread::MultiGzDecoder::new(bytes).take(most).read_to_end(&mut tar),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => match zstd::Decoder::new(bytes) {
            Ok(decoder) => decoder.take(most).read_to_end(&mut tar),
            Err(error) => Err(error),
        },
        _ => return Digest::of(bytes),
    };
    Digest::of(if result.is_ok() { &tar } else { &[] })
}

/// A manifest or index.
pub fn manifest(bytes: &[u8]) {
    if let Ok(Document::Index(manifests)) = manifest::parse(bytes, &limits()) {
        for architecture in ["amd64", "arm64/v8", ""] {
            let chosen = manifest::candidates(&manifests, architecture);
            assert!(chosen.len() <= manifests.len());
            for descriptor in chosen {
                let _ = descriptor.blob("manifest");
            }
        }
        let _ = manifest::platforms(&manifests);
    }
}

/// An image's configuration, and what would run.
pub fn configuration(bytes: &[u8]) {
    for layers in [0, 1, 3] {
        if let Ok((config, diff_ids)) = manifest::parse_config(bytes, layers, Some("amd64")) {
            assert_eq!(diff_ids.len(), layers);
            let _ = crate::healthcheck::of(bytes);
            let _ = crate::runtime_config(&config, &crate::WorkloadOverrides::default());
        }
    }
}

/// An image's name; what is read of it reads the same once more.
pub fn reference(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(source) = text.parse::<ImageSource>() {
        let shown = source.to_string();
        let again: ImageSource = shown.parse().unwrap_or_else(|error| panic!("{shown:?}: {error}"));
        assert_eq!(again, source);
    }
}

/// A pull secret.
pub fn credentials(bytes: &[u8]) {
    registry::credentials(bytes);
}

/// A WWW-Authenticate header.
pub fn challenge(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        registry::challenge(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn noise_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
            for (_, target) in TARGETS {
                target(&bytes);
            }
        }
    }

    /// Every seed, and every input that once broke something.
    #[test]
    fn the_corpus_is_survived() {
        let corpora = camino::Utf8Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
        for (name, target) in TARGETS {
            let directory = corpora.join(name);
            let mut seeds = 0;
            for entry in directory.read_dir_utf8().unwrap_or_else(|e| panic!("{directory}: {e}")) {
                let path = entry.expect("an entry").into_path();
                target(&std::fs::read(&path).expect("a seed"));
                seeds += 1;
            }
            assert!(seeds > 2, "{name} has {seeds} seeds");
        }
    }
}
