//! An image of 2 GiB in 200 000 files, as large machine-learning or monorepo images are, of text that compresses like text.

use anyhow::Result;
use camino::Utf8Path;

use super::{Compression, ImageBuilder, LayerBuilder};

/// Layers of the image.
const LAYERS: u32 = 8;
/// Directories of a layer.
const DIRECTORIES: u32 = 50;
/// Files of a directory.
const FILES: u32 = 500;
/// Bytes of a file, on average.
const BYTES: u64 = (2 << 30) / (LAYERS * DIRECTORIES * FILES) as u64;

/// What it is made of; another recipe is another image in the cache.
pub(super) const RECIPE: &str = "8 layers, 50 directories, 500 files, gzip";

/// Numbers that are the same every time (Marsaglia's xorshift64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Writes the layout.
pub(super) fn make(directory: &Utf8Path) -> Result<()> {
    let mut numbers = Numbers(0x5eed);
    let words: Vec<String> =
        (0..4096).map(|_| format!("{:x} ", numbers.next() >> (8 + numbers.next() % 48))).collect();
    let mut image = ImageBuilder::new();
    for layer in 0..LAYERS {
        let mut tar = LayerBuilder::new();
        for directory in 0..DIRECTORIES {
            let directory = format!("data/{layer}/{directory}");
            tar.directory(&directory, 0o755);
            for file in 0..FILES {
                let size = usize::try_from(BYTES / 2 + numbers.next() % BYTES)?;
                let mut text = String::with_capacity(size + 32);
                while text.len() < size {
                    text.push_str(&words[usize::try_from(numbers.next() % 4096)?]);
                }
                tar.file(&format!("{directory}/{file}.txt"), 0o644, text.as_bytes());
            }
        }
        image = image.layer(tar.finish(), Compression::Gzip);
    }
    image.write(directory, "latest")
}
