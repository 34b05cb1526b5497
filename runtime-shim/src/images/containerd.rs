//! The few containerd calls that images need, each with a deadline and within
//! one namespace: content, snapshots, diff, images and leases.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use containerd_client::services::v1 as api;
use containerd_client::services::v1::snapshots as snap;
use containerd_client::types::{Descriptor, Mount};
use prost_types::FieldMask;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// Metadata calls touch a local database.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Unpacking one layer is bounded by disk speed alone.
const APPLY_TIMEOUT: Duration = Duration::from_secs(3600);
/// A lease outlives a crash of this process by at most this.
const LEASE_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// Labels of content, snapshots and images.
pub(super) type Labels = HashMap<String, String>;

/// containerd, seen by one namespace and one lease.
#[derive(Clone)]
pub(super) struct Containerd {
    channel: Channel,
    namespace: MetadataValue<Ascii>,
    lease: Option<MetadataValue<Ascii>>,
    snapshotter: String,
}

impl Containerd {
    pub(super) fn new(
        channel: Channel,
        namespace: &str,
        snapshotter: String,
    ) -> Result<Self, String> {
        let namespace = namespace
            .parse()
            .map_err(|_| format!("containerd namespace {namespace:?} is not an ASCII name"))?;
        Ok(Self {
            channel,
            namespace,
            lease: None,
            snapshotter,
        })
    }

    pub(super) fn snapshotter(&self) -> &str {
        &self.snapshotter
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(super) fn lease_id(&self) -> Option<&str> {
        self.lease.as_ref()?.to_str().ok()
    }

    pub(super) fn request<T>(&self, message: T, timeout: Duration) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(timeout);
        let metadata = request.metadata_mut();
        metadata.insert("containerd-namespace", self.namespace.clone());
        if let Some(lease) = &self.lease {
            metadata.insert("containerd-lease", lease.clone());
        }
        request
    }

    // --- leases

    /// What is made through the returned handle survives garbage collection
    /// until [`Self::release`], or a day after a crash.
    pub(super) async fn with_lease(&self) -> Result<Self, Status> {
        let id = format!("sandman-pull-{}", uuid::Uuid::new_v4());
        let expires = jiff::Timestamp::now() + LEASE_LIFETIME;
        let labels = [(
            "containerd.io/gc.expire".to_owned(),
            format!("{expires:.0}"),
        )];
        let message = api::CreateRequest {
            id: id.clone(),
            labels: labels.into(),
        };
        let mut client = api::leases_client::LeasesClient::new(self.channel());
        client.create(self.request(message, CALL_TIMEOUT)).await?;
        let lease = id
            .parse()
            .map_err(|_| Status::internal("lease id is not ASCII"))?;
        Ok(Self {
            lease: Some(lease),
            ..self.clone()
        })
    }

    /// Ends this handle's lease. Failing to is harmless: it expires.
    pub(super) async fn release(&self) {
        let Some(id) = self.lease.as_ref().and_then(|lease| lease.to_str().ok()) else {
            return;
        };
        let message = api::DeleteRequest {
            id: id.to_owned(),
            sync: false,
        };
        let mut client = api::leases_client::LeasesClient::new(self.channel());
        if let Err(status) = client.delete(self.request(message, CALL_TIMEOUT)).await {
            tracing::debug!(lease = id, %status, "lease not deleted; it will expire");
        }
    }

    /// Holds a blob by this handle's lease, whether it is there yet or not.
    pub(super) async fn hold_blob(&self, digest: &str) -> Result<(), Status> {
        self.hold("content".to_owned(), digest).await
    }

    /// The same for a snapshot.
    pub(super) async fn hold_snapshot(&self, name: &str) -> Result<(), Status> {
        self.hold(format!("snapshots/{}", self.snapshotter), name)
            .await
    }

