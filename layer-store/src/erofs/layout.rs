//! Where each inode and each directory's entries go.

use super::{
    TreeError,
    format::{BLOCK, CHUNK_INDEX, DIRENT, Data, FIRST_INODE, INODE, SLOT},
    tree::{Body, Directory, Node, NodeId, ROOT, Tree},
};

/// Largest image, in bytes. It is built in memory.
const MAX_IMAGE: u64 = 1 << 30;

/// Places of a tree's nodes.
#[derive(Debug)]
pub(super) struct Layout {
    /// The nodes that are in the tree, the root first, the children of one directory together.
    pub(super) order: Vec<NodeId>,
    /// By node.
    pub(super) places: Vec<Place>,
    /// Bytes of the image.
    pub(super) size: u64,
}

/// Place of one node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Offset of the inode in the image. 0 for a node that is no longer in the tree.
    pub(super) inode: u64,
    /// Names of a file; of a directory, its own, its `.`, and the `..` of those below.
    pub(super) links: u32,
    /// Of a directory. The root is its own.
    pub(super) parent: NodeId,
    /// Bytes, as the inode states them.
    pub(super) size: u64,
    pub(super) data: Data,
}

const NOWHERE: Place = Place {
    inode: 0,
    links: 0,
    parent: ROOT,
    size: 0,
    data: Data::None,
};

impl Place {
    /// Address of the inode, as directories have it.
    pub(super) fn number(&self) -> u64 {
        self.inode / SLOT
    }
}

// === impl Layout ===

impl Layout {
    /// Lays a tree out: all inodes, then the blocks of the larger directories.
    pub(super) fn new(tree: &Tree) -> Result<Self, TreeError> {
        let mut layout = Self {
            order: Vec::with_capacity(tree.nodes.len()),
            places: vec![NOWHERE; tree.nodes.len()],
            size: FIRST_INODE,
        };
        layout.places[ROOT as usize].links = 1;
        layout.add(tree, ROOT);
        let mut next = 0;
        while let Some(id) = layout.order.get(next).copied() {
            next += 1;
            if let Body::Directory(directory) = &tree.node(id).body {
                layout.add_children(tree, id, directory);
            }
            layout.check()?;
        }
        layout.size = layout.size.next_multiple_of(BLOCK);
        for id in &layout.order {
            let place = &mut layout.places[*id as usize];
            if matches!(tree.node(*id).body, Body::Directory(_) | Body::Symlink(_))
                && place.data != Data::Inline
            {
                // Below MAX_IMAGE, so the block's number fits.
                place.data = Data::Plain((layout.size / BLOCK) as u32);
                layout.size += place.size.next_multiple_of(BLOCK);
            }
        }
        layout.check()?;
        Ok(layout)
    }

    fn add_children(&mut self, tree: &Tree, parent: NodeId, directory: &Directory) {
        for child in directory.children.values().copied() {
            let is_directory = matches!(tree.node(child).body, Body::Directory(_));
            let place = &mut self.places[child as usize];
            place.links += 1;
            if is_directory {
                place.parent = parent;
                self.places[parent as usize].links += 1;
            }
            // A file comes here once for each of its names.
            if self.places[child as usize].inode == 0 {
                self.add(tree, child);
            }
        }
    }

    /// Gives a node the next place that is free.
    fn add(&mut self, tree: &Tree, id: NodeId) {
        let node = tree.node(id);
        let head = INODE + node.xattrs.as_ref().map_or(0, |xattrs| xattrs.size());
        let place = &mut self.places[id as usize];
        let start = self.size.next_multiple_of(SLOT);
        let (start, end) = match &node.body {
            Body::Directory(directory) => {
                place.links += 1;
                place.size = Entries::new(directory, id, id).size();
                behind(start, head, place)
            }
            Body::Symlink(target) => {
                place.size = target.len() as u64;
                behind(start, head, place)
            }
            Body::File { block, size } if *size > 0 => {
                place.size = *size;
                place.data = Data::Chunk(*block);
                (start, chunk_index(start, node) + CHUNK_INDEX)
            }
            Body::Character { major, minor } | Body::Block { major, minor } => {
                place.data = Data::Device {
                    major: *major,
                    minor: *minor,
                };
                (start, start + head)
            }
            // A whiteout is character device 0/0, whose number is no number.
            Body::File { .. } | Body::Fifo | Body::Whiteout => (start, start + head),
        };
        place.inode = start;
        self.size = end;
        self.order.push(id);
    }

    fn check(&self) -> Result<(), TreeError> {
        if self.size > MAX_IMAGE {
            return Err(TreeError::new(b"/", "metadata beyond 1 GiB"));
        }
        Ok(())
    }
}

/// Where the address of a file's data lies.
pub(super) fn chunk_index(inode: u64, node: &Node) -> u64 {
    let head = INODE + node.xattrs.as_ref().map_or(0, |xattrs| xattrs.size());
    (inode + head).next_multiple_of(CHUNK_INDEX)
}

/// Places data behind its inode, if there is a slot from which it ends in the block in which it
/// starts. Otherwise it needs blocks of its own.
fn behind(start: u64, head: u64, place: &mut Place) -> (u64, u64) {
    let fits = |inode: &u64| (inode + head) % BLOCK + place.size <= BLOCK;
    let slots = (0..BLOCK / SLOT).map(|slot| start + slot * SLOT);
    match slots.into_iter().find(fits) {
        Some(inode) => {
            place.data = Data::Inline;
            (inode, inode + head + place.size)
        }
        None => (start, start + head),
    }
}

/// The entries of a directory in their order on disk, with `.` and `..` among them.
pub(super) struct Entries<'a> {
    pub(super) list: Vec<(&'a [u8], NodeId)>,
}

// === impl Entries ===

impl<'a> Entries<'a> {
    pub(super) fn new(directory: &'a Directory, own: NodeId, parent: NodeId) -> Self {
        let mut list = Vec::with_capacity(directory.children.len() + 2);
        let mut dots = [(&b"."[..], own), (&b".."[..], parent)]
            .into_iter()
            .peekable();
        for (name, child) in &directory.children {
            while let Some(dot) = dots.next_if(|(dot, _)| **dot < **name) {
                list.push(dot);
            }
            list.push((&**name, *child));
        }
        list.extend(dots);
        Self { list }
    }

    /// Splits the entries into blocks. An entry does not cross blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &[(&'a [u8], NodeId)]> {
        let mut rest = self.list.as_slice();
        std::iter::from_fn(move || {
            let mut used = 0;
            let count = (rest.iter())
                .take_while(|(name, _)| {
                    used += DIRENT + name.len() as u64;
                    used <= BLOCK
                })
                .count();
            // A name of 255 bytes fits, so each block takes one entry at least.
            let (block, later) = rest.split_at(count);
            rest = later;
            (!block.is_empty()).then_some(block)
        })
    }

    /// Bytes on disk: whole blocks, and what the last one needs.
    pub(super) fn size(&self) -> u64 {
        let mut size = 0_u64;
        for block in self.blocks() {
            size = size.next_multiple_of(BLOCK);
            size += block
                .iter()
                .map(|(name, _)| DIRENT + name.len() as u64)
                .sum::<u64>();
        }
        size
    }
}
