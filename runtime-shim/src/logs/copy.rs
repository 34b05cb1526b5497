//! Copying from FIFOs into logs and to attached clients, for all containers of
//! the host on one thread of its own: a slow disk holds up output and nothing
//! else.

use std::cell::RefCell;
use std::io;
use std::path::Path;

use bytes::Bytes;
use tokio::net::unix::pipe;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::entry::Stream;
use super::listen::Listeners;
use super::write::Writer;

/// Capacity of a FIFO, so one read takes all there is.
const READ_BYTES: usize = 64 << 10;
/// Reads after the end of the container: the largest FIFO an unprivileged
/// process can make. Beyond that somebody keeps writing who should not.
const LAST_READS: usize = 16;

thread_local! {
    /// Shared by all copies: output stays in it only within one call.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES]);
}

/// The copying thread; it ends with this value.
pub(super) struct Runtime {
    handle: Handle,
    _stop: oneshot::Sender<()>,
}

impl Runtime {
    pub(super) fn new() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("logs".to_owned());
        thread.spawn(move || {
            // Ends when the sender is dropped; nothing is ever sent.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self {
            handle,
            _stop: stop,
        })
    }

    /// Starts a copy; the receiver is told, by value or by drop, when it ended.
    pub(super) fn start(
        &self,
        writer: Writer,
        stdout: &Path,
        stderr: Option<&Path>,
        listeners: Listeners,
        finish: oneshot::Receiver<()>,
    ) -> io::Result<oneshot::Receiver<()>> {
        // Receivers belong to the runtime whose context they are opened in.
        let _context = self.handle.enter();
        let stdout = open(stdout)?;
        let stderr = stderr.map(open).transpose()?;
        let copy = Copy {
            writer,
            stdout: Some(stdout),
            stderr,
            listeners,
            failing: false,
        };
        let (done, ended) = oneshot::channel();
        self.handle.spawn(async move {
            copy.run(finish).await;
            // The container's owner may have gone away.
            let _ = done.send(());
        });
        Ok(ended)
    }
}

fn open(path: &Path) -> io::Result<pipe::Receiver> {
    // Refuses what is no FIFO, and never waits for a writer.
    pipe::OpenOptions::new().open_receiver(path)
}

struct Copy {
    writer: Writer,
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
    listeners: Listeners,
    failing: bool,
}

/// What one read brought.
enum Read {
    /// Nothing more for now, or for ever.
    Nothing,
    /// Output; a copy of it if somebody listens.
    Output(Option<Bytes>),
}

impl Drop for Copy {
    fn drop(&mut self) {
        // However it ended: nothing more comes.
        self.listeners.close();
    }
}

impl Copy {
    async fn run(mut self, mut finish: oneshot::Receiver<()>) {
        while self.stdout.is_some() || self.stderr.is_some() {
            let stream = tokio::select! {
                () = readable(self.stdout.as_ref()) => Stream::Stdout,
                () = readable(self.stderr.as_ref()) => Stream::Stderr,
                finished = &mut finish => {
                    if finished.is_ok() {
                        self.read_rest(Stream::Stdout).await;
                        self.read_rest(Stream::Stderr).await;
                    }
                    return;
                }
            };
            let read = self.take(stream, pipe::Receiver::try_read);
            self.pass_on(stream, read).await;
            // A container that writes without pause is always readable; the others on this
            // thread, and their ends, get their turns in between.
            tokio::task::yield_now().await;
        }
    }

    /// Hands output to those who listen; false if there was none.
    async fn pass_on(&self, stream: Stream, read: Read) -> bool {
        match read {
            Read::Nothing => false,
            Read::Output(None) => true,
            Read::Output(Some(data)) => {
                self.listeners.deliver(stream, data).await;
                true
            }
        }
    }

    async fn read_rest(&mut self, stream: Stream) {
        for _ in 0..LAST_READS {
            let read = self.take(stream, read_now);
            if !self.pass_on(stream, read).await {
                break;
            }
        }
        if self.pipe(stream).take().is_some() {
            let ended = self.writer.end(stream);
            self.judge(ended);
        }
    }

