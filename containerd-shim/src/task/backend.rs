//! Who makes a container: our launcher, or runc for what that leaves out.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::Result;
use super::own::Sandbox;
use crate::runc::{Container, Settings};

/// A container's maker, in its durable record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Maker {
    /// Our launcher; the cgroup goes with the container.
    Launcher {
        /// As the spec names it.
        cgroup: Option<PathBuf>,
        /// The one that its memory counts in, if not by itself.
        #[serde(default)]
        memory_cgroup: Option<PathBuf>,
    },
    /// runc, called so.
    Runc(Settings),
}

/// A container.
pub(crate) enum Backend {
    /// Of our launcher.
    Own(Sandbox),
    /// Of runc.
    Runc(Container),
}

impl Backend {
    pub(crate) async fn start(&self) -> Result<()> {
        match self {
            Self::Own(sandbox) => sandbox.start().await,
            Self::Runc(container) => container.start().await,
        }
    }

    pub(crate) async fn kill(&self, signal: u32, all: bool) -> Result<()> {
        match self {
            Self::Own(sandbox) => sandbox.kill(signal, all).await,
            Self::Runc(container) => container.kill(signal, all).await,
        }
    }

    pub(crate) async fn pause(&self) -> Result<()> {
        match self {
            Self::Own(sandbox) => sandbox.pause().await,
            Self::Runc(container) => container.pause().await,
        }
    }

    pub(crate) async fn resume(&self) -> Result<()> {
        match self {
            Self::Own(sandbox) => sandbox.resume().await,
            Self::Runc(container) => container.resume().await,
        }
    }

    pub(crate) async fn paused(&self) -> bool {
        match self {
            Self::Own(sandbox) => sandbox.paused(),
            Self::Runc(container) => container.paused().await,
        }
    }

    pub(crate) async fn update(&self, resources: &[u8]) -> Result<()> {
        match self {
            Self::Own(sandbox) => sandbox.update(resources).await,
            Self::Runc(container) => container.update(resources).await,
        }
    }

    pub(crate) async fn pids(&self, first: i32) -> Result<Vec<i32>> {
        match self {
            Self::Own(sandbox) => sandbox.pids(first).await,
            Self::Runc(container) => container.pids().await,
        }
    }

    /// Removes it; what runs is killed if `force`.
    pub(crate) async fn delete(&self, force: bool) -> Result<()> {
        match self {
            Self::Own(sandbox) => sandbox.delete().await,
            Self::Runc(container) => container.delete(force).await,
        }
    }
}
