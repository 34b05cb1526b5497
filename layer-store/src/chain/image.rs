//! The smallest EROFS image that reads from a blob: one file, whose bytes are the blob.
//!
//! Layout of `fs/erofs/erofs_fs.h`, with what our layers use: blocks of 512 bytes, a device table,
//! and a chunk-based inode with one chunk on device 1.

/// Name of the one file.
pub const FILE: &str = "data";

const BLOCK: usize = 512;
const BLOCK_BITS: u8 = 9;
const SUPERBLOCK: usize = 1024;
const DEVICE_SLOT: usize = SUPERBLOCK + 128;
/// Inodes are numbered in units of 32 bytes.
const ROOT: usize = 1536;
const DATA: usize = ROOT + 128;
const IMAGE_BYTES: usize = 4096;

const MAGIC: u32 = 0xE0F5_E1E2;
const INCOMPAT_CHUNKED_FILE: u32 = 0x4;
const INCOMPAT_DEVICE_TABLE: u32 = 0x8;
/// Data layouts, as they stand in `i_format` of a compact inode.
const FLAT_INLINE: u16 = 2 << 1;
const CHUNK_BASED: u16 = 4 << 1;
const CHUNK_INDEXES: u32 = 0x20;
const S_IFDIR: u16 = 0o040_000;
const S_IFREG: u16 = 0o100_000;

/// Metadata of a layer whose blob is `size` bytes long and appears as [`FILE`].
#[must_use]
pub fn one_file(size: u32) -> Vec<u8> {
    let mut image = vec![0; IMAGE_BYTES];
    let blocks = size.div_ceil(BLOCK as u32).max(1);
    superblock(&mut image[SUPERBLOCK..]);
    put(&mut image, DEVICE_SLOT + 64, &blocks.to_le_bytes());

    let entries = [(".", ROOT, 2), ("..", ROOT, 2), (FILE, DATA, 1)];
    let directory = directory(&entries);
    let inode = Inode {
        format: FLAT_INLINE,
        mode: S_IFDIR | 0o755,
        links: 2,
        size: directory.len() as u32,
        union: 0,
        number: 1,
    };
    put(&mut image, ROOT, &inode.encode());
    put(&mut image, ROOT + 32, &directory);

    // The smallest chunk that holds the whole file.
    let chunk_bits = u32::BITS - (blocks - 1).leading_zeros();
    let inode = Inode {
        format: CHUNK_BASED,
        mode: S_IFREG | 0o644,
        links: 1,
        size,
        union: CHUNK_INDEXES | chunk_bits,
        number: 2,
    };
    put(&mut image, DATA, &inode.encode());
    // The chunk: block 0 of device 1.
    put(&mut image, DATA + 32, &[0, 0, 1, 0, 0, 0, 0, 0]);
    image
}

fn superblock(at: &mut [u8]) {
    put(at, 0, &MAGIC.to_le_bytes());
    put(at, 12, &[BLOCK_BITS, 0]);
    put(at, 14, &((ROOT / 32) as u16).to_le_bytes());
    put(at, 16, &2_u64.to_le_bytes());
    put(at, 36, &((IMAGE_BYTES / BLOCK) as u32).to_le_bytes());
    let incompatible = INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE;
    put(at, 80, &incompatible.to_le_bytes());
    put(at, 86, &1_u16.to_le_bytes());
    put(at, 88, &((DEVICE_SLOT / 128) as u16).to_le_bytes());
}

/// `struct erofs_inode_compact`.
struct Inode {
    format: u16,
    mode: u16,
    links: u16,
    size: u32,
    union: u32,
    number: u32,
}

impl Inode {
    fn encode(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        put(&mut bytes, 0, &self.format.to_le_bytes());
        put(&mut bytes, 4, &self.mode.to_le_bytes());
        put(&mut bytes, 6, &self.links.to_le_bytes());
        put(&mut bytes, 8, &self.size.to_le_bytes());
        put(&mut bytes, 16, &self.union.to_le_bytes());
        put(&mut bytes, 20, &self.number.to_le_bytes());
        bytes
    }
}

/// Entries, then their names; the offset of the first name says how many entries there are.
fn directory(entries: &[(&str, usize, u8)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut name_at = entries.len() * 12;
    for (name, inode, kind) in entries {
        bytes.extend((*inode as u64 / 32).to_le_bytes());
        bytes.extend((name_at as u16).to_le_bytes());
        bytes.extend([*kind, 0]);
        name_at += name.len();
    }
    bytes.extend(entries.iter().flat_map(|(name, ..)| name.bytes()));
    bytes
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}
