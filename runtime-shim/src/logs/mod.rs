//! Container logs of this host in the CRI format: written from the containers'
//! FIFOs, rotated by size, read back as `kubectl logs` asks.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use futures::stream::BoxStream;
use sandman_protocol::v1;
use tokio::sync::{oneshot, watch};

mod copy;
mod entry;
mod files;
mod listen;
mod query;
mod read;
mod tail;
mod write;

use self::files::Files;
pub use self::listen::{ListenError, Listener, Listeners, Piece};
use self::query::Query;
use crate::eviction::{Disk, measure};

/// What the kubelet takes of a log as termination message.
const MESSAGE_LINES: u64 = 80;
const MESSAGE_BYTES: usize = 2048;

/// Names one attempt of a container.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LogId {
    /// Pod UID.
    pub uid: String,
    /// Container name.
    pub container: String,
    /// Counts from 0 over restarts.
    pub attempt: u32,
}

/// When a log file is rotated and how many are kept.
#[derive(Clone, Copy, Debug)]
pub struct LogLimits {
    /// Size of one file in bytes.
    pub max_bytes: u64,
    /// Files of one attempt, the current one included; at least 2.
    pub max_files: u32,
}

/// The log files of this host.
#[derive(Clone)]
pub struct LogStore {
    inner: Arc<Inner>,
}

struct Inner {
    root: PathBuf,
    limits: LogLimits,
    copies: copy::Runtime,
    /// Bells of the logs that are being written or followed: writer and
    /// follower live in this process, so no inotify instance is needed each.
    bells: Mutex<HashMap<LogId, Weak<watch::Sender<()>>>>,
}

impl LogStore {
    /// Files go to `data_dir/logs/<uid>/<container>/<attempt>.log`, rotated
    /// ones beside them with a sequence number at the end.
    ///
    /// # Errors
    /// The folder cannot be made, or the copying thread not be started.
    pub fn new(data_dir: &Path, limits: LogLimits) -> io::Result<Self> {
        let root = data_dir.join("logs");
        std::fs::create_dir_all(&root)?;
        let copies = copy::Runtime::new()?;
        let inner = Inner {
            root,
            limits,
            copies,
            bells: Mutex::default(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Starts to copy the FIFOs of a container into its log; `stderr` is absent
    /// with a terminal. Safe to call again after a restart of this process:
    /// what the FIFOs hold by then is read. Without a writer the copy waits.
    ///
    /// # Errors
    /// A FIFO or the log file cannot be opened.
    pub fn start(
        &self,
        id: &LogId,
        stdout: &Path,
        stderr: Option<&Path>,
    ) -> io::Result<ContainerLog> {
        let files = self.files(id)?;
        files.create_folder()?;
        let writer = write::Writer::open(files, self.inner.limits, self.bell(id))?;
        let (finish, finished) = oneshot::channel();
        let listeners = Listeners::default();
        let copies = &self.inner.copies;
        let done = copies.start(writer, stdout, stderr, listeners.clone(), finished)?;
        Ok(ContainerLog {
            finish,
            done,
            listeners,
        })
    }

    /// Reads a log. `running` is false once the container stopped *and* its
    /// [`ContainerLog::finish`] returned; a following read then ends. `id`
    /// names the attempt: `previous` of the request is the caller's to resolve.
    pub fn read(
        &self,
        id: &LogId,
        request: &v1::LogsRequest,
        running: watch::Receiver<bool>,
    ) -> BoxStream<'static, io::Result<Bytes>> {
        let bell = self.bell(id);
        read::stream(self.files(id), Query::new(request), bell, running)
    }

    /// The last output of a container for its termination message
    /// (FallbackToLogsOnError): at most 80 lines and 2048 bytes.
    pub async fn tail_for_message(&self, id: &LogId) -> String {
        let files = self.files(id);
        let read = tokio::task::spawn_blocking(move || {
            let query = Query {
                tail_lines: Some(MESSAGE_LINES),
                ..Query::default()
            };
            let mut cursor = read::Cursor::open(files?, query)?;
            let mut text = Vec::new();
            while let read::Progress::Data(chunk) = cursor.advance()? {
                text.extend_from_slice(&chunk);
                let excess = text.len().saturating_sub(MESSAGE_BYTES);
                text.drain(..excess);
            }
            Ok::<_, io::Error>(text)
        });
        match read.await {
            Ok(Ok(text)) => String::from_utf8_lossy(&text).into_owned(),
            Ok(Err(_)) | Err(_) => String::new(),
        }
    }

    /// The folder of all logs.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.inner.root
    }

    /// Removes the logs of the container's attempts before `id`'s but the one
    /// that is `previous` to it.
    ///
    /// # Errors
    /// The folder is unreadable or a file cannot be removed.
    pub async fn remove_older(&self, id: &LogId) -> io::Result<()> {
        let (files, oldest) = (self.files(id)?, id.attempt.saturating_sub(1));
        blocking(move || files.remove_attempts_before(oldest)).await
    }

    /// Disk that the logs of a container take.
    ///
    /// # Errors
    /// The folder is unreadable.
    pub(crate) async fn usage(&self, uid: &str, container: &str) -> io::Result<Disk> {
        let folder = self.folder(uid, container)?;
        blocking(move || measure::tree(&folder)).await
    }

    /// The same, for a thread that may wait for the disk.
    ///
    /// # Errors
    /// The folder is unreadable.
    pub(crate) fn usage_now(&self, uid: &str, container: &str) -> io::Result<Disk> {
        measure::tree(&self.folder(uid, container)?)
    }

    /// Removes all logs of a pod; succeeds if there are none.
    ///
    /// # Errors
    /// A file cannot be removed; call again.
    pub async fn remove(&self, uid: &str) -> io::Result<()> {
        files::check_name(uid)?;
        let folder = self.inner.root.join(uid);
        blocking(move || match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        })
        .await
    }

    fn files(&self, id: &LogId) -> io::Result<Files> {
        Ok(Files::new(self.folder(&id.uid, &id.container)?, id.attempt))
    }

    fn folder(&self, uid: &str, container: &str) -> io::Result<PathBuf> {
        files::check_name(uid)?;
        files::check_name(container)?;
        Ok(self.inner.root.join(uid).join(container))
    }

    /// The bell that rings when the log grew.
    fn bell(&self, id: &LogId) -> Arc<watch::Sender<()>> {
        let mut bells = self
            .inner
            .bells
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = bells.get(id).and_then(Weak::upgrade) {
            return bell;
        }
        bells.retain(|_, bell| bell.strong_count() > 0);
        let bell = Arc::new(watch::Sender::new(()));
        bells.insert(id.clone(), Arc::downgrade(&bell));
        bell
    }
}

/// The copying of one container's output; dropping it ends the copy where it is.
pub struct ContainerLog {
    finish: oneshot::Sender<()>,
    done: oneshot::Receiver<()>,
    listeners: Listeners,
}

impl ContainerLog {
    /// Clients that are attached to the container.
    #[must_use]
    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Call once the task is deleted and nobody writes any more: copies what
    /// the FIFOs still hold and ends.
    pub async fn finish(self) {
        // Either end may be gone already: the copy ends by itself at EOF.
        let _ = self.finish.send(());
        let _ = self.done.await;
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
}

#[cfg(test)]
mod tests;
