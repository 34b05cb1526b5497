//! Messages of `include/uapi/linux/fuse.h`, as far as a read-only file system of one folder needs
//! them. Pure: what the kernel sends is parsed with every length checked.

/// The version spoken here; the kernel falls back to it.
const MAJOR: u32 = 7;
const MINOR: u32 = 40;
/// The folder's number.
pub(super) const ROOT: u64 = 1;
/// Most bytes of one read.
pub(super) const MAX_READ: u32 = 1 << 20;
const MAX_PAGES: u16 = 256;
/// The least that the kernel takes; nothing is ever written.
const MAX_WRITE: u32 = 4096;
/// Reads that the kernel may have under way without a thread that waits in each.
const MAX_BACKGROUND: u16 = u16::MAX;

const ASYNC_READ: u32 = 1;
const PARALLEL_DIROPS: u32 = 1 << 18;
const ASYNC_DIO: u32 = 1 << 15;
const MAX_PAGES_FLAG: u32 = 1 << 22;
const INIT_EXT: u32 = 1 << 30;
/// `FUSE_HAS_RESEND`, in the second word.
const HAS_RESEND: u32 = 1 << 7;
/// `FOPEN_DIRECT_IO`: EROFS has a page cache of its own, this would be a second one.
const DIRECT_IO: u32 = 1;

const NOTIFY_RESEND: i32 = 7;

const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;
const ATTRIBUTES: usize = 88;

/// How long the kernel may remember attributes, in seconds. The size of a layer never changes.
const LONG: u64 = 1 << 31;

/// A request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request<'b> {
    /// By which it is answered.
    pub unique: u64,
    /// The file.
    pub node: u64,
    /// What is wanted.
    pub call: Call<'b>,
}

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call<'b> {
    /// The first of all.
    Init { major: u32, flags: u32, flags2: u32 },
    /// A name in the folder.
    Lookup(&'b [u8]),
    /// Size and kind.
    Attributes,
    /// Opens a file.
    Open,
    /// Reads it.
    Read { offset: u64, size: u32 },
    /// Closes it.
    Release,
    /// At each close of a descriptor.
    Flush,
    /// How full the file system is.
    StatFs,
    /// Wants no answer.
    Silent,
    /// The file system is unmounted.
    Destroy,
    /// Something that a read-only file system does not do.
    Other,
}

/// What one read of the device brought. None for what is no request.
#[must_use]
pub(super) fn parse(bytes: &[u8]) -> Option<Request<'_>> {
    let length = u32_at(bytes, 0)? as usize;
    let (opcode, unique, node) = (u32_at(bytes, 4)?, u64_at(bytes, 8)?, u64_at(bytes, 16)?);
    let body = bytes.get(..length)?.get(IN_HEADER..)?;
    let call = match opcode {
        1 => Call::Lookup(body.split_last().filter(|(end, _)| **end == 0)?.1),
        // Forget, interrupt, batch of forgets.
        2 | 36 | 42 => Call::Silent,
        3 => Call::Attributes,
        14 => Call::Open,
        15 => Call::Read {
            offset: u64_at(body, 8)?,
            size: u32_at(body, 16)?,
        },
        17 => Call::StatFs,
        18 => Call::Release,
        25 => Call::Flush,
        26 => Call::Init {
            major: u32_at(body, 0)?,
            flags: u32_at(body, 12)?,
            // Older kernels send less.
            flags2: u32_at(body, 16).unwrap_or(0),
        },
        38 => Call::Destroy,
        _ => Call::Other,
    };
    Some(Request { unique, node, call })
}

/// A file or the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub number: u64,
    /// Bytes.
    pub size: u64,
}

/// The head of an answer with `payload` bytes after it.
#[must_use]
pub(super) fn head(unique: u64, payload: usize) -> [u8; OUT_HEADER] {
    out_header(unique, 0, payload)
}

/// An answer without content: an error, or success when `errno` is 0.
#[must_use]
pub(super) fn plain(unique: u64, errno: i32) -> [u8; OUT_HEADER] {
    out_header(unique, -errno.abs(), 0)
}

/// Asks the kernel to send again what was taken and not answered.
#[must_use]
pub(super) fn resend() -> [u8; OUT_HEADER] {
    out_header(0, NOTIFY_RESEND, 0)
}

