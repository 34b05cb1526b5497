//! Writes a tree out.

use super::{
    TreeError,
    format::{self, BLOCK, DIRENT, Data, Inode},
    layout::{self, Entries, Layout, Place},
    tree::{Body, NodeId, ROOT, Tree},
};

/// A metadata image.
#[derive(Debug)]
pub struct Image {
    /// Its bytes, whole blocks.
    pub bytes: Vec<u8>,
    /// Inodes in it.
    pub inodes: u64,
    /// Directories of which the archive says nothing but that something is in them.
    pub implicit_directories: u32,
}

// === impl Tree ===

impl Tree {
    /// Writes the image for an archive of `tar_size` bytes.
    pub fn finish(mut self, tar_size: u64) -> Result<Image, TreeError> {
        self.mark_opaque()?;
        let layout = Layout::new(&self)?;
        let device_blocks = u32::try_from(tar_size.div_ceil(BLOCK))
            .map_err(|_| TreeError::new(b"/", "an archive of 2 TiB or more"))?;
        let mut bytes = vec![0; layout.size as usize];
        let mut implicit_directories = 0;
        for (number, id) in layout.order.iter().enumerate() {
            self.write_node(&mut bytes, &layout, *id, number as u32 + 1);
            if let Body::Directory(directory) = &self.node(*id).body {
                // Of the root nobody says anything: what is on top of a stack of layers decides.
                implicit_directories += u32::from(directory.implicit && number > 0);
            }
        }
        let inodes = layout.order.len() as u64;
        let root = layout.places[ROOT as usize].number();
        format::write_super(&mut bytes, root, inodes, device_blocks);
        Ok(Image {
            bytes,
            inodes,
            implicit_directories,
        })
    }

    fn mark_opaque(&mut self) -> Result<(), TreeError> {
        for node in &mut self.nodes {
            if matches!(&node.body, Body::Directory(directory) if directory.opaque) {
                (node.xattrs.get_or_insert_default())
                    .push_opaque()
                    .map_err(|what| TreeError::new(b"an opaque directory", what))?;
            }
        }
        Ok(())
    }

    fn write_node(&self, bytes: &mut [u8], layout: &Layout, id: NodeId, number: u32) {
        let node = self.node(id);
        let place = &layout.places[id as usize];
        let (mode, _) = kind(&node.body);
        let inode = Inode {
            mode: mode | node.meta.mode,
            // Checked when they were taken.
            xattr_count: node
                .xattrs
                .as_ref()
                .and_then(|xattrs| xattrs.count())
                .unwrap_or(0),
            size: place.size,
            data: place.data,
            number,
            uid: node.meta.uid,
            gid: node.meta.gid,
            mtime: node.meta.mtime,
            mtime_nanos: node.meta.mtime_nanos,
            links: place.links,
        };
        let at = place.inode as usize;
        inode.write(&mut bytes[at..]);
        let mut end = at + format::INODE as usize;
        if let Some(xattrs) = &node.xattrs {
            xattrs.write(&mut bytes[end..]);
            end += xattrs.size() as usize;
        }
        let data = match place.data {
            Data::Plain(block) => (u64::from(block) * BLOCK) as usize,
            _ => end,
        };
        match &node.body {
            Body::Directory(directory) => {
                let entries = Entries::new(directory, id, place.parent);
                self.write_entries(&mut bytes[data..], &entries, &layout.places);
            }
            Body::Symlink(target) => bytes[data..data + target.len()].copy_from_slice(target),
            Body::File { .. } => {
                if let Data::Chunk(block) = place.data {
                    let at = layout::chunk_index(place.inode, node) as usize;
                    format::write_chunk_index(&mut bytes[at..], block);
                }
            }
            Body::Character { .. } | Body::Block { .. } | Body::Fifo | Body::Whiteout => {}
        }
    }

    fn write_entries(&self, out: &mut [u8], entries: &Entries<'_>, places: &[Place]) {
        for (number, block) in entries.blocks().enumerate() {
            let out = &mut out[number * BLOCK as usize..];
            let mut name_at = block.len() * DIRENT as usize;
            for (n, (name, id)) in block.iter().enumerate() {
                let (_, file_type) = kind(&self.node(*id).body);
                let entry = &mut out[n * DIRENT as usize..];
                let inode = places[*id as usize].number();
                format::write_dirent(entry, inode, name_at as u16, file_type);
                out[name_at..name_at + name.len()].copy_from_slice(name);
                name_at += name.len();
            }
        }
    }
}

/// Type bits of `st_mode`, and the type as directories have it.
fn kind(body: &Body) -> (u16, u8) {
    match body {
        Body::File { .. } => (0o100_000, 1),
        Body::Directory(_) => (0o040_000, 2),
        Body::Character { .. } | Body::Whiteout => (0o020_000, 3),
        Body::Block { .. } => (0o060_000, 4),
        Body::Fifo => (0o010_000, 5),
        Body::Symlink(_) => (0o120_000, 7),
    }
}
