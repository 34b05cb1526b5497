//! The caller's side of a conversion.

use std::{
    fs::{self, File},
    io::{self, PipeWriter, Read, Write},
    os::unix::{fs::DirBuilderExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::signal::Signal,
};

use super::{
    ConvertError, Order,
    frame::{self, Kind, Piece},
};
use crate::{
    cache,
    digest::SpanDigest,
    index::LayerIndex,
    layout::{BLOB, INDEX, META},
};

/// Bytes on their way to the child; larger than a pipe's own, so that both ends wake up less often.
const PIPE: i32 = 1 << 20;
/// Largest metadata and index that are taken from a child, in bytes.
const MAX_PART: u64 = 4 << 30;

/// A conversion that is going on. Dropped, it ends and leaves nothing.
///
/// Several may run at once. All calls block.
#[derive(Debug)]
pub struct Conversion {
    order: Order,
    staging: Staging,
    child: Reaped,
    pieces: ChildStderr,
}

/// A layer that was converted and verified, and is on disk, but not in its place yet.
#[derive(Debug)]
pub struct Converted {
    index: LayerIndex,
    staging: Staging,
}

// === impl Conversion ===

impl Conversion {
    /// Starts `helper` (`sandman-layer-filler`) on a new folder `staging`, whose parent exists on
    /// the file system where the layer is to stay.
    ///
    /// The blob is to be written to what comes back, which is then to be dropped. A write that
    /// fails with [`io::ErrorKind::BrokenPipe`] means that [`Self::finish`] knows why.
    pub fn start(
        helper: &Path,
        order: Order,
        staging: PathBuf,
    ) -> Result<(Self, PipeWriter), ConvertError> {
        Self::try_start(helper, &order, staging)
            .map_err(|what| ConvertError::Host {
                layer: order.layer,
                what,
            })
            .map(|(staging, child, pieces, input)| {
                let conversion = Self {
                    order,
                    staging,
                    child,
                    pieces,
                };
                (conversion, input)
            })
    }

    fn try_start(
        helper: &Path,
        order: &Order,
        staging: PathBuf,
    ) -> Result<(Staging, Reaped, ChildStderr, PipeWriter), String> {
        let order = serde_json::to_string(order).map_err(|error| error.to_string())?;
        let staging = Staging::new(staging)?;
        let tar = staging.create(BLOB)?;
        let (output, input) = io::pipe().map_err(|error| format!("no pipe: {error}"))?;
        // Refused when many pipes are open; only slower then.
        let _ = fcntl(&input, FcntlArg::F_SETPIPE_SZ(PIPE));
        let mut child = Command::new(helper)
            .args(["convert", &order])
            .env_clear()
            .current_dir("/")
            .stdin(output)
            .stdout(tar)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", helper.display()))?;
        let pieces = child.stderr.take().ok_or("the converter has no output")?;
        Ok((staging, Reaped(child), pieces, input))
    }

    /// The same for a blob that can simply be read.
    pub fn run(
        helper: &Path,
        order: Order,
        staging: PathBuf,
        mut blob: impl Read,
    ) -> Result<Converted, ConvertError> {
        let layer = order.layer;
        let (conversion, mut input) = Self::start(helper, order, staging)?;
        let mut piece = vec![0; 256 << 10];
        loop {
            match blob.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => {
                    if input.write_all(&piece[..count]).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(ConvertError::WrongBlob {
                        layer,
                        found: format!("reading it failed: {error}"),
                    });
                }
            }
        }
        drop(input);
        conversion.finish()
    }

    /// The process that works on it.
    pub fn id(&self) -> u32 {
        self.child.0.id()
    }

    /// Waits for the end. The input must have been dropped.
    pub fn finish(mut self) -> Result<Converted, ConvertError> {
        self.collect()?;
        let layer = self.order.layer;
        let index = (self.verify()).map_err(|what| ConvertError::Host { layer, what })?;
        Ok(Converted {
            index,
            staging: self.staging,
        })
    }

    /// Takes everything that the child has to say, and its end.
    fn collect(&mut self) -> Result<(), ConvertError> {
        let layer = self.order.layer;
        let host = |what| ConvertError::Host { layer, what };
        let mut meta = Part::new(self.staging.create(META).map_err(host)?);
        let mut index = Part::new(self.staging.create(INDEX).map_err(host)?);
        let mut outcome = None;
        let mut said = String::new();
        loop {
            let piece = frame::read_piece(&mut self.pieces);
            match piece.unwrap_or_else(|error| Piece::Text(error.to_string())) {
                Piece::Of(Kind::Meta, bytes) => meta.write(&bytes).map_err(host)?,
                Piece::Of(Kind::Index, bytes) => index.write(&bytes).map_err(host)?,
                Piece::Of(Kind::Outcome, bytes) => outcome = Some(bytes),
                Piece::Text(text) => {
                    said = text;
                    break;
                }
                Piece::End => break,
            }
        }
        let status = self
            .child
            .0
            .wait()
            .map_err(|error| host(error.to_string()))?;
        match outcome {
            Some(outcome) if status.success() && said.is_empty() => {
                serde_json::from_slice::<Result<(), ConvertError>>(&outcome)
                    .map_err(|error| host(format!("the converter's answer is none: {error}")))?
            }
            _ => Err(ConvertError::Died {
                layer,
                how: how(status, &said),
            }),
        }
    }

    /// Checks what can be checked without the blob, and puts it on disk for good.
    fn verify(&self) -> Result<LayerIndex, String> {
        let at = |name: &str| self.staging.0.join(name);
        let index = LayerIndex::open(&at(INDEX)).map_err(|error| error.to_string())?;
        if index.layer() != self.order.layer || index.diff_id() != self.order.diff_id {
            return Err("the converter made the index of another layer".to_owned());
        }
        let io = |error: io::Error| format!("cannot keep the layer: {error}");
        let length = |name| {
            fs::metadata(at(name))
                .map(|metadata| metadata.len())
                .map_err(io)
        };
        if length(BLOB)? != index.tar_size() || length(META)? != index.meta_size() {
            return Err("the converter wrote files of other sizes than it says".to_owned());
        }
        let meta = fs::read(at(META)).map_err(io)?;
        if SpanDigest::of(&meta) != index.meta_digest() {
            return Err("the converter wrote other metadata than it says".to_owned());
        }
        for name in [BLOB, META, INDEX] {
            let file = File::open(at(name)).map_err(io)?;
            file.sync_all().map_err(io)?;
        }
        // Complete and verified: mounted without the keeper, and kept over a reboot.
        cache::seal(&self.staging.0, index.diff_id(), index.tar_size()).map_err(io)?;
        Ok(index)
    }
}

