//! The reading end: from the right place on, across rotations, and on as the
//! log grows when it is followed.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::watch;

use super::blocking;
use super::entry::MAX_LINE;
use super::files::{FileId, Files};
use super::query::{Output, Query};
use super::tail;

const READ_BYTES: usize = 64 << 10;

/// A place in a log, and what was asked of it.
pub(super) struct Cursor {
    files: Files,
    output: Output,
    current: Option<File>,
    /// Newer files than `current`, known since the start.
    newer: VecDeque<File>,
    /// The beginning of a line whose end has not been read.
    line: Vec<u8>,
    /// The line is longer than any entry: it is dropped up to its end.
    overlong: bool,
    buffer: Vec<u8>,
}

/// What one step of reading brought.
pub(super) enum Progress {
    /// Output, never empty.
    Data(Bytes),
    /// Everything that is there was read.
    AtEnd,
    /// Nothing more will come.
    Full,
}

impl Cursor {
    pub(super) fn open(files: Files, query: Query) -> io::Result<Self> {
        let mut newer: VecDeque<File> = files.open_all()?.into();
        if let Some(lines) = query.tail_lines {
            let (index, offset) = tail::start(newer.make_contiguous(), lines)?;
            newer.drain(..index);
            if let Some(file) = newer.front_mut() {
                file.seek(SeekFrom::Start(offset))?;
            }
        }
        let current = newer.pop_front();
        Ok(Self {
            files,
            output: Output::new(query),
            current,
            newer,
            line: Vec::new(),
            overlong: false,
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Reads on until there is some output or nothing more to read.
    pub(super) fn advance(&mut self) -> io::Result<Progress> {
        let mut out = Vec::new();
        loop {
            if self.output.is_full() {
                return Ok(if out.is_empty() {
                    Progress::Full
                } else {
                    Progress::Data(out.into())
                });
            }
            let length = match &mut self.current {
                Some(file) => file.read(&mut self.buffer)?,
                None => 0,
            };
            if length > 0 {
                self.take(length, &mut out);
            } else if !self.next_file()? {
                return Ok(if out.is_empty() {
                    Progress::AtEnd
                } else {
                    Progress::Data(out.into())
                });
            }
            if out.len() >= READ_BYTES {
                return Ok(Progress::Data(out.into()));
            }
        }
    }

    /// Goes on to the next file at the end of one; false at the end of the last.
    fn next_file(&mut self) -> io::Result<bool> {
        if self.newer.is_empty() {
            let next = match &self.current {
                Some(file) => self.files.open_after(FileId::of(file)?)?,
                None => self.files.open_all()?.into_iter().next(),
            };
            let Some(next) = next else { return Ok(false) };
            self.newer.push_back(next);
            // Lines may have come between the end that was read and the
            // rotation: now that nobody writes there any more, look again.
            if self.current.is_some() {
                return Ok(true);
            }
        }
        self.current = self.newer.pop_front();
        // Lines do not span files; a torn one stays torn.
        self.line.clear();
        self.overlong = false;
        Ok(true)
    }

    fn take(&mut self, length: usize, out: &mut Vec<u8>) {
        let mut rest = &self.buffer[..length];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (head, tail) = rest.split_at(end);
            rest = &tail[1..];
            if self.overlong {
                self.overlong = false;
            } else if self.line.is_empty() {
                self.output.line(head, out);
            } else {
                self.line.extend_from_slice(head);
                self.output.line(&self.line, out);
            }
            self.line.clear();
            if self.output.is_full() {
                return;
            }
        }
        if self.overlong || self.line.len() + rest.len() > MAX_LINE {
            self.overlong = true;
            self.line.clear();
        } else {
            self.line.extend_from_slice(rest);
        }
    }
}

/// A log as a stream, ended when all is read and nothing more can come.
pub(super) fn stream(
    files: io::Result<Files>,
    query: Query,
    bell: Arc<watch::Sender<()>>,
    running: watch::Receiver<bool>,
) -> BoxStream<'static, io::Result<Bytes>> {
    let follow = query.follow;
    let ring = bell.subscribe();
    let start = async move {
        let opened = blocking(move || Cursor::open(files?, query)).await;
        let first = match opened {
            Ok(cursor) => Ok(Reader {
                cursor,
                follow,
                ring,
                running,
                _bell: bell,
            }),
            Err(error) => Err(error),
        };
        stream::unfold(Some(first), |reader| async move {
            match reader? {
                Ok(reader) => reader.next().await,
                Err(error) => Some((Err(error), None)),
            }
        })
    };
    stream::once(start).flatten().boxed()
}

struct Reader {
    cursor: Cursor,
    follow: bool,
    ring: watch::Receiver<()>,
    running: watch::Receiver<bool>,
    // Keeps the bell that the writer will use.
    _bell: Arc<watch::Sender<()>>,
}

type Step = Option<(io::Result<Bytes>, Option<io::Result<Reader>>)>;

impl Reader {
    async fn next(mut self) -> Step {
        loop {
            // Both are looked at before reading: what changes meanwhile shows after it.
            self.ring.mark_unchanged();
            let running = *self.running.borrow_and_update();
            let mut cursor = self.cursor;
            let stepped = blocking(move || {
                let progress = cursor.advance()?;
                Ok((cursor, progress))
            });
            let (cursor, progress) = match stepped.await {
                Ok(stepped) => stepped,
                Err(error) => return Some((Err(error), None)),
            };
            self.cursor = cursor;
            match progress {
                Progress::Data(data) => return Some((Ok(data), Some(Ok(self)))),
                Progress::Full => return None,
                Progress::AtEnd if !self.follow || !running => return None,
                Progress::AtEnd => {}
            }
            tokio::select! {
                rung = self.ring.changed() => drop(rung),
                changed = self.running.changed() => {
                    // Whoever knew of the container is gone: read once more and end.
                    self.follow &= changed.is_ok();
                }
            }
        }
    }
}
