//! Opens the client's side of a stream.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use super::channel::{Channel, Sink};
use super::uri::Target;
use crate::task::error::{Result, TaskError};

/// The FIFO that input comes from, and a writing end of it that keeps it from ending.
pub(super) fn open_input(name: &str) -> Result<Option<(Channel, OwnedFd)>> {
    let path = match Target::parse("stdin", name)? {
        Target::None => return Ok(None),
        Target::Path(path) | Target::File(path) => path,
        Target::Binary(_) => return Err(TaskError::InvalidArgument("stdin: not a FIFO".into())),
    };
    let open = |write: bool| {
        let file = OpenOptions::new()
            .read(!write)
            .write(write)
            .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY)
            .open(&path)?;
        if file.metadata()?.file_type().is_fifo() {
            Ok(OwnedFd::from(file))
        } else {
            Err(io::Error::other("not a FIFO"))
        }
    };
    let words = || format!("stdin {}", path.display());
    let reader = open(false).map_err(TaskError::io(words()))?;
    let hold = open(true).map_err(TaskError::io(words()))?;
    let reader = Channel::new(reader).map_err(TaskError::io(words()))?;
    Ok(Some((reader, hold)))
}

/// Where output goes; none for a logger, which has the process's own pipes.
pub(super) fn open_output(field: &str, target: Target) -> Result<Option<Sink>> {
    let (path, create) = match target {
        Target::None | Target::Binary(_) => return Ok(None),
        Target::Path(path) => (path, false),
        Target::File(path) => (path, true),
    };
    open_sink(&path, create)
        .map(Some)
        .map_err(TaskError::io(format!("{field} {}", path.display())))
}

fn open_sink(path: &Path, create: bool) -> io::Result<Sink> {
    let mut options = OpenOptions::new();
    options.custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY);
    let is_fifo = match std::fs::metadata(path) {
        Ok(metadata) => metadata.file_type().is_fifo(),
        Err(error) if error.kind() == io::ErrorKind::NotFound && create => false,
        Err(error) => return Err(error),
    };
    if is_fifo {
        // Read-write: opening does not wait for a reader, and losing one is no error.
        let file = options.read(true).write(true).open(path)?;
        return Ok(Sink::Channel(Channel::new(file.into())?));
    }
    let file = options.append(true).create(create).mode(0o600).open(path)?;
    Ok(Sink::File(tokio::fs::File::from_std(file)))
}
