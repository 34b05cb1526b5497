//! What an image is made of, as plain data that can be compared by its hash.

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::supplies::Supplies;

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
        mode: u32,
        source: &'static str,
    },
    /// A program that the caller has built, by the name it is supplied under.
    Supplied {
        path: &'static str,
        name: &'static str,
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
    pub(crate) fn hash(&self, supplies: &Supplies) -> anyhow::Result<String> {
        let text = serde_json::to_vec(&(FORMAT, std::env::consts::ARCH, self))?;
        let mut hash = Sha256::new_with_prefix(text);
        for part in self.layers.iter().flat_map(|layer| &layer.parts) {
            if let Part::Supplied { name, .. } = part {
                hash.update(Sha256::digest(supplies.get(name)?));
            }
        }
        Ok(hex::encode(hash.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use crate::catalog::Set;
    use crate::supplies::Supplies;

    #[test]
    fn hashes_tell_recipes_apart() {
        let none = Supplies::default();
        let recipes = Set::Dev.recipes();
        let mut hashes: Vec<String> = recipes.iter().map(|r| r.hash(&none).unwrap()).collect();
        assert_eq!(hashes[0], recipes[0].hash(&none).unwrap());
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), recipes.len());

        let mut changed = recipes[0].clone();
        changed.config.cmd = &["other"];
        assert_ne!(
            changed.hash(&none).unwrap(),
            recipes[0].hash(&none).unwrap()
        );
    }

    #[test]
    fn hashes_follow_supplied_programs() {
        let recipes = Set::Conformance.recipes();
        let agnhost = recipes
            .iter()
            .find(|r| r.name.ends_with("agnhost"))
            .unwrap();
        let hash = |content: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), content).unwrap();
            let supplies = ["agnhost", "localhost.crt", "localhost.key"].map(|name| {
                let supply = format!("{name}={}", file.path().display());
                supply.parse().unwrap()
            });
            agnhost.hash(&Supplies::read(&supplies).unwrap()).unwrap()
        };
        assert_eq!(hash("one"), hash("one"));
        assert_ne!(hash("one"), hash("two"));
        assert!(agnhost.hash(&Supplies::default()).is_err());
    }
}
