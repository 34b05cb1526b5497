//! The layers that have a file, and what its readers may see. No kernel.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::wire::{Node, ROOT};
use crate::{LayerDigest, layout};

/// What becomes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The filler is asked.
    Watched,
    /// All bytes are there.
    Complete,
    /// It fails: nobody fills the blob any more, and it has holes.
    Refused,
}

#[derive(Debug)]
struct File {
    layer: LayerDigest,
    blob: OwnedFd,
    size: u64,
    /// Number of times that it is open.
    opens: u32,
    state: State,
}

impl File {
    fn is_read(&self) -> bool {
        self.state != State::Refused
    }
}

/// All files, by number.
#[derive(Debug, Default)]
pub(crate) struct Files {
    by_node: HashMap<u64, File>,
}

/// Two layers whose digests begin alike; they cannot be watched at once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Clash;

impl Files {
    /// A new file, or a new life of one that is still open. `opens` is how often it is open already.
    pub(crate) fn insert(
        &mut self,
        layer: LayerDigest,
        blob: OwnedFd,
        size: u64,
        opens: u32,
    ) -> Result<(), Clash> {
        let node = number(layer);
        let opens = match self.by_node.get(&node) {
            Some(other) if other.layer != layer => return Err(Clash),
            Some(same) => same.opens,
            None if node <= ROOT => return Err(Clash),
            None => opens,
        };
        let file = File {
            layer,
            blob,
            size,
            opens,
            state: State::Watched,
        };
        self.by_node.insert(node, file);
        Ok(())
    }

    /// The filler is not asked any more. Whether the blob may be let go: not when it is complete and
    /// open. Called once more, nobody is said to read it, and it may go all the same.
    pub(crate) fn retire(&mut self, layer: LayerDigest, complete: bool) -> bool {
        let node = number(layer);
        let Some(file) = self.of(layer) else {
            return true;
        };
        if file.opens == 0 {
            self.by_node.remove(&node);
            return true;
        }
        let stays = complete && file.state == State::Watched;
        if let Some(file) = self.by_node.get_mut(&node) {
            file.state = match stays {
                true => State::Complete,
                false => State::Refused,
            };
        }
        !stays
    }

    /// The file of this name.
    pub(super) fn lookup(&self, name: &[u8]) -> Option<Node> {
        let layer = layout::layer_of(std::str::from_utf8(name).ok()?)?;
        let file = self.of(layer).filter(|file| file.is_read())?;
        Some(Node {
            number: number(layer),
            size: file.size,
        })
    }

    /// Attributes of a file or of the folder.
    pub(super) fn node(&self, number: u64) -> Option<Node> {
        let size = match number {
            ROOT => 0,
            _ => self.by_node.get(&number)?.size,
        };
        Some(Node { number, size })
    }

    /// Counts an opening. Whether there is such a file.
    pub(super) fn open(&mut self, number: u64) -> bool {
        let file = self.by_node.get_mut(&number);
        file.map(|file| file.opens += 1).is_some()
    }

    /// Counts a closing. The layer, if that was the last reason to keep its blob.
    pub(super) fn release(&mut self, number: u64) -> Option<LayerDigest> {
        let file = self.by_node.get_mut(&number)?;
        file.opens = file.opens.saturating_sub(1);
        if file.opens > 0 || file.state == State::Watched {
            return None;
        }
        let file = self.by_node.remove(&number)?;
        file.is_read().then_some(file.layer)
    }

    /// Who is read, and how a read ends.
    pub(super) fn reading(&self, number: u64) -> Option<(LayerDigest, State)> {
        let file = self.by_node.get(&number)?;
        Some((file.layer, file.state))
    }

    /// A layer's blob and its size.
    pub(super) fn blob(&self, layer: LayerDigest) -> Option<(BorrowedFd<'_>, u64)> {
        let file = self.of(layer).filter(|file| file.is_read())?;
        Some((file.blob.as_fd(), file.size))
    }

