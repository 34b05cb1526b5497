//! The way out: handlers queue data, the reader queues answers, one writer sends.

mod framing;
mod output;
mod writer;

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

pub use self::output::Output;
pub(crate) use self::{
    framing::{Frame, Framing},
    output::OutputControl,
    writer::{Drain, Writer, WriterEnd},
};
use crate::wire::Pong;

/// Largest DATA frame or message written. Go's reader handles 64 KiB frames ten times
/// faster than 1 KiB ones, and a larger frame would only delay answers to pings.
pub(crate) const MAX_FRAME: usize = 64 * 1024;

/// Answers that may wait for the writer.
const MAX_ANSWERS: usize = 64;

/// Least that a queued piece costs, so that one-byte writes cannot fill the memory.
const LEAST_COST: usize = 256;

/// Something for the writer, in order.
pub(crate) enum Item {
    /// Data of a stream. The permit returns its share of the budget once written.
    Data {
        stream: u32,
        payload: Bytes,
        permit: OwnedSemaphorePermit,
    },
    /// A frame of the session itself, which no budget bounds.
    Frame(Frame),
    /// The server sends nothing more on a stream.
    End { stream: u32 },
    /// The last frames of the connection; nothing is written after them.
    Finish(Vec<Frame>),
}

/// What the writer takes from.
pub(crate) struct Queue {
    answers: mpsc::Receiver<Frame>,
    items: mpsc::UnboundedReceiver<Item>,
    budget: Arc<Semaphore>,
}

impl Queue {
    /// Makes all writes of handlers fail with a broken pipe, those that wait as well.
    fn refuse_data(&mut self) {
        self.items.close();
        self.budget.close();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.refuse_data();
    }
}

/// Handle to a connection's queue.
#[derive(Clone)]
pub(crate) struct Outbound {
    answers: mpsc::Sender<Frame>,
    items: mpsc::UnboundedSender<Item>,
    budget: Arc<Semaphore>,
}

/// Makes the queue of one connection; `budget` bounds the bytes of data in it.
pub(crate) fn queue(budget: usize) -> (Outbound, Queue) {
    let (answers, answers_queue) = mpsc::channel(MAX_ANSWERS);
    let (items, items_queue) = mpsc::unbounded_channel();
    let budget = Arc::new(Semaphore::new(
        budget.clamp(MAX_FRAME, Semaphore::MAX_PERMITS),
    ));
    let queue = Queue {
        answers: answers_queue,
        items: items_queue,
        budget: Arc::clone(&budget),
    };
    (
        Outbound {
            answers,
            items,
            budget,
        },
        queue,
    )
}

impl Outbound {
    /// The sending end of a stream for a handler.
    pub(crate) fn output(&self, stream: u32) -> (Output, OutputControl) {
        Output::new(stream, self.items.clone(), Arc::clone(&self.budget))
    }

    /// Queues a frame ahead of all data; waits while a client reads none of its answers.
    pub(crate) async fn answer(&self, frame: Frame) {
        // A closed queue means that the writer failed, which ends the session elsewhere.
        let _ = self.answers.send(frame).await;
    }

    /// Sends an empty message on a channel, which tells the client that it is connected.
    pub(crate) fn greet(&self, stream: u32) {
        // The first frame of a connection always finds room.
        let _ = self.answers.try_send(Frame::Greeting { stream });
    }

    /// Answers a ping, unless the client lets too many answers pile up: pings carry no
    /// promise, and memory for them must be bounded.
    pub(crate) fn pong(&self, pong: Pong) {
        let _ = self.answers.try_send(match pong {
            Pong::Spdy { id } => Frame::SpdyPing { id },
            Pong::WebSocket(payload) => Frame::Pong(payload),
        });
    }

    /// Shows the client a sign of life, and the kernel a reason to notice a dead one.
    pub(crate) fn keepalive(&self) {
        let _ = self.answers.try_send(Frame::KeepAlive);
    }

    /// Queues a frame behind the data that waits. For few and small ones.
    pub(crate) fn send(&self, frame: Frame) {
        let _ = self.items.send(Item::Frame(frame));
    }

    /// Queues the last frames behind all data.
    pub(crate) fn finish(&self, frames: Vec<Frame>) {
        let _ = self.items.send(Item::Finish(frames));
    }
}
