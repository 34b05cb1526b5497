//! The one task that writes to a connection.
//!
//! Answers to pings and new streams go first; data waits in order behind them and is
//! gathered into large frames while the client is slower than the handlers.

use std::{io, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _, WriteHalf},
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{Frame, Framing, Item, MAX_FRAME, Queue, framing::Batch};
use crate::activity::Activity;

/// How writing ended.
pub(crate) enum WriterEnd<IO> {
    /// The last frames are handed to the transport, which is still open.
    Finished(Closing<IO>),
    /// The transport takes nothing more. Reported at once, but the queue lives on, so
    /// that handlers do not see the loss before the session wants it.
    Failed(io::Error, Drain),
    /// The session dropped its handle.
    Abandoned,
}

pub(crate) struct Writer<IO> {
    io: WriteHalf<IO>,
    framing: Framing,
    queue: Queue,
    batch: Batch,
    /// Budget of the data in `batch`.
    permits: Vec<OwnedSemaphorePermit>,
    /// Silence after which a ping is sent.
    ping: Option<Duration>,
    last_write: Instant,
    activity: Activity,
    /// Cancelled once the client is gone: everything is taken and dropped.
    discard: CancellationToken,
}

enum Next {
    Answer(Frame),
    Item(Item),
    Ping,
    Abandoned,
}

impl<IO: AsyncWrite> Writer<IO> {
    pub(crate) fn new(
        io: WriteHalf<IO>,
        framing: Framing,
        queue: Queue,
        ping: Option<Duration>,
        activity: Activity,
        discard: CancellationToken,
    ) -> Self {
        Self {
            io,
            framing,
            queue,
            batch: Batch::default(),
            permits: Vec::new(),
            ping,
            last_write: Instant::now(),
            activity,
            discard,
        }
    }

    /// Writes until the last frames are out, or the transport fails.
    pub(crate) async fn run(mut self) -> WriterEnd<IO> {
        let discard = self.discard.clone();
        let end = tokio::select! {
            biased;
            () = discard.cancelled() => Err(io::ErrorKind::BrokenPipe.into()),
            end = self.write_all() => end,
        };
        match end {
            Ok(true) => {
                self.queue.refuse_data();
                WriterEnd::Finished(Closing { writer: self })
            }
            Ok(false) => WriterEnd::Abandoned,
            Err(error) => WriterEnd::Failed(error, Drain { queue: self.queue }),
        }
    }

    /// Whether the last frames were written.
    async fn write_all(&mut self) -> io::Result<bool> {
        loop {
            let finished = match self.next().await {
                Next::Answer(frame) => {
                    self.framing.encode(frame, &mut self.batch);
                    false
                }
                Next::Ping => {
                    self.framing.encode(Frame::Ping, &mut self.batch);
                    // SPDY has nothing to send here: count the silence from now on.
                    self.last_write = Instant::now();
                    false
                }
                Next::Item(item) => self.gather(item),
                Next::Abandoned => return Ok(false),
            };
            while let Some(mut write) = self.batch.next_write() {
                self.io.write_all_buf(&mut write).await?;
            }
            self.io.flush().await?;
            self.last_write = Instant::now();
            if !self.permits.is_empty() {
                self.activity.touch();
                self.permits.clear();
            }
            if finished {
                return Ok(true);
            }
        }
    }

    async fn next(&mut self) -> Next {
        let silence = self.ping.map(|after| self.last_write + after);
        let ping = async {
            match silence {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Some(frame) = self.queue.answers.recv() => Next::Answer(frame),
            item = self.queue.items.recv() => item.map_or(Next::Abandoned, Next::Item),
            () = ping => Next::Ping,
        }
    }

    /// Encodes an item and what waits behind it, up to one large frame. Returns whether
    /// the last frames are among it.
    fn gather(&mut self, first: Item) -> bool {
        let mut gathered = 0;
        let mut run = Run::default();
        let mut next = Some(first);
        while let Some(item) = next {
            match item {
                Item::Data {
                    stream,
                    payload,
                    permit,
                } => {
                    if run.stream != stream || run.length + payload.len() > MAX_FRAME {
                        run.encode(false, &mut self.framing, &mut self.batch);
                        run.stream = stream;
                    }
                    gathered += payload.len();
                    run.length += payload.len();
                    run.payload.push(payload);
                    self.permits.push(permit);
                }
                Item::End { stream } => {
                    if run.stream != stream {
                        run.encode(false, &mut self.framing, &mut self.batch);
                        run.stream = stream;
                    }
                    run.encode(true, &mut self.framing, &mut self.batch);
                }
                Item::Frame(frame) => {
                    run.encode(false, &mut self.framing, &mut self.batch);
                    self.framing.encode(frame, &mut self.batch);
                }
                Item::Finish(frames) => {
                    run.encode(false, &mut self.framing, &mut self.batch);
                    for frame in frames {
                        self.framing.encode(frame, &mut self.batch);
                    }
                    return true;
                }
            }
            next = if gathered < MAX_FRAME {
                self.queue.items.try_recv().ok()
            } else {
                None
            };
        }
        run.encode(false, &mut self.framing, &mut self.batch);
        false
    }
}

/// Pieces of one stream that become one frame.
#[derive(Default)]
struct Run {
    stream: u32,
    length: usize,
    payload: Vec<Bytes>,
}

impl Run {
    fn encode(&mut self, fin: bool, framing: &mut Framing, batch: &mut Batch) {
        if fin || self.length > 0 {
            let payload = std::mem::take(&mut self.payload);
            framing.encode(
                Frame::Data {
                    stream: self.stream,
                    payload,
                    fin,
                },
                batch,
            );
        }
        self.length = 0;
    }
}

/// A connection whose last frames are written.
pub(crate) struct Closing<IO> {
    writer: Writer<IO>,
}

impl<IO: AsyncWrite> Closing<IO> {
    /// Goes on answering pings and new streams of a SPDY client: a short command may be
    /// over before the client has opened all its streams, and it waits for each answer.
    /// After a WebSocket Close nothing may follow. Does not return while the transport
    /// works.
    pub(crate) async fn answer(&mut self) {
        let Writer {
            io,
            framing,
            queue,
            batch,
            ..
        } = &mut self.writer;
        while let Some(frame) = queue.answers.recv().await {
            if !matches!(framing, Framing::Spdy(_)) {
                continue;
            }
            framing.encode(frame, batch);
            if io.write_all_buf(batch).await.is_err() || io.flush().await.is_err() {
                return;
            }
        }
    }

    /// The transport's own goodbye.
    pub(crate) async fn shutdown(&mut self) -> io::Result<()> {
        self.writer.io.shutdown().await
    }
}

/// The queue after its writer ended. While it lives, handlers write into nothing
/// without an error; dropping it breaks their pipes.
pub(crate) struct Drain {
    queue: Queue,
}

impl Drain {
    /// Takes and drops everything. Never returns.
    pub(crate) async fn run(&mut self) {
        loop {
            tokio::select! {
                Some(_) = self.queue.answers.recv() => {}
                Some(_) = self.queue.items.recv() => {}
                else => return std::future::pending().await,
            }
        }
    }
}
