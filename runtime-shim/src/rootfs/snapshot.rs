//! [`RootFs`] over containerd's snapshot service.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use containerd_client::services::v1::PluginsRequest;
use containerd_client::services::v1::introspection_client::IntrospectionClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    ListSnapshotsRequest, PrepareSnapshotRequest, PrepareSnapshotResponse, RemoveSnapshotRequest,
    UsageRequest, ViewSnapshotRequest,
};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::accounts::AccountCache;
use super::{Root, RootFs, view};
use crate::eviction::Disk;
use crate::images::Image;
use crate::runtime::{NAMESPACE, RuntimeError};
use crate::spec::Accounts;

/// Preparing and removing touch directories and a database, with luck in a millisecond; a
/// starved disk takes its time.
const DEADLINE: Duration = Duration::from_secs(60);

/// Keeps containerd's garbage collector away between the making of a snapshot and of the
/// container that refers to it. It is removed by name, so the label may stay.
const GC_ROOT: &str = "containerd.io/gc.root";

/// Pod whose volume a snapshot is.
const VOLUME_OF: &str = "sandman.dev/volume-of";

/// Snapshots of one snapshotter.
pub struct Snapshots {
    channel: Channel,
    snapshotter: String,
    view_dir: PathBuf,
    accounts: AccountCache,
}

impl Snapshots {
    /// `state_dir` holds mount points that exist for moments.
    #[must_use]
    pub fn new(channel: Channel, snapshotter: &str, state_dir: &Path) -> Self {
        let view_dir = state_dir.join("view");
        if let Err(error) = view::clear(&view_dir) {
            // It keeps layers from being removed, and nothing else.
            tracing::warn!(dir = %view_dir.display(), %error, "cannot remove leftover mounts");
        }
        Self {
            channel,
            snapshotter: snapshotter.to_owned(),
            view_dir,
            accounts: AccountCache::default(),
        }
    }

    fn client(&self) -> SnapshotsClient<Channel> {
        SnapshotsClient::new(self.channel.clone())
    }

    fn request<T>(message: T) -> Result<Request<T>, Status> {
        let mut request = Request::new(message);
        let namespace = NAMESPACE
            .parse()
            .map_err(|_| Status::internal("namespace is not a header value"))?;
        request
            .metadata_mut()
            .insert("containerd-namespace", namespace);
        request.set_timeout(DEADLINE);
        Ok(request)
    }

    async fn try_prepare(
        &self,
        key: &str,
        chain_id: &str,
    ) -> Result<PrepareSnapshotResponse, Status> {
        let now = jiff::Timestamp::now().to_string();
        let call = PrepareSnapshotRequest {
            snapshotter: self.snapshotter.clone(),
            key: key.to_owned(),
            parent: chain_id.to_owned(),
            labels: HashMap::from([(GC_ROOT.to_owned(), now)]),
        };
        Ok(self
            .client()
            .prepare(Self::request(call)?)
            .await?
            .into_inner())
    }
}

#[async_trait]
impl RootFs for Snapshots {
    async fn prepare(&self, key: &str, image: &Image) -> Result<Root, RuntimeError> {
        let answer = match self.try_prepare(key, &image.chain_id).await {
            Err(status) if status.code() == Code::AlreadyExists => {
                self.remove(key).await?;
                self.try_prepare(key, &image.chain_id).await?
            }
            other => other?,
        };
        Ok(Root {
            mounts: answer.mounts,
            snapshot: Some(key.to_owned()),
        })
    }

    /// The mounts are descriptions: nothing was mounted here.
    async fn handed_over(&self, _: &str) {}

    async fn remove(&self, key: &str) -> Result<(), RuntimeError> {
        let call = RemoveSnapshotRequest {
            snapshotter: self.snapshotter.clone(),
            key: key.to_owned(),
        };
        match self.client().remove(Self::request(call)?).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(status.into()),
        }
    }

    async fn mount_image(
        &self,
        uid: &str,
        name: &str,
        image: &Image,
        point: &Path,
    ) -> Result<(), RuntimeError> {
        // A dot is in no id of a container.
        let key = format!("{uid}.volume.{name}");
        self.remove(&key).await?;
        let call = ViewSnapshotRequest {
            snapshotter: self.snapshotter.clone(),
            key,
            parent: image.chain_id.clone(),
            labels: HashMap::from([
                (GC_ROOT.to_owned(), jiff::Timestamp::now().to_string()),
                (VOLUME_OF.to_owned(), uid.to_owned()),
            ]),
        };
        let answer = self.client().view(Self::request(call)?).await?;
        let (root, point) = (answer.into_inner().mounts, point.to_owned());
        let mounted = tokio::task::spawn_blocking(move || view::mount_at(&root, &point));
        mounted
            .await
            .map_err(|error| RuntimeError::Failed(error.to_string()))?
            .map_err(|error| RuntimeError::Failed(format!("mounting the image: {error}")))
    }

    async fn remove_images(&self, uid: &str) -> Result<(), RuntimeError> {
        let call = ListSnapshotsRequest {
            snapshotter: self.snapshotter.clone(),
            filters: vec![format!("labels.{VOLUME_OF:?}=={uid}")],
        };
        let mut list = self.client().list(Self::request(call)?).await?.into_inner();
        let mut names = Vec::new();
        while let Some(part) = list.message().await? {
            names.extend(part.info.into_iter().map(|info| info.name));
        }
        for name in names {
            self.remove(&name).await?;
        }
        Ok(())
    }

    async fn usage(&self, key: &str) -> Result<Disk, RuntimeError> {
        let call = UsageRequest {
            snapshotter: self.snapshotter.clone(),
            key: key.to_owned(),
        };
        match self.client().usage(Self::request(call)?).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                Ok(Disk {
                    bytes: u64::try_from(answer.size).unwrap_or(0),
                    inodes: u64::try_from(answer.inodes).unwrap_or(0),
                })
            }
            Err(status) if status.code() == Code::NotFound => Ok(Disk::default()),
            Err(status) => Err(status.into()),
        }
    }

    async fn folder(&self) -> Option<PathBuf> {
        let filter = format!(
            "type==io.containerd.snapshotter.v1,id=={}",
            self.snapshotter
        );
        let call = PluginsRequest {
            filters: vec![filter],
        };
        let plugins = IntrospectionClient::new(self.channel.clone())
            .plugins(Self::request(call).ok()?)
            .await
            .ok()?;
        let plugin = plugins.into_inner().plugins.into_iter().next()?;
        plugin.exports.get("root").map(PathBuf::from)
    }

    async fn accounts(&self, image: &Image, root: &Root) -> Result<Accounts, RuntimeError> {
        if let Some(known) = self.accounts.get(&image.chain_id) {
            return Ok(known);
        }
        let (root, view_dir) = (root.mounts.clone(), self.view_dir.clone());
        let read = tokio::task::spawn_blocking(move || {
            let root = view::open(&root, &view_dir)?;
            super::accounts::read(&root)
        });
        let accounts = read
            .await
            .map_err(|error| RuntimeError::Failed(error.to_string()))?
            .map_err(|error| {
                RuntimeError::Failed(format!("reading the image's accounts: {error}"))
            })?;
        self.accounts.put(&image.chain_id, &accounts);
        Ok(accounts)
    }

    /// Snapshots are unpacked whole.
    fn on_unsealed_layers(&self) -> Vec<String> {
        Vec::new()
    }
}
