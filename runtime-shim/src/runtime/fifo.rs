//! FIFOs between an exec's process and its stream.
//!
//! The runtime's shim copies between the process and the FIFOs and holds both ends of them, so
//! that neither our absence nor our slowness reaches the process as a signal.

use std::io;
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use super::Stdio;

/// Size of one message of output: large enough to be cheap, small enough to be fair.
const CHUNK: usize = 32 * 1024;

/// Name prefix of every exec's folder, and of the exec itself.
pub(crate) const EXEC_PREFIX: &str = "exec-";
/// File in an exec's folder that holds the id of its container.
const OWNER: &str = "container";

/// An exec whose streams ended with an earlier process of ours.
pub(crate) struct StaleExec {
    pub(crate) exec: String,
    pub(crate) container_id: String,
    pub(crate) dir: PathBuf,
}

/// All of them that left a folder below `parent`.
pub(crate) fn stale(parent: &Path) -> io::Result<Vec<StaleExec>> {
    let mut found = vec![];
    for entry in std::fs::read_dir(parent)? {
        let dir = entry?.path();
        let Some(exec) = dir
            .file_name()
            .and_then(|name| name.to_str())
            .map(str::to_owned)
        else {
            continue;
        };
        if exec.starts_with(EXEC_PREFIX) {
            let container_id = std::fs::read_to_string(dir.join(OWNER)).unwrap_or_default();
            found.push(StaleExec {
                exec,
                container_id,
                dir,
            });
        }
    }
    Ok(found)
}

/// The FIFOs of one exec; removed with their folder when dropped.
pub(crate) struct Fifos {
    dir: PathBuf,
    stdio: Stdio,
}

/// Which streams an exec has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
    pub(crate) tty: bool,
}

impl Fifos {
    /// Makes them in a new folder below `parent`, which says whose they are.
    pub(crate) fn make(
        parent: &Path,
        exec: &str,
        container_id: &str,
        streams: Streams,
    ) -> io::Result<Self> {
        let dir = parent.join(exec);
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join(OWNER), container_id)?;
        let mut fifos = Self {
            dir,
            stdio: Stdio {
                terminal: streams.tty,
                ..Default::default()
            },
        };
        let dir = fifos.dir.clone();
        let make = |wanted: bool, name: &str| -> io::Result<Option<PathBuf>> {
            if !wanted {
                return Ok(None);
            }
            let path = dir.join(name);
            mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)?;
            Ok(Some(path))
        };
        fifos.stdio.stdin = make(streams.stdin, "stdin")?;
        // A terminal has one output, and it must be read or the process stops.
        fifos.stdio.stdout = make(streams.stdout || streams.tty, "stdout")?;
        fifos.stdio.stderr = make(streams.stderr && !streams.tty, "stderr")?;
        Ok(fifos)
    }

    pub(crate) fn stdio(&self) -> &Stdio {
        &self.stdio
    }
}

impl Drop for Fifos {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            tracing::warn!(dir = %self.dir.display(), %error, "cannot remove FIFOs");
        }
    }
}

/// Opens the reading end. Before the process starts, so that the shim's opening of the other end
/// does not block; to be read only after, because without a writer it looks ended.
pub(crate) fn open_output(path: Option<&Path>) -> io::Result<Option<Output>> {
    let receiver = path
        .map(|path| pipe::OpenOptions::new().open_receiver(path))
        .transpose()?;
    Ok(receiver.map(|receiver| Output {
        receiver,
        buffer: BytesMut::new(),
    }))
}

/// Opens the writing end; `None` when the process has already closed the other.
pub(crate) fn open_input(path: Option<&Path>) -> io::Result<Option<pipe::Sender>> {
    let Some(path) = path else { return Ok(None) };
    match pipe::OpenOptions::new().open_sender(path) {
        Ok(sender) => Ok(Some(sender)),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The reading end of an output.
pub(crate) struct Output {
    receiver: pipe::Receiver,
    buffer: BytesMut,
}

impl Output {
    /// The next bytes; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        self.buffer.reserve(CHUNK);
        match self.receiver.read_buf(&mut self.buffer).await {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(self.buffer.split().freeze()),
        }
    }
}
