//! What an image is when its layers are unpacked one over the other, as the image specification
//! says: the plain way, to compare with. And what a folder is.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// A kind of file and its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File {
        size: u64,
        sha256: String,
    },
    Directory,
    Link(PathBuf),
    /// Character or block device: its numbers.
    Device(bool, u64),
    Fifo,
}

/// All that is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    /// None for a directory that no layer describes.
    pub(crate) mtime: Option<i64>,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first of the names of a file that has several.
    pub(crate) same_as: Option<PathBuf>,
}

/// Files by path, without the top.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    pub(crate) nodes: BTreeMap<PathBuf, Node>,
}

impl Tree {
    /// Fetches and unpacks an image.
    pub(crate) async fn of(
        registry: &str,
        image: &str,
        login: Option<(&str, &str)>,
    ) -> Result<Self> {
        let (_, path) = image.split_once('/').context("no registry")?;
        let (repository, tag) = path.rsplit_once(':').context("no tag")?;
        let client = reqwest::Client::new();
        let get = async |what: String| {
            let mut request = client.get(format!("{registry}/{repository}/{what}"));
            request = request.header(
                "accept",
                "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json",
            );
            if let Some((user, password)) = login {
                request = request.basic_auth(user, Some(password));
            }
            let response = request.send().await?.error_for_status()?;
            anyhow::Ok(response.bytes().await?)
        };
        let mut manifest: Value = serde_json::from_slice(&get(format!("manifests/{tag}")).await?)?;
        if let Some(first) = manifest["manifests"][0]["digest"].as_str() {
            manifest = serde_json::from_slice(&get(format!("manifests/{first}")).await?)?;
        }
        let mut tree = Self::default();
        for layer in manifest["layers"].as_array().context("no layers")? {
            let digest = layer["digest"].as_str().context("no digest")?;
            let blob = get(format!("blobs/{digest}")).await?;
            let mut archive = Vec::new();
            flate2::read::MultiGzDecoder::new(&blob[..]).read_to_end(&mut archive)?;
            tree.apply(&archive)?;
        }
        Ok(tree)
    }

    fn apply(&mut self, archive: &[u8]) -> Result<()> {
        let mut whiteouts = Vec::new();
        let mut layer = Vec::new();
        for entry in tar::Archive::new(archive).entries()? {
            let mut entry = entry?;
            let path = clean(&entry.path()?);
            let Some(name) = path.file_name().map(|name| name.as_bytes().to_vec()) else {
                continue;
            };
            let parent = path.parent().unwrap_or(Path::new("")).to_owned();
            if name == b".wh..wh..opq" {
                whiteouts.push((parent, false));
            } else if let Some(hidden) = name.strip_prefix(b".wh.") {
                let hidden = std::ffi::OsStr::from_bytes(hidden);
                whiteouts.push((parent.join(hidden), true));
            } else {
                layer.push((path.clone(), self.node(&path, &mut entry)?));
            }
        }
        // They hide what is below this layer, wherever in it they stand.
        for (path, itself) in whiteouts {
            self.nodes
                .retain(|other, _| !other.starts_with(&path) || (!itself && *other == path));
        }
        for (path, node) in layer {
            self.put(path, node);
        }
        Ok(())
    }

    fn put(&mut self, path: PathBuf, node: Node) {
        for parent in path.ancestors().skip(1) {
            let known = self.nodes.get(parent);
            let is_directory = known.is_some_and(|node| node.kind == Kind::Directory);
            if !parent.as_os_str().is_empty() && !is_directory {
                let implicit = Node {
                    kind: Kind::Directory,
                    mode: 0o755,
                    owner: (0, 0),
                    mtime: None,
                    xattrs: BTreeMap::new(),
                    same_as: None,
                };
                self.nodes.insert(parent.to_owned(), implicit);
            }
        }
        if node.kind != Kind::Directory {
            self.nodes.retain(|other, _| !other.starts_with(&path));
        }
        let node = match &node.same_as {
            Some(first) => match self.nodes.get(first) {
                Some(first) => Node {
                    same_as: node.same_as,
                    ..first.clone()
                },
                None => node,
            },
            None => node,
        };
        self.nodes.insert(path, node);
    }

