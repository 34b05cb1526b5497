//! The files of one layer, in memory, and their tar archive.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use anyhow::{Context, bail};
use tar::{Builder, EntryType, Header};

/// Modification time of everything made here: 1 January 2026, in UTC. Equal
/// recipes give equal layers, byte for byte.
pub(crate) const EPOCH: u64 = 1_767_225_600;
/// [`EPOCH`] as images write it.
pub(crate) const EPOCH_TEXT: &str = "2026-01-01T00:00:00Z";

/// Largest file taken from a package.
const MAX_FILE: u64 = 1 << 30;

/// Files by path, without leading or trailing slash.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    nodes: BTreeMap<String, Node>,
}

#[derive(Debug, Clone)]
struct Node {
    kind: Kind,
    mode: u32,
    uid: u64,
    gid: u64,
    mtime: u64,
}

#[derive(Debug, Clone)]
enum Kind {
    Directory,
    File(Vec<u8>),
    Symlink(String),
    HardLink(String),
}

impl Tree {
    /// Puts an empty directory down.
    pub(crate) fn directory(&mut self, path: &str, mode: u32, owner: u32) {
        self.put(path, Kind::Directory, mode, owner);
    }

    /// Puts a file of root's down.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: Vec<u8>) {
        self.put(path, Kind::File(content), mode, 0);
    }

    /// Puts a symbolic link down.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) {
        self.put(path, Kind::Symlink(target.to_owned()), 0o777, 0);
    }

    fn put(&mut self, path: &str, kind: Kind, mode: u32, owner: u32) {
        let owner = u64::from(owner);
        self.insert(
            path,
            Node {
                kind,
                mode,
                uid: owner,
                gid: owner,
                mtime: EPOCH,
            },
        );
    }

    fn insert(&mut self, path: &str, node: Node) {
        // A layer that lacks a parent would leave its mode to the unpacker.
        let mut end = 0;
        while let Some(slash) = path[end..].find('/') {
            end += slash;
            let parent = Node {
                kind: Kind::Directory,
                mode: 0o755,
                uid: 0,
                gid: 0,
                mtime: EPOCH,
            };
            self.nodes.entry(path[..end].to_owned()).or_insert(parent);
            end += 1;
        }
        self.nodes.insert(path.to_owned(), node);
    }

    /// The content of the file at `path`.
    pub(crate) fn content(&self, path: &str) -> Option<&[u8]> {
        match &self.nodes.get(path)?.kind {
            Kind::File(content) => Some(content),
            Kind::HardLink(target) => self.content(target),
            _ => None,
        }
    }

    /// Puts the members of a tar archive down, each at the path that `place`
    /// gives for it; `None` leaves it out.
    pub(crate) fn unpack(
        &mut self,
        archive: impl Read,
        place: impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<()> {
        for entry in tar::Archive::new(archive).entries()? {
            let mut entry = entry?;
            let name = text(&entry.path_bytes())?;
            let Some(path) = place(&name) else { continue };
            let header = entry.header();
            let (mode, uid, gid, mtime) = (
                header.mode()? & 0o7777,
                header.uid()?,
                header.gid()?,
                header.mtime()?,
            );
            let target = || -> anyhow::Result<String> {
                text(&entry.link_name_bytes().context("a link without a target")?)
            };
            let kind = match header.entry_type() {
                EntryType::Directory => Kind::Directory,
                EntryType::Regular => {
                    let size = entry.size();
                    if size > MAX_FILE {
                        bail!("{name}: {size} bytes is too large for a test image");
                    }
                    let mut content = Vec::with_capacity(usize::try_from(size)?);
                    entry.read_to_end(&mut content)?;
                    Kind::File(content)
                }
                EntryType::Symlink => Kind::Symlink(target()?),
                EntryType::Link => {
                    let target = target()?;
                    Kind::HardLink(place(&target).with_context(|| format!("{name}: {target}"))?)
                }
                other => bail!("{name}: members of type {other:?} are not supported"),
            };
            self.insert(
                &path,
                Node {
                    kind,
                    mode,
                    uid,
                    gid,
                    mtime,
                },
            );
        }
        Ok(())
    }

    /// Writes the tar archive: parents before children, and links after all
    /// that they may refer to.
    pub(crate) fn write(&self, output: impl Write) -> anyhow::Result<()> {
        let mut builder = Builder::new(output);
        let hard_link = |node: &Node| matches!(node.kind, Kind::HardLink(_));
        for (path, node) in self.nodes.iter().filter(|(_, node)| !hard_link(node)) {
            node.append(&mut builder, path)
                .with_context(|| path.clone())?;
        }
        for (path, node) in self.nodes.iter().filter(|(_, node)| hard_link(node)) {
            node.append(&mut builder, path)
                .with_context(|| path.clone())?;
        }
        builder.into_inner()?.flush()?;
        Ok(())
    }
}

