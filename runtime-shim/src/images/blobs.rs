//! Blobs on their way from a registry into containerd's content store: resumed
//! where an earlier attempt stopped, sized and digested before they count.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use containerd_client::services::v1::{WriteAction, WriteContentRequest, WriteContentResponse};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::containerd::{Containerd, Labels};
use super::error::PullError;
use super::flight::Locks;
use super::reference::Name;
use super::registry::Session;

/// One message to containerd; its own limit is 16 MiB.
const WRITE_BYTES: usize = 1 << 20;
/// Whole transfer of one blob.
const BLOB_TIMEOUT: Duration = Duration::from_secs(6 * 3600);
/// Broken transfers in a row without one new byte before the pull is given up;
/// the next pull of the image resumes where this one ended.
const FRUITLESS_ATTEMPTS: u32 = 3;

/// Waiting for an ingest that is locked.
const LOCKED_PAUSE: Duration = Duration::from_millis(50);
const LOCKED_LONGEST_PAUSE: Duration = Duration::from_secs(1);
const LOCKED_TIMEOUT: Duration = Duration::from_secs(30);

/// A blob that an image consists of.
#[derive(Clone, Debug)]
pub(super) struct Blob {
    pub(super) digest: String,
    pub(super) size: u64,
    /// Set when the blob is committed.
    pub(super) labels: Labels,
}

/// Name of a blob's ingest: the same for every pull from one repository, so that each can resume
/// it. Not for other repositories: what a hostile or slow one began must not be theirs to wait
/// for, or to resume.
fn reference(name: &Name, digest: &str) -> String {
    format!("sandman-{}/{}@{digest}", name.registry(), name.repository())
}

/// How a blob came to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// This repository sent it.
    Ours,
    /// Somebody else's was there first; nothing is known of what this repository has.
    Foreign,
}

/// The label by which containerd remembers where a blob came from.
fn source_label(name: &Name) -> String {
    format!("containerd.io/distribution.source.{}", name.registry())
}

/// Makes a blob present in the content store.
///
/// A blob that another repository brought here is used only after this
/// repository proved that it has it too: a digest alone opens nothing.
pub(super) async fn ensure(
    store: &Containerd,
    locks: &Locks,
    session: &Session,
    name: &Name,
    blob: &Blob,
) -> Result<(), PullError> {
    // Two images of a repository that share a blob: the second waits and then finds it there.
    let lock = locks.of(&reference(name, &blob.digest));
    let _held = lock.lock().await;
    store
        .hold_blob(&blob.digest)
        .await
        .map_err(PullError::containerd("lease"))?;
    let info = async || {
        let info = store.blob_info(&blob.digest).await;
        info.map_err(PullError::containerd("content info"))
    };
    let mut found = info().await?;
    if found.is_none() {
        if fetch(store, session, name, blob).await? == Arrival::Ours {
            return Ok(());
        }
        found = info().await?;
    }
    let Some(info) = found else {
        return Err(PullError::Containerd {
            what: "content info",
            why: format!("{} was there and vanished", blob.digest),
        });
    };
    if u64::try_from(info.size) != Ok(blob.size) {
        return Err(PullError::Malformed(format!(
            "the manifest says that {} has {} bytes, it has {}",
            blob.digest, blob.size, info.size
        )));
    }
    let label = source_label(name);
    let sources = info.labels.get(&label).map_or("", String::as_str);
    let mut labels = blob.labels.clone();
    if !sources
        .split(',')
        .any(|repository| repository == name.repository())
    {
        session.head_blob(&blob.digest).await?;
        let sources = [sources, name.repository()];
        let sources: Vec<&str> = sources
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect();
        labels.insert(label, sources.join(","));
    }
    labels.retain(|key, value| info.labels.get(key) != Some(value));
    if labels.is_empty() {
        return Ok(());
    }
    store
        .label_blob(&blob.digest, labels)
        .await
        .map_err(PullError::containerd("content labels"))
}