    fn node(&self, path: &Path, entry: &mut tar::Entry<'_, &[u8]>) -> Result<Node> {
        let mut xattrs = BTreeMap::new();
        if let Some(extensions) = entry.pax_extensions()? {
            for extension in extensions {
                let extension = extension?;
                if let Some(name) = extension.key_bytes().strip_prefix(b"SCHILY.xattr.") {
                    xattrs.insert(name.to_vec(), extension.value_bytes().to_vec());
                }
            }
        }
        let header = entry.header().clone();
        let numbers = || -> Result<u64> {
            let (major, minor) = (header.device_major()?, header.device_minor()?);
            let (major, minor) = (major.context("major")?, minor.context("minor")?);
            Ok(device_number(major, minor))
        };
        let link = |entry: &tar::Entry<'_, &[u8]>| -> Result<PathBuf> {
            Ok(entry.link_name()?.context("no target")?.into_owned())
        };
        let mut same_as = None;
        let kind = match header.entry_type() {
            tar::EntryType::Directory => Kind::Directory,
            tar::EntryType::Symlink => Kind::Link(link(entry)?),
            tar::EntryType::Link => {
                same_as = Some(clean(&link(entry)?));
                Kind::Directory
            }
            tar::EntryType::Char => Kind::Device(true, numbers()?),
            tar::EntryType::Block => Kind::Device(false, numbers()?),
            tar::EntryType::Fifo => Kind::Fifo,
            kind if kind.is_file() => {
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes)?;
                content(&bytes)
            }
            other => bail!("{}: entry of type {other:?}", path.display()),
        };
        Ok(Node {
            kind,
            mode: header.mode()? & 0o7777,
            owner: (header.uid()?.try_into()?, header.gid()?.try_into()?),
            mtime: Some(header.mtime()?.try_into()?),
            xattrs,
            same_as,
        })
    }

    /// What is below a folder, mounts in it left out.
    pub(crate) fn read(top: &Path) -> Result<Self> {
        let mut tree = Self::default();
        let mut first_names = BTreeMap::new();
        let device = std::fs::metadata(top)?.dev();
        let mut folders = vec![PathBuf::new()];
        while let Some(folder) = folders.pop() {
            let mut entries =
                std::fs::read_dir(top.join(&folder))?.collect::<Result<Vec<_>, _>>()?;
            entries.sort_by_key(std::fs::DirEntry::file_name);
            for entry in entries {
                let path = folder.join(entry.file_name());
                let full = top.join(&path);
                let found = std::fs::symlink_metadata(&full)?;
                let of = found.file_type();
                let kind = if of.is_dir() {
                    if found.dev() != device {
                        continue;
                    }
                    folders.push(path.clone());
                    Kind::Directory
                } else if of.is_symlink() {
                    Kind::Link(std::fs::read_link(&full)?)
                } else if of.is_file() {
                    content(&std::fs::read(&full).with_context(|| format!("{}", path.display()))?)
                } else if of.is_fifo() {
                    Kind::Fifo
                } else {
                    Kind::Device(of.is_char_device(), found.rdev())
                };
                let mut same_as = None;
                if found.nlink() > 1 && !of.is_dir() {
                    let key = (found.dev(), found.ino());
                    same_as = first_names.get(&key).cloned();
                    first_names.entry(key).or_insert_with(|| path.clone());
                }
                let mut xattrs = BTreeMap::new();
                for name in xattr::list(&full)? {
                    let value = xattr::get(&full, &name)?.unwrap_or_default();
                    xattrs.insert(name.as_bytes().to_vec(), value);
                }
                let node = Node {
                    kind,
                    mode: found.mode() & 0o7777,
                    owner: (found.uid(), found.gid()),
                    mtime: Some(found.mtime()),
                    xattrs,
                    same_as,
                };
                tree.nodes.insert(path, node);
            }
        }
        Ok(tree)
    }

    /// What differs, the first few of it.
    pub(crate) fn differences(&self, found: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        for (path, expected) in &self.nodes {
            let shown = path.display();
            match found.nodes.get(path) {
                None => differences.push(format!("{shown} is missing")),
                Some(found) if !expected.matches(found) => {
                    differences.push(format!("{shown}: {found:?} instead of {expected:?}"));
                }
                Some(_) => {}
            }
        }
        for path in found.nodes.keys() {
            if !self.nodes.contains_key(path) {
                differences.push(format!("{} should not be there", path.display()));
            }
        }
        // Names of one file: the same groups, whichever comes first in each.
        let (mut ours, mut theirs) = (self.names(), found.names());
        ours.sort();
        theirs.sort();
        if ours != theirs {
            differences.push(format!(
                "files with several names: {theirs:?} instead of {ours:?}"
            ));
        }
        differences.truncate(10);
        differences
    }

    fn names(&self) -> Vec<Vec<&Path>> {
        let mut groups: BTreeMap<&Path, Vec<&Path>> = BTreeMap::new();
        for (path, node) in &self.nodes {
            if let Some(first) = &node.same_as {
                groups.entry(first).or_default().push(path);
            }
        }
        let complete = |(first, mut names): (_, Vec<_>)| {
            names.push(first);
            names.sort();
            names
        };
        groups.into_iter().map(complete).collect()
    }
}

impl Node {
    fn matches(&self, found: &Self) -> bool {
        self.kind == found.kind
            && (self.mode == found.mode || matches!(self.kind, Kind::Link(_)))
            && self.owner == found.owner
            && self.mtime.is_none_or(|mtime| found.mtime == Some(mtime))
            && self.xattrs == found.xattrs
    }
}

fn content(bytes: &[u8]) -> Kind {
    Kind::File {
        size: bytes.len() as u64,
        sha256: hex::encode(Sha256::digest(bytes)),
    }
}

fn clean(path: &Path) -> PathBuf {
    let normal = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        _ => None,
    };
    path.components().filter_map(normal).collect()
}

/// The kernel's number of a device that has small ones.
fn device_number(major: u32, minor: u32) -> u64 {
    (u64::from(major) << 8) | u64::from(minor)
}