    async fn hold(&self, kind: String, id: &str) -> Result<(), Status> {
        let Some(lease) = self.lease_id() else {
            return Ok(());
        };
        let resource = api::Resource {
            id: id.to_owned(),
            r#type: kind,
        };
        let message = api::AddResourceRequest {
            id: lease.to_owned(),
            resource: Some(resource),
        };
        let mut client = api::leases_client::LeasesClient::new(self.channel());
        client
            .add_resource(self.request(message, CALL_TIMEOUT))
            .await
            .map(|_answer| ())
    }

    // --- content

    /// Size and labels of a blob; `None` if it is not there.
    pub(super) async fn blob_info(&self, digest: &str) -> Result<Option<api::Info>, Status> {
        let message = api::InfoRequest {
            digest: digest.to_owned(),
        };
        let mut client = api::content_client::ContentClient::new(self.channel());
        let answer = client.info(self.request(message, CALL_TIMEOUT)).await;
        Ok(absent_as_none(answer)?.and_then(|answer| answer.into_inner().info))
    }

    /// Sets labels of a blob and leaves its others.
    pub(super) async fn label_blob(&self, digest: &str, labels: Labels) -> Result<(), Status> {
        let paths = labels.keys().map(|key| format!("labels.{key}")).collect();
        let info = api::Info {
            digest: digest.to_owned(),
            labels,
            ..Default::default()
        };
        let message = api::UpdateRequest {
            info: Some(info),
            update_mask: Some(FieldMask { paths }),
        };
        let mut client = api::content_client::ContentClient::new(self.channel());
        client
            .update(self.request(message, CALL_TIMEOUT))
            .await
            .map(|_answer| ())
    }

    /// A small blob as a whole; `None` if it is not there.
    pub(super) async fn read_blob(
        &self,
        digest: &str,
        limit: u64,
    ) -> Result<Option<Bytes>, Status> {
        let Some(info) = self.blob_info(digest).await? else {
            return Ok(None);
        };
        if u64::try_from(info.size).unwrap_or(u64::MAX) > limit {
            return Err(Status::out_of_range(format!(
                "{digest} is larger than {limit} bytes"
            )));
        }
        let message = api::ReadContentRequest {
            digest: digest.to_owned(),
            ..Default::default()
        };
        let mut client = api::content_client::ContentClient::new(self.channel());
        let answer = client.read(self.request(message, CALL_TIMEOUT)).await;
        let Some(answer) = absent_as_none(answer)? else {
            return Ok(None);
        };
        let mut stream = answer.into_inner();
        let mut bytes = Vec::new();
        while let Some(part) = stream.message().await? {
            bytes.extend_from_slice(&part.data);
            if bytes.len() as u64 > limit {
                return Err(Status::out_of_range(format!(
                    "{digest} is larger than {limit} bytes"
                )));
            }
        }
        Ok(Some(bytes.into()))
    }

    /// The raw stream for writing one blob; deadlines are the caller's.
    pub(super) async fn write(
        &self,
        messages: tokio_stream::wrappers::ReceiverStream<api::WriteContentRequest>,
        timeout: Duration,
    ) -> Result<tonic::Streaming<api::WriteContentResponse>, Status> {
        let mut client = api::content_client::ContentClient::new(self.channel());
        Ok(client
            .write(self.request(messages, timeout))
            .await?
            .into_inner())
    }

    /// Drops what was written of a blob. Failing to is harmless: ingests expire.
    pub(super) async fn abort_write(&self, reference: &str) {
        let message = api::AbortRequest {
            r#ref: reference.to_owned(),
        };
        let mut client = api::content_client::ContentClient::new(self.channel());
        if let Err(status) = client.abort(self.request(message, CALL_TIMEOUT)).await {
            tracing::debug!(reference, %status, "ingest not dropped");
        }
    }

    // --- snapshots and diff

    /// Whether a committed snapshot of this name is there.
    pub(super) async fn has_snapshot(&self, name: &str) -> Result<bool, Status> {
        let message = snap::StatSnapshotRequest {
            snapshotter: self.snapshotter.clone(),
            key: name.to_owned(),
        };
        let mut client = snap::snapshots_client::SnapshotsClient::new(self.channel());
        let answer = absent_as_none(client.stat(self.request(message, CALL_TIMEOUT)).await)?;
        let info = answer.and_then(|answer| answer.into_inner().info);
        Ok(info.is_some_and(|info| info.kind() == snap::Kind::Committed))
    }