/// Writes a blob whose bytes are at hand.
pub(super) async fn put(
    store: &Containerd,
    name: &Name,
    blob: &Blob,
    bytes: &Bytes,
) -> Result<(), PullError> {
    let Some(mut writer) = Writer::open(store, name, blob).await? else {
        return Ok(());
    };
    let start = usize::try_from(writer.offset)
        .unwrap_or(usize::MAX)
        .min(bytes.len());
    match writer.write(bytes.slice(start..)).await {
        // Its digest proves that it is the same.
        Err(PullError::Overtaken(_)) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => writer.commit().await.map(drop),
    }
}

async fn fetch(
    store: &Containerd,
    session: &Session,
    name: &Name,
    blob: &Blob,
) -> Result<Arrival, PullError> {
    let mut fruitless = 0;
    let mut reached = None;
    loop {
        // Opened anew each time: the store alone knows how far it got.
        let Some(mut writer) = Writer::open(store, name, blob).await? else {
            return Ok(Arrival::Foreign);
        };
        if reached.is_some_and(|reached| writer.offset > reached) {
            fruitless = 0;
        }
        reached = Some(writer.offset);
        let copied = match copy(session, blob, &mut writer).await {
            Ok(()) => writer.commit().await,
            Err(error @ PullError::Unreachable { .. }) => {
                writer.close().await;
                fruitless += 1;
                if fruitless < FRUITLESS_ATTEMPTS {
                    tracing::debug!(digest = blob.digest, %error, "blob transfer broke; resuming");
                    continue;
                }
                return Err(error);
            }
            Err(error) => {
                writer.close().await;
                Err(error)
            }
        };
        if matches!(
            &copied,
            Err(PullError::Malformed(_) | PullError::Overtaken(_))
        ) {
            // Nothing of it is worth resuming.
            store.abort_write(&reference(name, &blob.digest)).await;
        }
        return match copied {
            Err(PullError::Overtaken(_)) => Ok(Arrival::Foreign),
            other => other,
        };
    }
}

