//! Makes a layer blob of a tree: tar, gzip, and the two digests of both.

use std::io::{self, BufWriter, Write};

use flate2::{Compression, GzBuilder};
use oci_spec::image::{Descriptor, MediaType};
use sha2::{Digest, Sha256};

use crate::layout::Layout;
use crate::tree::Tree;

/// A layer as manifest and configuration name it.
#[derive(Debug, Clone)]
pub(crate) struct Built {
    /// The compressed blob.
    pub(crate) descriptor: Descriptor,
    /// Digest of the uncompressed archive.
    pub(crate) diff_id: String,
}

/// Writes `tree` as a blob into `layout`.
pub(crate) fn write(tree: &Tree, layout: &Layout) -> anyhow::Result<Built> {
    let blob = BufWriter::new(layout.new_blob()?);
    // No name and no time in the header: equal trees give equal blobs.
    let gzip = GzBuilder::new()
        .mtime(0)
        .write(blob, Compression::default());
    let mut hashing = Hashing {
        inner: gzip,
        hasher: Sha256::new(),
    };
    tree.write(BufWriter::new(&mut hashing))?;
    let diff_id = format!("sha256:{}", hex::encode(hashing.hasher.finalize()));
    let blob = hashing
        .inner
        .finish()?
        .into_inner()
        .map_err(io::IntoInnerError::into_error)?;
    let descriptor = blob.finish(MediaType::ImageLayerGzip)?;
    Ok(Built {
        descriptor,
        diff_id,
    })
}

/// Passes bytes on and hashes them.
struct Hashing<W> {
    inner: W,
    hasher: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;

    use sha2::{Digest, Sha256};

    use crate::layout::Layout;
    use crate::tree::Tree;

    #[test]
    fn digests_are_those_of_the_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::open(folder.path()).unwrap();
        let mut tree = Tree::default();
        tree.file("a", 0o644, vec![7; 100_000]);
        let built = super::write(&tree, &layout).unwrap();

        let blob = fs::read(layout.blob(&built.descriptor)).unwrap();
        assert_eq!(built.descriptor.size(), blob.len() as u64);
        assert_eq!(
            built.descriptor.digest().digest(),
            hex::encode(Sha256::digest(&blob))
        );
        let mut archive = Vec::new();
        flate2::read::GzDecoder::new(blob.as_slice())
            .read_to_end(&mut archive)
            .unwrap();
        assert_eq!(
            built.diff_id,
            format!("sha256:{}", hex::encode(Sha256::digest(&archive)))
        );

        let again = super::write(&tree, &layout).unwrap();
        assert_eq!(again.descriptor, built.descriptor);
    }
}