fn out_header(unique: u64, error: i32, payload: usize) -> [u8; OUT_HEADER] {
    let length = u32::try_from(OUT_HEADER + payload).unwrap_or(u32::MAX);
    let mut header = [0; OUT_HEADER];
    header[..4].copy_from_slice(&length.to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// `struct fuse_init_out`. `flags` and `flags2` are what the kernel offers.
#[must_use]
pub(super) fn init(flags: u32, flags2: u32) -> Vec<u8> {
    let wanted = ASYNC_READ | ASYNC_DIO | PARALLEL_DIROPS | MAX_PAGES_FLAG | INIT_EXT;
    let mut out = Vec::with_capacity(64);
    for word in [MAJOR, MINOR, 0, flags & wanted] {
        out.extend(word.to_ne_bytes());
    }
    out.extend(MAX_BACKGROUND.to_ne_bytes());
    // Above it the kernel would call us congested and hold back.
    out.extend(MAX_BACKGROUND.to_ne_bytes());
    out.extend(MAX_WRITE.to_ne_bytes());
    out.extend(1_u32.to_ne_bytes());
    out.extend(MAX_PAGES.to_ne_bytes());
    out.extend(0_u16.to_ne_bytes());
    out.extend((flags2 & HAS_RESEND).to_ne_bytes());
    out.resize(64, 0);
    out
}

/// Whether a kernel's first message is one that [`init`] answers.
#[must_use]
pub(super) fn speaks(major: u32) -> bool {
    major == MAJOR
}

/// `struct fuse_entry_out`. The name is asked for each time: a layer may go.
#[must_use]
pub(super) fn entry(node: Node) -> Vec<u8> {
    let mut out = Vec::with_capacity(40 + ATTRIBUTES);
    for word in [node.number, 0, 0, LONG, 0] {
        out.extend(word.to_ne_bytes());
    }
    out.extend(attributes_of(node));
    out
}

/// `struct fuse_attr_out`.
#[must_use]
pub(super) fn attributes(node: Node) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + ATTRIBUTES);
    out.extend(LONG.to_ne_bytes());
    out.extend(0_u64.to_ne_bytes());
    out.extend(attributes_of(node));
    out
}

/// `struct fuse_attr`.
fn attributes_of(node: Node) -> [u8; ATTRIBUTES] {
    let (mode, links) = match node.number {
        ROOT => (libc::S_IFDIR | 0o500, 2_u32),
        _ => (libc::S_IFREG | 0o400, 1),
    };
    let mut out = [0; ATTRIBUTES];
    let blocks = node.size.div_ceil(512);
    for (at, word) in [(0, node.number), (8, node.size), (16, blocks)] {
        out[at..at + 8].copy_from_slice(&word.to_ne_bytes());
    }
    for (at, word) in [(60, mode), (64, links), (80, 4096)] {
        out[at..at + 4].copy_from_slice(&word.to_ne_bytes());
    }
    out
}

/// `struct fuse_open_out`.
#[must_use]
pub(super) fn opened() -> [u8; 16] {
    let mut out = [0; 16];
    out[8..12].copy_from_slice(&DIRECT_IO.to_ne_bytes());
    out
}

/// `struct fuse_statfs_out` of a file system without free space.
#[must_use]
pub(super) fn statfs() -> [u8; 80] {
    let mut out = [0; 80];
    // Block size, longest name, fragment size.
    for (at, word) in [(40, 4096_u32), (44, 255), (48, 4096)] {
        out[at..at + 4].copy_from_slice(&word.to_ne_bytes());
    }
    out
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(IN_HEADER + body.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(99_u64.to_ne_bytes());
        bytes.extend(node.to_ne_bytes());
        bytes.resize(IN_HEADER, 0);
        bytes.extend(body);
        bytes
    }

    fn read_body() -> Vec<u8> {
        let mut body = 5_u64.to_ne_bytes().to_vec();
        body.extend(8192_u64.to_ne_bytes());
        body.extend(4096_u32.to_ne_bytes());
        body.resize(40, 0);
        body
    }

    #[test]
    fn requests_are_understood() {
        let of = |call| {
            Some(Request {
                unique: 99,
                node: 7,
                call,
            })
        };
        assert_eq!(parse(&request(1, 7, b"abc\0")), of(Call::Lookup(b"abc")));
        let read = of(Call::Read {
            offset: 8192,
            size: 4096,
        });
        assert_eq!(parse(&request(15, 7, &read_body())), read);
        assert_eq!(parse(&request(2, 7, &[0; 8])), of(Call::Silent));
        assert_eq!(parse(&request(16, 7, &[0; 8])), of(Call::Other));
    }

    #[test]
    fn what_is_cut_is_no_request() {
        let whole = request(15, 7, &read_body());
        for cut in 0..whole.len() {
            assert_eq!(parse(&whole[..cut]), None, "{cut}");
        }
        assert_eq!(parse(&request(15, 7, &read_body()[..16])), None);
        assert_eq!(parse(&request(1, 7, b"endless")), None);
        assert_eq!(parse(&request(1, 7, b"")), None);
    }

    #[test]
    fn answers_have_the_lengths_of_the_header_file() {
        let node = Node {
            number: 2,
            size: 513,
        };
        let lengths = [entry(node).len(), attributes(node).len(), init(0, 0).len()];
        assert_eq!(lengths, [128, 104, 64]);
        assert_eq!(u64_at(&attributes(node), 16 + 16), Some(2), "blocks");
        assert_eq!(plain(1, libc::EIO)[4..8], (-libc::EIO).to_ne_bytes());
    }

    #[test]
    fn nothing_is_taken_that_the_kernel_does_not_offer() {
        let out = init(MAX_PAGES_FLAG, 0);
        assert_eq!(u32_at(&out, 12), Some(MAX_PAGES_FLAG));
        assert_eq!(u32_at(&out, 32), Some(0));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }
    }
}