    /// Takes what one read brings.
    fn take(
        &mut self,
        stream: Stream,
        read: impl FnOnce(&pipe::Receiver, &mut [u8]) -> io::Result<usize>,
    ) -> Read {
        BUFFER.with_borrow_mut(|buffer| {
            let Some(pipe) = self.pipe(stream) else {
                return Read::Nothing;
            };
            match read(pipe, buffer) {
                Ok(0) => {
                    *self.pipe(stream) = None;
                    let ended = self.writer.end(stream);
                    self.judge(ended);
                    Read::Nothing
                }
                Ok(length) => {
                    let output = &buffer[..length];
                    let written = self.writer.output(stream, output);
                    self.judge(written);
                    let heard = !self.listeners.is_empty();
                    Read::Output(heard.then(|| Bytes::copy_from_slice(output)))
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Read::Nothing,
                Err(error) => {
                    *self.pipe(stream) = None;
                    let log = self.writer.path();
                    tracing::warn!(log = %log.display(), %error, "container output unreadable");
                    Read::Nothing
                }
            }
        })
    }

    /// A full disk costs log lines, never the container: reading goes on.
    fn judge(&mut self, written: io::Result<()>) {
        let failed = written.is_err();
        if let Err(error) = written
            && !self.failing
        {
            tracing::warn!(log = %self.writer.path().display(), %error, "container output lost");
        }
        self.failing = failed;
    }

    fn pipe(&mut self, stream: Stream) -> &mut Option<pipe::Receiver> {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}

/// Ready when there is output, or when the last of at least one writer closed.
async fn readable(pipe: Option<&pipe::Receiver>) {
    match pipe {
        // An error shows again, and is handled, on reading.
        Some(pipe) => drop(pipe.readable().await),
        None => std::future::pending().await,
    }
}

/// Reads without regard to readiness, of which the runtime may not know yet.
fn read_now(pipe: &pipe::Receiver, buffer: &mut [u8]) -> io::Result<usize> {
    nix::unistd::read(pipe, buffer).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write as _;
    use std::sync::Arc;
    use std::time::Duration;

    use nix::fcntl::{FcntlArg, fcntl};
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use tokio::sync::watch;

    use super::super::LogLimits;
    use super::super::files::Files;
    use super::*;

    /// Output that waits in the FIFO: several reads of it.
    const WAITING: usize = 8 * READ_BYTES;

    #[tokio::test]
    async fn a_chatty_container_lets_others_in_between() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("stdout");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let files = Files::new(folder.path().join("log"), 0);
        files.create_folder().unwrap();
        let limits = LogLimits {
            max_bytes: 1 << 30,
            max_files: 2,
        };
        let bell = Arc::new(watch::Sender::new(()));
        let mut rings = bell.subscribe();
        let copy = Copy {
            writer: Writer::open(files, limits, bell).unwrap(),
            stdout: Some(open(&fifo).unwrap()),
            stderr: None,
            listeners: Listeners::default(),
            failing: false,
        };
        let mut chatty = OpenOptions::new().write(true).open(&fifo).unwrap();
        fcntl(
            &chatty,
            FcntlArg::F_SETPIPE_SZ(i32::try_from(WAITING).unwrap()),
        )
        .unwrap();
        chatty.write_all(&vec![b'\n'; WAITING]).unwrap();
        drop(chatty);

        let (_keep, finish) = oneshot::channel();
        // Both in one task: the other is only polled when the copy lets go.
        let other = async {
            let mut turns = 0;
            while rings.changed().await.is_ok() {
                turns += 1;
            }
            turns
        };
        let both = async { tokio::join!(copy.run(finish), other) };
        let ((), turns) = tokio::time::timeout(Duration::from_secs(20), both)
            .await
            .unwrap();
        assert!(turns > 1, "everything was read in one go");
    }
}
