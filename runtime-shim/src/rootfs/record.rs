//! What is written down of a root file system, so that a later process of this service holds its
//! layers as well.

use std::io;
use std::path::Path;

use sandman_layer_store::LayerDigest;
use sandman_layer_store::cache::BootId;
use serde::{Deserialize, Serialize};

const FILE: &str = "record";

/// Which layers a root is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// An upper folder is worth nothing after a reboot.
    boot: String,
    /// Where the layers came from.
    pub(super) repository: String,
    /// Lowest first.
    pub(super) layers: Vec<Layer>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layer {
    pub(super) digest: LayerDigest,
    /// Bytes of the registry's blob.
    pub(super) size: u64,
}

impl Record {
    pub(super) fn new(boot: BootId, repository: &str, layers: Vec<Layer>) -> Self {
        Self {
            boot: boot.to_string(),
            repository: repository.to_owned(),
            layers,
        }
    }

    pub(super) fn is_of(&self, boot: BootId) -> bool {
        self.boot == boot.to_string()
    }

    pub(super) fn read(folder: &Path) -> io::Result<Self> {
        let bytes = std::fs::read(folder.join(FILE))?;
        serde_json::from_slice(&bytes).map_err(io::Error::other)
    }

    /// In one step: a record is whole or not there.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let draft = folder.join("record.new");
        std::fs::write(&draft, serde_json::to_vec(self)?)?;
        std::fs::rename(draft, folder.join(FILE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Record::read(folder.path()).is_err());
        let (boot, other) = (
            BootId::from_bytes([b'a'; 36]),
            BootId::from_bytes([b'b'; 36]),
        );
        let layer = Layer {
            digest: LayerDigest([7; 32]),
            size: 9,
        };
        let record = Record::new(boot, "registry.example/app", vec![layer]);
        record.write(folder.path()).unwrap();
        let read = Record::read(folder.path()).unwrap();
        assert_eq!(read, record);
        assert!(read.is_of(boot) && !read.is_of(other));
    }
}
