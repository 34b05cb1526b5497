//! What lies where on disk. Integers are little endian. Source: `fs/erofs/erofs_fs.h` in Linux.

/// Bytes of a block, as a power of two.
pub(super) const BLOCK_BITS: u8 = 9;
/// Bytes of a block.
pub(super) const BLOCK: u64 = 1 << BLOCK_BITS;
/// Inodes are addressed in units of this many bytes, from the start of the image.
pub(super) const SLOT: u64 = 32;
/// Bytes of an inode of the extended kind, the only one that has times and wide owners.
pub(super) const INODE: u64 = 64;
/// Bytes of an entry of a directory, without its name.
pub(super) const DIRENT: u64 = 12;
/// Bytes of the address of a file's data.
pub(super) const CHUNK_INDEX: u64 = 8;
/// A chunk is at most `1 << MAX_CHUNK_BITS` blocks.
pub(super) const MAX_CHUNK_BITS: u32 = 31;

/// The superblock lies here, the table of devices behind it.
const SUPER: usize = 1024;
const SUPER_SIZE: usize = 128;
const DEVICE_SIZE: usize = 128;
/// The first inode lies here: behind superblock and devices, at a block.
pub(super) const FIRST_INODE: u64 = 1536;

const MAGIC: u32 = 0xe0f5_e1e2;
const COMPAT_CHECKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;
const INCOMPAT_CHUNKED_FILE: u32 = 4;
const INCOMPAT_DEVICE_TABLE: u32 = 8;

/// How an inode's data is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    /// There is none.
    None,
    /// Whole blocks of the image from this one.
    Plain(u32),
    /// Behind the inode, within one block.
    Inline,
    /// On the external device, from this block.
    Chunk(u32),
    /// A device's number.
    Device { major: u32, minor: u32 },
}

/// An inode.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inode {
    /// Type and permissions, as in `st_mode`.
    pub(super) mode: u16,
    pub(super) xattr_count: u16,
    pub(super) size: u64,
    pub(super) data: Data,
    /// Number for 32-bit programs.
    pub(super) number: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: i64,
    pub(super) mtime_nanos: u32,
    pub(super) links: u32,
}

// === impl Inode ===

impl Inode {
    pub(super) fn write(&self, out: &mut [u8]) {
        let (layout, union): (u16, u32) = match self.data {
            Data::None => (0, 0),
            Data::Plain(block) => (0, block),
            Data::Inline => (2, 0),
            Data::Chunk(_) => (4, 0x20 | chunk_bits(self.size)),
            Data::Device { major, minor } => {
                // As new_encode_dev() in the kernel.
                (0, (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
            }
        };
        let mut out = Cursor(out);
        out.u16(1 | layout << 1);
        out.u16(self.xattr_count);
        out.u16(self.mode);
        out.u16(0);
        out.u64(self.size);
        out.u32(union);
        out.u32(self.number);
        out.u32(self.uid);
        out.u32(self.gid);
        out.u64(self.mtime.cast_unsigned());
        out.u32(self.mtime_nanos);
        out.u32(self.links);
    }
}

/// Size of the one chunk that holds a file of `size` bytes: `1 << bits` blocks.
pub(super) fn chunk_bits(size: u64) -> u32 {
    size.div_ceil(BLOCK)
        .max(1)
        .next_power_of_two()
        .trailing_zeros()
}

/// The address of a file's data.
pub(super) fn write_chunk_index(out: &mut [u8], block: u32) {
    let mut out = Cursor(out);
    out.u16(0);
    out.u16(1);
    out.u32(block);
}

/// One entry of a directory, without its name.
pub(super) fn write_dirent(out: &mut [u8], inode: u64, name_offset: u16, file_type: u8) {
    let mut out = Cursor(out);
    out.u64(inode);
    out.u16(name_offset);
    out.bytes(&[file_type, 0]);
}

/// The superblock, with the address of the root, and the one external device.
pub(super) fn write_super(image: &mut [u8], root: u64, inodes: u64, device_blocks: u32) {
    let blocks = (image.len() as u64 / BLOCK) as u32;
    let mut out = Cursor(&mut image[SUPER..]);
    out.u32(MAGIC);
    out.u32(0); // checksum, below
    out.u32(COMPAT_CHECKSUM | COMPAT_MTIME);
    out.bytes(&[BLOCK_BITS, 0]);
    // Near the front, where the layout begins.
    out.u16(root as u16);
    out.u64(inodes);
    out.u64(0); // built at
    out.u32(0);
    out.u32(blocks);
    out.u32(0); // first block of metadata
    out.u32(0); // of shared extended attributes, of which there are none
    out.bytes(&[0; 32]); // UUID and name
    out.u32(INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE);
    out.u16(0); // compression
    out.u16(1); // external devices
    out.u16(((SUPER + SUPER_SIZE) / DEVICE_SIZE) as u16);
    let mut device = Cursor(&mut image[SUPER + SUPER_SIZE..]);
    device.bytes(&[0; 64]);
    device.u32(device_blocks);
    let checksum = crc32c(&image[SUPER..SUPER + BLOCK as usize]);
    Cursor(&mut image[SUPER + 4..]).u32(checksum);
}

/// CRC-32C without the final inversion, as EROFS has it.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

/// Writes fields one after the other.
struct Cursor<'a>(&'a mut [u8]);

impl Cursor<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        let (now, later) = std::mem::take(&mut self.0).split_at_mut(bytes.len());
        now.copy_from_slice(bytes);
        self.0 = later;
    }

    fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_of_the_well_known_text() {
        assert_eq!(crc32c(b"123456789") ^ u32::MAX, 0xe306_9283);
    }

    #[test]
    fn chunks_hold_their_file() {
        for (size, bits) in [
            (1, 0),
            (512, 0),
            (513, 1),
            (1024, 1),
            (1025, 2),
            (1 << 40, 31),
        ] {
            assert_eq!(chunk_bits(size), bits, "{size}");
        }
    }
}
