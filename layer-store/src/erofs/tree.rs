//! The tree that an archive unpacks to.

use std::{borrow::Cow, collections::BTreeMap};

use super::{
    TreeError,
    format::{BLOCK, MAX_CHUNK_BITS},
    path::{self, MAX_NAME, Meaning},
    xattr::Xattrs,
};
use crate::tar::{Entry, Kind, Meta};

/// Links of one path that are followed, as in the kernel.
const MAX_FOLLOWED: usize = 40;
/// Longest target of a symbolic link, as in the kernel.
const MAX_TARGET: usize = 4095;
/// Of a directory that the archive implies but does not contain.
const IMPLICIT: Meta = Meta {
    mode: 0o755,
    uid: 0,
    gid: 0,
    mtime: 0,
    mtime_nanos: 0,
};

/// Place of a node in [`Tree::nodes`]. The root is the first.
pub(super) type NodeId = u32;

pub(super) const ROOT: NodeId = 0;

/// A file of the tree. It may have several names.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) body: Body,
    pub(super) meta: Meta,
    pub(super) xattrs: Option<Box<Xattrs>>,
}

/// What kinds of files have each for themselves.
#[derive(Debug)]
pub(super) enum Body {
    Directory(Directory),
    File {
        block: u32,
        size: u64,
    },
    Symlink(Box<[u8]>),
    Character {
        major: u32,
        minor: u32,
    },
    Block {
        major: u32,
        minor: u32,
    },
    Fifo,
    /// No file, but one in a layer below is hidden.
    Whiteout,
}

#[derive(Debug, Default)]
pub(super) struct Directory {
    /// In the order of their bytes, which is the order on disk.
    pub(super) children: BTreeMap<Box<[u8]>, NodeId>,
    pub(super) opaque: bool,
    pub(super) implicit: bool,
}

/// The tree so far. Later entries replace earlier ones, as they would on a disk.
#[derive(Debug)]
pub struct Tree {
    pub(super) nodes: Vec<Node>,
    max_entries: u32,
}

// === impl Tree ===

impl Tree {
    /// An empty root. More than `max_entries` files are refused.
    pub fn new(max_entries: u32) -> Self {
        let root = Body::Directory(Directory::default());
        Self {
            nodes: vec![Node {
                body: root,
                meta: IMPLICIT,
                xattrs: None,
            }],
            max_entries,
        }
    }

    /// Puts an entry into the tree.
    pub fn add(&mut self, entry: Entry) -> Result<(), TreeError> {
        let Entry {
            path,
            kind,
            meta,
            xattrs,
        } = entry;
        let refused = |what| TreeError::new(&path, what);
        self.insert(&path, kind, meta, &xattrs).map_err(refused)
    }

    fn insert(
        &mut self,
        path: &[u8],
        kind: Kind,
        meta: Meta,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<(), &'static str> {
        let mut names = path::clean(path);
        let Some(name) = names.pop() else {
            return match kind {
                Kind::Directory => self.describe(ROOT, meta, xattrs),
                _ => Err("a root that is not a directory"),
            };
        };
        check_name(name)?;
        if names
            .iter()
            .any(|name| path::meaning(name) == Meaning::Ignored)
        {
            return Ok(());
        }
        match path::meaning(name) {
            Meaning::Ignored => Ok(()),
            Meaning::Nonsense => Err("a whiteout of nothing"),
            Meaning::Opaque => {
                let parent = self.make_parent(names)?;
                self.directory(parent).opaque = true;
                Ok(())
            }
            Meaning::Whiteout(hidden) => {
                let parent = self.make_parent(names)?;
                self.whiteout(parent, hidden)
            }
            Meaning::File => self.file(names, name, kind, meta, xattrs),
        }
    }

