//! What an image is made of, as plain data that can be compared by its hash.

use serde::Serialize;
use sha2::{Digest, Sha256};

/// Counts changes of this program that make other images from equal recipes.
const FORMAT: u32 = 1;

/// One image.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Recipe {
    /// Repository at the registry.
    pub(crate) name: &'static str,
    /// Tag at the registry.
    pub(crate) tag: &'static str,
    /// From the lowest up.
    pub(crate) layers: Vec<Layer>,
    /// What a runtime starts.
    pub(crate) config: Config,
}

/// One layer: its parts in the order in which they are put down.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Layer {
    /// Told in the image's history.
    pub(crate) created_by: &'static str,
    /// Later parts replace what earlier ones have put at the same path.
    pub(crate) parts: Vec<Part>,
}

/// Something that adds files to a layer. Paths are relative to the root.
#[derive(Debug, Clone, Serialize)]
pub(crate) enum Part {
    /// Debian packages with all they depend on, less what lower layers hold.
    Packages(&'static [&'static str]),
    /// An empty directory.
    Directory {
        path: &'static str,
        mode: u32,
        owner: u32,
    },
    /// A file with this text.
    File {
        path: &'static str,
        mode: u32,
        content: &'static str,
    },
    /// A symbolic link.
    Symlink {
        path: &'static str,
        target: &'static str,
    },
    /// A link to the busybox of this layer for each command in it.
    Applets { busybox: &'static str },
    /// A Rust source file, compiled to a static executable.
    Program {
        path: &'static str,
        source: &'static str,
    },
    /// A git repository with its work tree.
    Repository {
        path: &'static str,
        commits: &'static [Commit],
    },
}

/// One commit of a [`Part::Repository`].
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Commit {
    /// First line of the message.
    pub(crate) subject: &'static str,
    /// Files that it adds or replaces: path and text.
    pub(crate) files: &'static [(&'static str, &'static str)],
}

/// The runtime part of an image's configuration.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Config {
    /// `uid:gid`; empty for root.
    pub(crate) user: &'static str,
    /// `NAME=value`.
    pub(crate) env: &'static [&'static str],
    pub(crate) entrypoint: &'static [&'static str],
    pub(crate) cmd: &'static [&'static str],
    /// Empty for `/`.
    pub(crate) working_dir: &'static str,
}

impl Recipe {
    /// Name and tag, as in `sandman/busybox:1`.
    pub(crate) fn reference(&self) -> String {
        format!("{}:{}", self.name, self.tag)
    }

    /// Hex SHA-256 of all that decides what the image holds, except the versions
    /// of packages: those are whatever the distribution has on the day.
    pub(crate) fn hash(&self) -> anyhow::Result<String> {
        let text = serde_json::to_vec(&(FORMAT, std::env::consts::ARCH, self))?;
        Ok(hex::encode(Sha256::digest(text)))
    }
}

#[cfg(test)]
mod tests {
    use crate::catalog;

    #[test]
    fn hashes_tell_recipes_apart() {
        let recipes = catalog::all();
        let mut hashes: Vec<String> = recipes.iter().map(|r| r.hash().unwrap()).collect();
        assert_eq!(hashes[0], recipes[0].hash().unwrap());
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), recipes.len());

        let mut changed = recipes[0].clone();
        changed.config.cmd = &["other"];
        assert_ne!(changed.hash().unwrap(), recipes[0].hash().unwrap());
    }
}