impl Node {
    fn append(&self, builder: &mut Builder<impl Write>, path: &str) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_mode(self.mode);
        header.set_uid(self.uid);
        header.set_gid(self.gid);
        header.set_mtime(self.mtime);
        header.set_size(0);
        match &self.kind {
            Kind::Directory => {
                header.set_entry_type(EntryType::Directory);
                builder.append_data(&mut header, format!("{path}/"), io::empty())
            }
            Kind::File(content) => {
                header.set_entry_type(EntryType::Regular);
                header.set_size(content.len() as u64);
                builder.append_data(&mut header, path, content.as_slice())
            }
            Kind::Symlink(target) => {
                header.set_entry_type(EntryType::Symlink);
                builder.append_link(&mut header, path, target)
            }
            Kind::HardLink(target) => {
                header.set_entry_type(EntryType::Link);
                builder.append_link(&mut header, path, target)
            }
        }
    }
}

/// Names in packages are UTF-8; anything else is a mistake worth seeing.
fn text(bytes: &[u8]) -> anyhow::Result<String> {
    String::from_utf8(bytes.to_vec()).context("a name that is not UTF-8")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::Tree;

    fn listed(tree: &Tree) -> Vec<String> {
        let mut bytes = Vec::new();
        tree.write(&mut bytes).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut content = String::new();
                entry.read_to_string(&mut content).unwrap();
                let target = entry.link_name().unwrap().map(|t| t.display().to_string());
                let path = entry.path().unwrap().display().to_string();
                let mode = entry.header().mode().unwrap();
                format!("{path} {mode:o} {}{content}", target.unwrap_or_default())
            })
            .collect()
    }

    #[test]
    fn parents_come_first_and_hard_links_last() {
        let mut source = Tree::default();
        source.file("z/file", 0o4755, b"text".to_vec());
        let mut bytes = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Link);
        header.set_size(0);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        bytes.append_link(&mut header, "a", "z/file").unwrap();
        source
            .unpack(bytes.into_inner().unwrap().as_slice(), |name| {
                Some(name.to_owned())
            })
            .unwrap();
        source.symlink("b", "../x");
        source.directory("z", 0o700, 7);

        assert_eq!(
            listed(&source),
            ["b 777 ../x", "z/ 700 ", "z/file 4755 text", "a 644 z/file"]
        );
        assert_eq!(source.content("a"), Some(&b"text"[..]));
        assert_eq!(source.content("b"), None);
    }

    #[test]
    fn unpacking_places_members_and_link_targets() {
        let mut source = Tree::default();
        source.file("bin/tool", 0o755, b"x".to_vec());
        source.file("doc/tool", 0o644, b"y".to_vec());
        let mut bytes = Vec::new();
        source.write(&mut bytes).unwrap();

        let mut tree = Tree::default();
        let place = |name: &str| {
            let name = name.trim_end_matches('/');
            (!name.starts_with("doc")).then(|| format!("usr/{name}"))
        };
        tree.unpack(bytes.as_slice(), place).unwrap();
        assert_eq!(
            listed(&tree),
            ["usr/ 755 ", "usr/bin/ 755 ", "usr/bin/tool 755 x"]
        );
    }
}