// === impl Converted ===

impl Converted {
    /// Its index.
    pub fn index(&self) -> &LayerIndex {
        &self.index
    }

    /// Where it is as long as it is not [published](Self::publish).
    pub fn folder(&self) -> &Path {
        &self.staging.0
    }

    /// Moves it to `folder`, durably. If that exists, somebody else was faster, and theirs stays.
    pub fn publish(self, folder: &Path) -> io::Result<()> {
        match fs::rename(&self.staging.0, folder) {
            Ok(()) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                ) => {}
            Err(error) => return Err(error),
        }
        match folder.parent() {
            Some(parent) => File::open(parent)?.sync_all(),
            None => Ok(()),
        }
    }
}

/// A folder that goes when this does, unless it was moved.
#[derive(Debug)]
struct Staging(PathBuf);

// === impl Staging ===

impl Staging {
    fn new(path: PathBuf) -> Result<Self, String> {
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(Self(path))
    }

    fn create(&self, name: &str) -> Result<File, String> {
        File::create_new(self.0.join(name)).map_err(|error| format!("cannot make {name}: {error}"))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Not there any more if it was moved.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A child that does not outlive its owner, and leaves no zombie.
#[derive(Debug)]
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Neither does anything to a child that was waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A file that a child fills.
struct Part {
    file: File,
    room: u64,
}

// === impl Part ===

impl Part {
    fn new(file: File) -> Self {
        Self {
            file,
            room: MAX_PART,
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.room = (self.room.checked_sub(bytes.len() as u64))
            .ok_or("the converter says more than any layer needs")?;
        self.file
            .write_all(bytes)
            .map_err(|error| format!("cannot keep the layer: {error}"))
    }
}

/// How a child ended that should not have.
fn how(status: ExitStatus, said: &str) -> String {
    let end = match status.signal() {
        Some(number) => match Signal::try_from(number) {
            Ok(signal) => format!("killed by {signal}"),
            Err(_) => format!("killed by signal {number}"),
        },
        None => format!("ended with {}", status.code().unwrap_or(-1)),
    };
    if said.is_empty() {
        end
    } else {
        format!("{end}, after {said:?}")
    }
}