    /// The descriptor through which a layer's blob is filled.
    pub(crate) fn get(&self, layer: LayerDigest) -> Option<BorrowedFd<'_>> {
        self.blob(layer).map(|(blob, _)| blob)
    }

    /// Whether the filler is asked about a layer.
    pub(crate) fn is_watched(&self, layer: LayerDigest) -> bool {
        self.of(layer)
            .is_some_and(|file| file.state == State::Watched)
    }

    /// All layers whose blobs are needed.
    pub(crate) fn layers(&self) -> impl Iterator<Item = LayerDigest> + '_ {
        let files = self.by_node.values().filter(|file| file.is_read());
        files.map(|file| file.layer)
    }

    fn of(&self, layer: LayerDigest) -> Option<&File> {
        let file = self.by_node.get(&number(layer))?;
        (file.layer == layer).then_some(file)
    }
}

/// A file's number follows from its layer, so that a successor knows the files that are open.
fn number(layer: LayerDigest) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&layer.0[..8]);
    u64::from_be_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: LayerDigest = LayerDigest([7; 32]);
    const NODE: u64 = 0x0707_0707_0707_0707;

    fn blob() -> OwnedFd {
        rustix::fs::memfd_create("blob", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn one() -> Files {
        let mut files = Files::default();
        files.insert(LAYER, blob(), 4096, 0).unwrap();
        files
    }

    #[test]
    fn found_by_the_digits_of_the_digest_alone() {
        let files = one();
        let name = layout::folder_name(LAYER);
        let node = Node {
            number: NODE,
            size: 4096,
        };
        assert_eq!(files.lookup(name.as_bytes()), Some(node));
        for other in [&name[1..], "..", "", &name.replace('0', "1"), "\u{e9}"] {
            assert_eq!(files.lookup(other.as_bytes()), None, "{other}");
        }
        assert_eq!(files.lookup(&[0xff; 64]), None);
    }

    #[test]
    fn two_layers_never_share_a_file() {
        let mut files = one();
        let mut alike = [9; 32];
        alike[..8].fill(7);
        let alike = LayerDigest(alike);
        assert_eq!(files.insert(alike, blob(), 1, 0), Err(Clash));
        assert!(files.get(alike).is_none() && files.get(LAYER).is_some());
        assert!(
            files.retire(alike, true),
            "of another layer is none of ours"
        );
        assert!(files.get(LAYER).is_some());
        for reserved in [0, 1] {
            let mut digest = [0; 32];
            digest[7] = reserved;
            let taken = files.insert(LayerDigest(digest), blob(), 1, 0);
            assert_eq!(taken, Err(Clash), "numbers of FUSE itself");
        }
    }

    #[test]
    fn stays_while_it_is_open() {
        let mut files = one();
        assert!(files.open(NODE));
        assert!(!files.retire(LAYER, true));
        assert_eq!(files.reading(NODE), Some((LAYER, State::Complete)));
        assert_eq!(files.release(NODE), Some(LAYER));
        assert_eq!(files.reading(NODE), None);
        assert_eq!(files.release(NODE), None);
    }

    #[test]
    fn a_blob_with_holes_that_nobody_fills_is_not_read() {
        let mut files = one();
        files.open(NODE);
        assert!(files.retire(LAYER, false), "the blob is let go");
        assert_eq!(files.reading(NODE), Some((LAYER, State::Refused)));
        assert!(files.get(LAYER).is_none() && files.layers().next().is_none());
        assert_eq!(files.lookup(layout::folder_name(LAYER).as_bytes()), None);
        // Watched anew while the old mount lingers.
        files.insert(LAYER, blob(), 4096, 0).unwrap();
        assert!(files.is_watched(LAYER));
        assert!(!files.retire(LAYER, true), "the old mount has it open");
        assert!(files.retire(LAYER, true), "and is said to be unused");
        assert_eq!(files.release(NODE), None, "of which nobody needs to hear");
    }
}