    pub(super) async fn prepare(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        let message = snap::PrepareSnapshotRequest {
            snapshotter: self.snapshotter.clone(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels: Labels::new(),
        };
        let mut client = snap::snapshots_client::SnapshotsClient::new(self.channel());
        let answer = client.prepare(self.request(message, CALL_TIMEOUT)).await?;
        Ok(answer.into_inner().mounts)
    }

    /// Turns an active snapshot into a committed one; one that is there already is as good.
    pub(super) async fn commit(&self, name: &str, key: &str) -> Result<(), Status> {
        let message = snap::CommitSnapshotRequest {
            snapshotter: self.snapshotter.clone(),
            name: name.to_owned(),
            key: key.to_owned(),
            labels: Labels::new(),
        };
        let mut client = snap::snapshots_client::SnapshotsClient::new(self.channel());
        match client.commit(self.request(message, CALL_TIMEOUT)).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::AlreadyExists => {
                self.remove_snapshot(key).await;
                Ok(())
            }
            Err(status) => Err(status),
        }
    }

    /// Removes a snapshot that no longer serves; what stays is collected with the lease.
    pub(super) async fn remove_snapshot(&self, key: &str) {
        let message = snap::RemoveSnapshotRequest {
            snapshotter: self.snapshotter.clone(),
            key: key.to_owned(),
        };
        let mut client = snap::snapshots_client::SnapshotsClient::new(self.channel());
        if let Err(status) = client.remove(self.request(message, CALL_TIMEOUT)).await {
            tracing::debug!(key, %status, "snapshot not removed; it goes with its lease");
        }
    }

    /// Unpacks a layer into mounts and returns the digest of its uncompressed form.
    pub(super) async fn apply(
        &self,
        layer: Descriptor,
        mounts: Vec<Mount>,
    ) -> Result<String, Status> {
        let message = api::ApplyRequest {
            diff: Some(layer),
            mounts,
            ..Default::default()
        };
        let mut client = api::diff_client::DiffClient::new(self.channel());
        let answer = client.apply(self.request(message, APPLY_TIMEOUT)).await?;
        Ok(answer.into_inner().applied.unwrap_or_default().digest)
    }

    // --- images

    pub(super) async fn image(&self, name: &str) -> Result<Option<api::Image>, Status> {
        let message = api::GetImageRequest {
            name: name.to_owned(),
        };
        let mut client = api::images_client::ImagesClient::new(self.channel());
        let answer = client.get(self.request(message, CALL_TIMEOUT)).await;
        Ok(absent_as_none(answer)?.and_then(|answer| answer.into_inner().image))
    }

    pub(super) async fn images(&self) -> Result<Vec<api::Image>, Status> {
        let mut client = api::images_client::ImagesClient::new(self.channel());
        let message = api::ListImagesRequest::default();
        Ok(client
            .list(self.request(message, CALL_TIMEOUT))
            .await?
            .into_inner()
            .images)
    }

    /// Makes the image record be this one.
    pub(super) async fn put_image(&self, image: api::Image) -> Result<(), Status> {
        let mut client = api::images_client::ImagesClient::new(self.channel());
        let message = api::CreateImageRequest {
            image: Some(image.clone()),
            source_date_epoch: None,
        };
        match client.create(self.request(message, CALL_TIMEOUT)).await {
            Err(status) if status.code() == Code::AlreadyExists => {}
            other => return other.map(|_answer| ()),
        }
        let message = api::UpdateImageRequest {
            image: Some(image),
            update_mask: Some(FieldMask {
                paths: vec!["target".to_owned(), "labels".to_owned()],
            }),
            source_date_epoch: None,
        };
        client
            .update(self.request(message, CALL_TIMEOUT))
            .await
            .map(|_answer| ())
    }
}

fn absent_as_none<T>(answer: Result<T, Status>) -> Result<Option<T>, Status> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}
