//! What a host remembers of a layer's blob, and for how long that is true.
//!
//! Which spans are filled is true only as long as the kernel runs: their bytes are in the page
//! cache, and a host that loses power keeps the record and loses the bytes. So the record names the
//! boot, and another boot's is worth nothing. A *sealed* blob was verified and synced first.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::digest::DiffId;
use crate::filler::SpanSet;
use crate::layout;

const MAGIC: &[u8; 8] = b"sandfil1";
const HEADER: usize = 64;
/// A seal is a line of text; longer ones are none.
const MAX_SEAL: u64 = 256;

/// Names this run of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootId([u8; 36]);

impl BootId {
    /// Of the running kernel.
    ///
    /// # Errors
    /// `/proc` is not there.
    pub fn current() -> io::Result<Self> {
        let text = std::fs::read("/proc/sys/kernel/random/boot_id")?;
        let id = text.first_chunk::<36>();
        id.copied()
            .map(Self)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Another one, for tests.
    #[must_use]
    pub fn from_bytes(id: [u8; 36]) -> Self {
        Self(id)
    }
}

impl std::fmt::Display for BootId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

/// The record of filled spans.
#[derive(Debug)]
pub struct FilledFile {
    file: File,
}

impl FilledFile {
    /// Opens the record in a layer's folder, with what is filled. A record of another boot, of
    /// another number of spans or a damaged one is begun anew: the spans are then fetched again.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open(folder: &Path, boot: BootId, spans: u32) -> io::Result<(Self, SpanSet)> {
        let path = folder.join(layout::FILLED);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        header[8..44].copy_from_slice(&boot.0);
        header[44..48].copy_from_slice(&spans.to_le_bytes());
        let empty = SpanSet::none(spans);
        let mut there = Vec::new();
        let limit = (HEADER + empty.bits().len()) as u64 + 1;
        (&file).take(limit).read_to_end(&mut there)?;
        let kept = match there.split_at_checked(HEADER) {
            Some((head, bits)) if head == header => SpanSet::from_bits(spans, bits),
            _ => None,
        };
        let set = match kept {
            Some(set) => set,
            None => {
                file.set_len(0)?;
                file.write_all_at(empty.bits(), HEADER as u64)?;
                file.write_all_at(&header, 0)?;
                empty
            }
        };
        Ok((Self { file }, set))
    }

    /// Records a span that `set` has, after its bytes were written.
    ///
    /// # Errors
    /// Those of `pwrite(2)`.
    pub fn record(&self, set: &SpanSet, span: u32) -> io::Result<()> {
        match set.byte_of(span) {
            Some((at, byte)) => self.file.write_all_at(&[byte], HEADER as u64 + at),
            None => Ok(()),
        }
    }
}

/// Whether the record in a layer's folder is from before the last start of the host.
///
/// # Errors
/// Those of the file system.
pub(super) fn is_of_another_boot(folder: &Path, boot: BootId) -> io::Result<bool> {
    let mut head = [0; 44];
    match File::open(folder.join(layout::FILLED)).and_then(|mut file| file.read_exact(&mut head)) {
        Ok(()) => Ok(head[..8] == *MAGIC && head[8..] != boot.0),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof => Ok(false),
            _ => Err(error),
        },
    }
}

/// Says that the blob is complete. The caller has verified and synced it.
///
/// # Errors
/// Those of the file system; the layer is then not sealed.
pub fn seal(folder: &Path, diff_id: DiffId, size: u64) -> io::Result<()> {
    let draft = folder.join("sealed.new");
    let mut file = File::create(&draft)?;
    file.write_all(seal_text(diff_id, size).as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&draft, folder.join(layout::SEALED))?;
    File::open(folder)?.sync_all()
}

/// Whether the blob in `folder` is complete and is the one that the index describes.
///
/// # Errors
/// Those of the file system.
pub fn is_sealed(folder: &Path, diff_id: DiffId, size: u64) -> io::Result<bool> {
    let mut text = String::new();
    match File::open(folder.join(layout::SEALED)) {
        Ok(file) => file.take(MAX_SEAL).read_to_string(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let length = std::fs::metadata(folder.join(layout::BLOB))?.len();
    Ok(text == seal_text(diff_id, size) && length == size)
}

fn seal_text(diff_id: DiffId, size: u64) -> String {
    format!("sealed 1 {diff_id} {size}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: BootId = BootId([b'a'; 36]);
    const LATER: BootId = BootId([b'b'; 36]);

    #[test]
    fn what_is_filled_is_true_until_the_next_boot() {
        let folder = tempfile::tempdir().unwrap();
        let (file, mut set) = FilledFile::open(folder.path(), BOOT, 20).unwrap();
        assert_eq!(set.members(), 0);
        for span in [3, 17] {
            set.insert(span);
            file.record(&set, span).unwrap();
        }
        let (_, again) = FilledFile::open(folder.path(), BOOT, 20).unwrap();
        assert_eq!(again, set);
        let (_, other) = FilledFile::open(folder.path(), LATER, 20).unwrap();
        assert_eq!(other.members(), 0);
        let (_, back) = FilledFile::open(folder.path(), BOOT, 20).unwrap();
        assert_eq!(back.members(), 0, "the later boot began anew");
    }

    #[test]
    fn damaged_records_are_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(layout::FILLED);
        let (file, mut set) = FilledFile::open(folder.path(), BOOT, 20).unwrap();
        set.insert(1);
        file.record(&set, 1).unwrap();
        let good = std::fs::read(&path).unwrap();
        for bad in [
            &good[..good.len() - 1],
            &[&good[..], &[0]].concat(),
            b"",
            &[0; 67],
        ] {
            std::fs::write(&path, bad).unwrap();
            let (_, set) = FilledFile::open(folder.path(), BOOT, 20).unwrap();
            assert_eq!(set.members(), 0);
        }
        std::fs::write(&path, &good).unwrap();
        let (_, set) = FilledFile::open(folder.path(), BOOT, 21).unwrap();
        assert_eq!(set.members(), 0, "of another index");
    }

    #[test]
    fn a_seal_is_for_one_archive() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, other) = (DiffId([1; 32]), DiffId([2; 32]));
        std::fs::write(folder.path().join(layout::BLOB), [0; 7]).unwrap();
        assert!(!is_sealed(folder.path(), ours, 7).unwrap());
        seal(folder.path(), ours, 7).unwrap();
        assert!(is_sealed(folder.path(), ours, 7).unwrap());
        assert!(!is_sealed(folder.path(), other, 7).unwrap());
        assert!(!is_sealed(folder.path(), ours, 8).unwrap());
        std::fs::write(folder.path().join(layout::BLOB), []).unwrap();
        assert!(
            !is_sealed(folder.path(), ours, 7).unwrap(),
            "an emptied blob"
        );
    }
}
