//! Both directions of one upgraded connection, from the first byte to a clean close.
//!
//! A session drives a [`Connection`] beside its handler and learns from it when the
//! client leaves; at the end it hands over the last frames, and the connection sees to
//! it that they arrive before the socket is closed.

use std::{future::Future, pin::Pin, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    activity::Activity,
    limits::Limits,
    outbound::{Drain, Frame, Framing, Outbound, Queue, Writer, WriterEnd},
    reader::Departure,
};

/// Longest wait for the transport's own goodbye (TLS close_notify, FIN).
const GOODBYE: Duration = Duration::from_secs(1);

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

pub(crate) struct Connection<IO> {
    /// Routes what the client sends; ends when nothing more comes.
    inbound: BoxFuture<Departure>,
    inbound_ended: bool,
    writer: BoxFuture<WriterEnd<IO>>,
    writer_ended: bool,
    /// Set once the writer failed: takes and drops what handlers still write.
    drain: Option<Drain>,
    discard: CancellationToken,
    outbound: Outbound,
    activity: Activity,
    /// The client left, in whatever way.
    departed: bool,
    /// The client reads nothing any more.
    lost: bool,
}

/// The sending half of a new connection, and what its writer needs.
pub(crate) struct Sending<IO> {
    pub(crate) io: tokio::io::WriteHalf<IO>,
    pub(crate) framing: Framing,
    pub(crate) queue: Queue,
    pub(crate) outbound: Outbound,
}

impl<IO: AsyncRead + AsyncWrite + Send + 'static> Connection<IO> {
    pub(crate) fn new(
        inbound: impl Future<Output = Departure> + Send + 'static,
        sending: Sending<IO>,
        activity: Activity,
        limits: &Limits,
    ) -> Self {
        let discard = CancellationToken::new();
        let Sending {
            io,
            framing,
            queue,
            outbound,
        } = sending;
        // A SPDY client is not pinged: Go's server does not either.
        let ping = limits.ping.filter(|_| !matches!(framing, Framing::Spdy(_)));
        let writer = Writer::new(io, framing, queue, ping, activity.clone(), discard.clone());
        Self {
            inbound: Box::pin(inbound),
            inbound_ended: false,
            writer: Box::pin(writer.run()),
            writer_ended: false,
            drain: None,
            discard,
            outbound,
            activity,
            departed: false,
            lost: false,
        }
    }

    /// Moves data until the client leaves, which is reported once; later calls go on
    /// moving what still can and do not return. Cancel safe.
    ///
    /// After a loss, handlers' output is dropped silently, so that a process that
    /// works off its last input does not notice.
    pub(crate) async fn departed(&mut self) -> Departure {
        loop {
            let departure = tokio::select! {
                departure = &mut self.inbound, if !self.inbound_ended => {
                    self.inbound_ended = true;
                    if matches!(departure, Departure::Lost(_)) {
                        self.lost = true;
                        self.discard.cancel();
                    }
                    departure
                }
                end = &mut self.writer, if !self.writer_ended => {
                    self.writer_ended = true;
                    self.lost = true;
                    match end {
                        WriterEnd::Failed(error, drain) => {
                            self.drain = Some(drain);
                            Departure::Lost(Some(error))
                        }
                        WriterEnd::Finished(_) | WriterEnd::Abandoned => Departure::Lost(None),
                    }
                }
                () = drain_all(&mut self.drain), if self.drain.is_some() => continue,
            };
            if !std::mem::replace(&mut self.departed, true) {
                return departure;
            }
        }
    }

    /// Sends the last frames behind all data, waits until the client has closed its
    /// side too, and closes. Returns whether the frames were handed to the transport.
    ///
    /// The wait for a slow client is unbounded if `patience` is `None`, but ends when
    /// the client leaves, when nothing moves for the idle time, or soon after
    /// `shutdown`.
    pub(crate) async fn close(
        mut self,
        frames: Vec<Frame>,
        patience: Option<Duration>,
        limits: &Limits,
        shutdown: &CancellationToken,
    ) -> bool {
        if self.lost {
            return false;
        }
        self.outbound.finish(frames);
        let mut deadline = patience.map(|patience| Instant::now() + patience);
        if self.departed {
            deadline.get_or_insert(Instant::now() + limits.close_barrier);
        }
        let mut hurried = false;
        let end = loop {
            tokio::select! {
                end = &mut self.writer => break end,
                departure = &mut self.inbound, if !self.inbound_ended => {
                    self.inbound_ended = true;
                    if !matches!(departure, Departure::Closed) {
                        return false;
                    }
                    // It may still read what comes before our Close, but not for long.
                    deadline.get_or_insert(Instant::now() + limits.close_barrier);
                }
                () = shutdown.cancelled(), if !hurried => {
                    hurried = true;
                    deadline.get_or_insert(Instant::now() + limits.linger);
                }
                () = until(deadline) => return false,
                () = self.activity.idle_for(limits.idle), if deadline.is_none() => return false,
            }
        };
        let WriterEnd::Finished(mut closing) = end else {
            return false;
        };
        if !self.inbound_ended {
            // Closing now could reset the connection over unread input, and a proxy in
            // between would drop what it has not passed on. So the client closes first.
            let client = async {
                tokio::select! {
                    _ = &mut self.inbound => {}
                    () = closing.answer() => {}
                }
            };
            let _ = timeout(limits.linger, client).await;
        }
        let _ = timeout(GOODBYE, closing.shutdown()).await;
        true
    }
}

async fn drain_all(drain: &mut Option<Drain>) {
    match drain {
        Some(drain) => drain.run().await,
        None => std::future::pending().await,
    }
}

/// Waits for a deadline; for ever, without one.
pub(crate) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
