//! `sandman-runtime-shim cache ...`: what the operator of a host can see and change of its layers.
//!
//! The running service knows who uses a layer, so it does the work; the command speaks to it over a
//! socket in its state folder, which only root can reach. One JSON object a line, both ways.

mod client;
mod service;

use std::path::{Path, PathBuf};

use clap::Subcommand;
use serde::{Deserialize, Serialize};

pub use self::client::run;
pub(crate) use self::service::{bind, serve};

/// What is wanted of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Subcommand)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// List the layers of this host, and which images they are of.
    Ls {
        /// One JSON object a layer.
        #[arg(long)]
        json: bool,
    },
    /// Say how the store does; fails while layers are not watched by two processes.
    Status,
    /// Keep an image's layers, whoever uses them.
    Pin {
        /// As in a pod's specification; it must be on this host.
        image: String,
    },
    /// Let a pinned image's layers go when space is short.
    Unpin {
        /// As for `pin`.
        image: String,
    },
    /// Remove what nobody uses. Indexes stay, so that the layers can be read again at once.
    Prune {
        /// Remove the indexes too.
        #[arg(long)]
        all: bool,
    },
    /// Bring images here before a pod asks for them, with the host's own credentials.
    Prefetch {
        /// As in a pod's specification.
        #[arg(required = true)]
        images: Vec<String>,
    },
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    /// A layer.
    Layer(Row),
    /// A line for people.
    Text(String),
    /// It did not work; nothing follows.
    Failed(String),
    /// That was all.
    Done,
}

/// A layer, as `ls` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    digest: String,
    /// Bytes on disk.
    bytes: u64,
    /// `complete`, `partial` or `index`.
    state: String,
    pinned: bool,
    /// Sandboxes and images that use it now.
    users: usize,
    /// Seconds since the epoch.
    last_used: u64,
    images: Vec<String>,
}

fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join("layers/cache.sock")
}
