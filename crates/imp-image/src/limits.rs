//! How large an image may be. The defaults let every real image through that we know of and keep a hostile one from
//! filling memory or disk.

use serde::{Deserialize, Serialize};

/// Bounds on what an image may make us read, keep or write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of a manifest or index. Registries refuse more than 4 MiB (distribution specification).
    pub manifest_bytes: u64,
    /// Bytes of a configuration document.
    pub config_bytes: u64,
    /// Indexes inside indexes.
    pub index_depth: u32,
    /// Layers of an image. overlayfs stops others at about 500 (containerd) or 127 (Docker).
    pub layers: usize,
    /// Bytes of one layer as it is sent.
    pub layer_compressed_bytes: u64,
    /// Bytes of one layer's tar stream.
    pub layer_bytes: u64,
    /// Bytes of the finished disk, holes included.
    pub disk_bytes: u64,
    /// Entries of all layers together.
    pub entries: u64,
    /// Bytes of names, link targets and extended attributes kept in memory.
    pub metadata_bytes: u64,
    /// Bytes of one entry's path or link target. Linux' PATH_MAX without the final NUL.
    pub path_bytes: usize,
    /// Directories above an entry.
    pub path_depth: u32,
    /// Bytes of one PAX or GNU extension header.
    pub extension_header_bytes: u64,
    /// Extended attributes of one file.
    pub xattrs: usize,
    /// Bytes of all extended attributes of one file, names included. EROFS counts them in 18 bits.
    pub xattr_bytes: usize,
    /// Bytes of tar stream for each byte sent, above [`Limits::ratio_free_bytes`].
    pub compression_ratio: u64,
    /// Bytes of a tar stream for which the ratio is not looked at: a file of zeros is no attack.
    pub ratio_free_bytes: u64,
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl Default for Limits {
    fn default() -> Self {
        Self {
            manifest_bytes: 4 * MIB,
            config_bytes: 8 * MIB,
            index_depth: 3,
            layers: 512,
            layer_compressed_bytes: 32 * GIB,
            layer_bytes: 128 * GIB,
            disk_bytes: 256 * GIB,
            entries: 4_000_000,
            metadata_bytes: 512 * MIB,
            path_bytes: 4095,
            path_depth: 512,
            extension_header_bytes: MIB,
            xattrs: 256,
            xattr_bytes: 128 << 10,
            compression_ratio: 2_000,
            ratio_free_bytes: 2 * GIB,
        }
    }
}