    fn file(
        &mut self,
        parents: Vec<&[u8]>,
        name: &[u8],
        kind: Kind,
        meta: Meta,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<(), &'static str> {
        let body = match kind {
            Kind::Directory => {
                let parent = self.make_parent(parents)?;
                let id = match self.child(parent, name) {
                    Some(id) if self.is_directory(id) => id,
                    before => self.make_directory(parent, name, before)?,
                };
                self.directory(id).implicit = false;
                return self.describe(id, meta, xattrs);
            }
            Kind::Hardlink(target) => {
                let target = (self.find(&target)?).ok_or("a hard link to nothing in its layer")?;
                if self.is_directory(target) {
                    return Err("a hard link to a directory");
                }
                let parent = self.make_parent(parents)?;
                self.directory(parent).children.insert(name.into(), target);
                return Ok(());
            }
            Kind::File { offset, size } => Body::File {
                block: data_block(offset, size)?,
                size,
            },
            Kind::Symlink(target) => {
                if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
                    return Err("a symbolic link whose target is empty or too long");
                }
                Body::Symlink(target.into())
            }
            Kind::Character { major, minor } => Body::Character { major, minor },
            Kind::Block { major, minor } => Body::Block { major, minor },
            Kind::Fifo => Body::Fifo,
        };
        // A link has no permissions of its own; unpacked, it shows all of them.
        let mode = match body {
            Body::Symlink(_) => 0o777,
            _ => meta.mode,
        };
        let meta = Meta { mode, ..meta };
        let parent = self.make_parent(parents)?;
        let id = self.push(body, meta)?;
        self.describe(id, meta, xattrs)?;
        self.directory(parent).children.insert(name.into(), id);
        Ok(())
    }

    /// A whiteout is about the layers below: what this layer has itself stays, but a directory
    /// then stands for itself alone.
    fn whiteout(&mut self, parent: NodeId, name: &[u8]) -> Result<(), &'static str> {
        match self.child(parent, name) {
            Some(id) if self.is_directory(id) => self.directory(id).opaque = true,
            Some(_) => {}
            None => {
                let id = self.push(Body::Whiteout, IMPLICIT)?;
                self.directory(parent).children.insert(name.into(), id);
            }
        }
        Ok(())
    }

    /// The directory that `names` lead to; missing ones are made.
    fn make_parent(&mut self, names: Vec<&[u8]>) -> Result<NodeId, &'static str> {
        let parent = self.walk(names, true)?;
        parent.ok_or("a path through something that is not a directory")
    }

    /// The file of this path; a symbolic link at its end is not followed.
    fn find(&mut self, path: &[u8]) -> Result<Option<NodeId>, &'static str> {
        let mut names = path::clean(path);
        let Some(name) = names.pop() else {
            return Ok(Some(ROOT));
        };
        let parent = self.walk(names, false)?;
        let found = parent.and_then(|parent| self.child(parent, name));
        Ok(found.filter(|id| !matches!(self.node(*id).body, Body::Whiteout)))
    }

    /// The directory that `names` lead to from the root, if any. Symbolic links are followed
    /// within the tree, as unpackers do. Missing directories are made on demand.
    fn walk(&mut self, names: Vec<&[u8]>, make: bool) -> Result<Option<NodeId>, &'static str> {
        let mut ahead: Vec<Cow<'_, [u8]>> = names.into_iter().rev().map(Cow::Borrowed).collect();
        let mut behind = Vec::with_capacity(ahead.len());
        let mut at = ROOT;
        let mut followed = 0;
        while let Some(name) = ahead.pop() {
            if *name == *b".." {
                at = behind.pop().unwrap_or(ROOT);
                continue;
            }
            let child = self.child(at, &name);
            let next = match child.map(|id| (id, &self.node(id).body)) {
                Some((id, Body::Directory(_))) => id,
                Some((_, Body::Symlink(target))) => {
                    followed += 1;
                    if followed > MAX_FOLLOWED {
                        return Err("a path through too many symbolic links");
                    }
                    if target.starts_with(b"/") {
                        behind.clear();
                        at = ROOT;
                    }
                    let parts = path::parts(target).rev();
                    ahead.extend(parts.map(|part| Cow::Owned(part.to_vec())));
                    continue;
                }
                None | Some((_, Body::Whiteout)) if make => {
                    self.make_directory(at, &name, child)?
                }
                _ => return Ok(None),
            };
            behind.push(at);
            at = next;
        }
        Ok(Some(at))
    }

    /// Makes an implicit directory in the place of whatever was there. After a whiteout it hides
    /// what is below.
    fn make_directory(
        &mut self,
        parent: NodeId,
        name: &[u8],
        before: Option<NodeId>,
    ) -> Result<NodeId, &'static str> {
        check_name(name)?;
        let before = before.map(|id| &self.node(id).body);
        let body = Body::Directory(Directory {
            opaque: matches!(before, Some(Body::Whiteout)),
            implicit: true,
            ..Directory::default()
        });
        let id = self.push(body, IMPLICIT)?;
        self.directory(parent).children.insert(name.into(), id);
        Ok(id)
    }

    fn describe(
        &mut self,
        id: NodeId,
        meta: Meta,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<(), &'static str> {
        let xattrs = Xattrs::new(xattrs)?;
        let node = &mut self.nodes[id as usize];
        node.meta = meta;
        node.xattrs = (xattrs.size() > 0).then(|| Box::new(xattrs));
        Ok(())
    }

    fn push(&mut self, body: Body, meta: Meta) -> Result<NodeId, &'static str> {
        let id = self.nodes.len() as NodeId;
        if id >= self.max_entries {
            return Err("one file more than a layer may have");
        }
        self.nodes.push(Node {
            body,
            meta,
            xattrs: None,
        });
        Ok(id)
    }

    pub(super) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    fn child(&self, parent: NodeId, name: &[u8]) -> Option<NodeId> {
        match &self.node(parent).body {
            Body::Directory(directory) => directory.children.get(name).copied(),
            _ => None,
        }
    }

    fn is_directory(&self, id: NodeId) -> bool {
        matches!(self.node(id).body, Body::Directory(_))
    }

    /// Of a node that is one.
    fn directory(&mut self, id: NodeId) -> &mut Directory {
        match &mut self.nodes[id as usize].body {
            Body::Directory(directory) => directory,
            other => unreachable!("{other:?} is not a directory"),
        }
    }
}

fn check_name(name: &[u8]) -> Result<(), &'static str> {
    if name.len() > MAX_NAME || name.contains(&0) {
        return Err("a name that is longer than 255 bytes or contains a zero byte");
    }
    Ok(())
}

/// Block of the archive in which a file's data starts.
pub(super) fn data_block(offset: u64, size: u64) -> Result<u32, &'static str> {
    const BEYOND: &str = "data beyond the block addresses of EROFS (2 TiB)";
    let first = offset / BLOCK;
    let end = first.checked_add(size.div_ceil(BLOCK)).ok_or(BEYOND)?;
    // The highest number means a hole.
    if end >= u64::from(u32::MAX) || size > BLOCK << MAX_CHUNK_BITS {
        return Err(BEYOND);
    }
    Ok(first as u32)
}
