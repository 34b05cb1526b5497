//! The `[layers]` part of the configuration.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sandman_layer_store::cache::Limits;
use sandman_layer_store::chain::Member;
use serde::Deserialize;

/// Name of the program that converts layers, beside this one.
const FILLER: &str = "sandman-layer-filler";
/// Part of the file system that the store takes at most, unless the configuration says otherwise.
const HIGH_PERCENT: u64 = 50;
/// What is left of a store that was above its limit, in percent of the limit.
const LOW_PERCENT: u64 = 90;

/// Who keeps the layers of images.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The layer store: seen once, then filled as they are read.
    Store,
    /// containerd's snapshotter: unpacked whole.
    #[default]
    Containerd,
}

/// How the layers of images are kept.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayersConfig {
    /// Who keeps them.
    pub mode: Mode,
    /// Folder of the store, on ext4, xfs or btrfs; `layers` below `data_dir` if absent.
    pub folder: Option<PathBuf>,
    /// Where `sandman-layer-keeper` listens; `layers/keeper.sock` below `state_dir` if absent.
    pub keeper_socket: Option<PathBuf>,
    /// The program `sandman-layer-filler`; the one beside this program if absent.
    pub filler: Option<PathBuf>,
    /// How bytes get to readers: `fanotify`, `fuse` or `convert`; the first of these that works here
    /// if absent. One that is named and does not work keeps the service from starting.
    pub member: Option<Member>,
    /// Seconds that a reader waits for bytes of a registry before it gets an error.
    pub read_deadline_seconds: u32,
    /// Bytes on disk above which layers go, the least recently used first; half of the file
    /// system if absent.
    pub max_bytes: Option<u64>,
}

impl Default for LayersConfig {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            folder: None,
            keeper_socket: None,
            filler: None,
            member: None,
            read_deadline_seconds: 30,
            max_bytes: None,
        }
    }
}

impl LayersConfig {
    /// Whether all values make sense; else what is wrong, with the key.
    pub(crate) fn check(&self) -> Result<(), String> {
        let paths = [
            ("folder", &self.folder),
            ("keeper_socket", &self.keeper_socket),
            ("filler", &self.filler),
        ];
        for (key, path) in paths {
            if let Some(path) = path
                && !path.is_absolute()
            {
                return Err(format!("{key}: {} is not an absolute path", path.display()));
            }
        }
        if self.member == Some(Member::Containerd) {
            return Err("member: for containerd's snapshots set mode = \"containerd\"".to_owned());
        }
        if !(1..=600).contains(&self.read_deadline_seconds) {
            return Err("read_deadline_seconds: must be between 1 and 600".to_owned());
        }
        if self.max_bytes.is_some_and(|bytes| bytes < 64 << 20) {
            return Err("max_bytes: must be at least 67108864 (64 MiB)".to_owned());
        }
        Ok(())
    }

    /// Folder of the store.
    pub(crate) fn folder(&self, data_dir: &Path) -> PathBuf {
        self.folder
            .clone()
            .unwrap_or_else(|| data_dir.join("layers"))
    }

    pub(super) fn keeper_socket(&self, state_dir: &Path) -> PathBuf {
        let default = || state_dir.join("layers/keeper.sock");
        self.keeper_socket.clone().unwrap_or_else(default)
    }

    pub(super) fn filler(&self) -> std::io::Result<PathBuf> {
        match &self.filler {
            Some(path) => Ok(path.clone()),
            None => Ok(std::env::current_exe()?.with_file_name(FILLER)),
        }
    }

    pub(super) fn read_deadline(&self) -> Duration {
        Duration::from_secs(self.read_deadline_seconds.into())
    }

    /// When something goes, for a store on a file system of these sizes.
    pub(super) fn limits(&self, capacity: u64, inodes: u64) -> Limits {
        let high_bytes = self.max_bytes.unwrap_or(capacity / 100 * HIGH_PERCENT);
        // btrfs has no number of inodes to run out of.
        let high_inodes = match inodes {
            0 => u64::MAX,
            inodes => inodes / 100 * HIGH_PERCENT,
        };
        Limits {
            high_bytes,
            low_bytes: high_bytes / 100 * LOW_PERCENT,
            high_inodes,
            low_inodes: high_inodes / 100 * LOW_PERCENT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_the_file_system_or_the_operator() {
        let mut config = LayersConfig::default();
        let limits = config.limits(1000, 0);
        assert_eq!((limits.high_bytes, limits.low_bytes), (500, 450));
        assert_eq!(limits.high_inodes, u64::MAX);
        config.max_bytes = Some(200);
        let limits = config.limits(1000, 400);
        assert_eq!((limits.high_bytes, limits.low_bytes), (200, 180));
        assert_eq!((limits.high_inodes, limits.low_inodes), (200, 180));
    }

    #[test]
    fn mistakes_are_named() {
        let parse = |text: &str| -> Result<(), String> {
            let config: LayersConfig = toml::from_str(text).map_err(|error| error.to_string())?;
            config.check()
        };
        assert_eq!(parse("mode = \"store\""), Ok(()));
        assert_eq!(parse("mode = \"store\"\nmember = \"fuse\""), Ok(()));
        for (text, word) in [
            ("mode = \"lazy\"", "containerd"),
            ("folder = \"x\"", "folder"),
            ("member = \"zfs\"", "fanotify, fuse, convert"),
            ("member = \"containerd\"", "mode"),
            ("read_deadline_seconds = 0", "read_deadline_seconds"),
            ("max_bytes = 1", "max_bytes"),
            ("maxbytes = 1", "maxbytes"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