async fn copy(session: &Session, blob: &Blob, writer: &mut Writer) -> Result<(), PullError> {
    if writer.offset >= blob.size {
        return Ok(());
    }
    let mut stream = session.blob(&blob.digest, writer.offset).await?;
    let mut buffer = BytesMut::with_capacity(WRITE_BYTES);
    let broken = loop {
        match stream.chunk().await {
            Ok(Some(chunk)) => {
                let received = writer.offset + (buffer.len() + chunk.len()) as u64;
                if received > blob.size {
                    return Err(PullError::Malformed(format!(
                        "{} is longer than the {} bytes its manifest says",
                        blob.digest, blob.size
                    )));
                }
                buffer.extend_from_slice(&chunk);
                if buffer.len() >= WRITE_BYTES {
                    writer.write(buffer.split().freeze()).await?;
                }
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };
    // What arrived before a break counts: the next attempt starts behind it.
    writer.write(buffer.freeze()).await?;
    match broken {
        Some(error) => Err(error),
        None if writer.offset < blob.size => Err(PullError::Unreachable {
            registry: "answer".to_owned(),
            why: format!(
                "{} ended after {} of {} bytes",
                blob.digest, writer.offset, blob.size
            ),
        }),
        None => Ok(()),
    }
}

/// An open ingest of containerd.
struct Writer {
    messages: mpsc::Sender<WriteContentRequest>,
    answers: Streaming<WriteContentResponse>,
    blob: Blob,
    reference: String,
    offset: u64,
    source: (String, String),
}

impl Writer {
    /// `None` when the blob is there already.
    async fn open(store: &Containerd, name: &Name, blob: &Blob) -> Result<Option<Self>, PullError> {
        let opened = async {
            let mut pause = LOCKED_PAUSE;
            loop {
                match Self::try_open(store, name, blob).await {
                    // The writer of a pull that was given up: containerd lets
                    // go of it soon, but tells nobody.
                    Err(status) if is_locked(&status) => {
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(LOCKED_LONGEST_PAUSE);
                    }
                    other => return other,
                }
            }
        };
        match tokio::time::timeout(LOCKED_TIMEOUT, opened).await {
            Ok(opened) => opened.map_err(PullError::containerd("content write")),
            Err(_) => Err(PullError::Containerd {
                what: "content write",
                why: format!("{} is being written by somebody else", blob.digest),
            }),
        }
    }

    async fn try_open(
        store: &Containerd,
        name: &Name,
        blob: &Blob,
    ) -> Result<Option<Self>, Status> {
        let (messages, receiver) = mpsc::channel(4);
        let reference = reference(name, &blob.digest);
        let open = WriteContentRequest {
            action: WriteAction::Stat.into(),
            r#ref: reference.clone(),
            total: signed(blob.size),
            expected: blob.digest.clone(),
            ..Default::default()
        };
        // The channel is empty and has room: this cannot wait.
        let sent = messages.send(open).await;
        sent.map_err(|_| Status::internal("content stream closed"))?;
        let answers = store
            .write(ReceiverStream::new(receiver), BLOB_TIMEOUT)
            .await;
        let first = match answers {
            Ok(mut answers) => answers.message().await.map(|answer| (answer, answers)),
            Err(status) => Err(status),
        };
        let (answer, answers) = match first {
            Ok(first) => first,
            Err(status) if status.code() == Code::AlreadyExists => return Ok(None),
            Err(status) => return Err(status),
        };
        let offset = answer.map_or(0, |answer| u64::try_from(answer.offset).unwrap_or(0));
        let source = (source_label(name), name.repository().to_owned());
        Ok(Some(Self {
            messages,
            answers,
            blob: blob.clone(),
            reference,
            offset,
            source,
        }))
    }

    async fn write(&mut self, data: Bytes) -> Result<(), PullError> {
        if data.is_empty() {
            return Ok(());
        }
        let length = data.len() as u64;
        let message = WriteContentRequest {
            action: WriteAction::Write.into(),
            r#ref: self.reference.clone(),
            total: signed(self.blob.size),
            expected: self.blob.digest.clone(),
            offset: signed(self.offset),
            data: data.into(),
            ..Default::default()
        };
        match self.exchange(message).await {
            Ok(()) => {
                self.offset += length;
                Ok(())
            }
            Err(status) if status.code() == Code::AlreadyExists => {
                Err(PullError::Overtaken(self.blob.digest.clone()))
            }
            Err(status) => Err(PullError::containerd("content write")(status)),
        }
    }

    /// containerd checks size and digest here.
    async fn commit(mut self) -> Result<Arrival, PullError> {
        let mut labels = self.blob.labels.clone();
        labels.insert(self.source.0.clone(), self.source.1.clone());
        let message = WriteContentRequest {
            action: WriteAction::Commit.into(),
            r#ref: self.reference.clone(),
            total: signed(self.blob.size),
            expected: self.blob.digest.clone(),
            offset: signed(self.offset),
            labels,
            ..Default::default()
        };
        match self.exchange(message).await {
            Err(status) if status.code() == Code::AlreadyExists => Ok(Arrival::Foreign),
            Err(status) if status.code() == Code::FailedPrecondition => {
                Err(PullError::Malformed(format!(
                    "{} failed verification: {}",
                    self.blob.digest,
                    status.message()
                )))
            }
            Err(status) => Err(PullError::containerd("content commit")(status)),
            Ok(()) => Ok(Arrival::Ours),
        }
    }

    /// Ends the stream and waits until containerd let go of the ingest, which
    /// is locked to one writer.
    async fn close(mut self) {
        drop(self.messages);
        while let Ok(Some(_)) = self.answers.message().await {}
    }

    async fn exchange(&mut self, message: WriteContentRequest) -> Result<(), Status> {
        if self.messages.send(message).await.is_err() {
            // The stream is over; its status says why.
            self.answers.message().await?;
            return Err(Status::unavailable("content stream ended"));
        }
        match self.answers.message().await? {
            Some(_) => Ok(()),
            None => Err(Status::unavailable("content stream ended")),
        }
    }
}

fn is_locked(status: &Status) -> bool {
    status.code() == Code::Unavailable && status.message().contains("locked")
}

fn signed(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ingest_belongs_to_one_repository() {
        let of = |image: &str| reference(&Name::parse(image).unwrap(), "sha256:1");
        assert_eq!(of("a.example/x:1"), of("a.example/x:2"));
        assert_ne!(of("a.example/x"), of("a.example/y"));
        assert_ne!(of("a.example/x"), of("b.example/x"));
        // One blob of a repository is not another's.
        let name = Name::parse("a.example/x").unwrap();
        assert_ne!(reference(&name, "sha256:1"), reference(&name, "sha256:2"));
    }
}
