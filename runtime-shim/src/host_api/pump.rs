//! Output of an exec on its way to the client, and when to stop waiting for more of it.
//!
//! What a process wrote before it ended is in a pipe by then and reaches the client whole, however
//! slowly that one reads. Children that it left behind may hold the pipe open for ever: only
//! they are given up.

use std::time::Duration;

use bytes::Bytes;
use sandman_protocol::v1;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};
use tonic::Status;
use v1::exec_response::Message as Out;

use crate::runtime::fifo::Output;

/// Messages to the client.
pub(super) type Sender = mpsc::Sender<Result<v1::ExecResponse, Status>>;

/// What may follow the end of the process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Late {
    /// Time spent in waiting for output; what a slow client takes does not count.
    time: Duration,
    /// Output, in bytes.
    bytes: usize,
}

/// Four times the largest pipe that an unprivileged process can make (1 MiB): there is one before
/// the shim and one behind it. More than that was not written by the process itself.
pub(super) const LATE: Late = Late {
    time: Duration::from_secs(2),
    bytes: 4 << 20,
};

/// Sends a message; false when the client is gone.
pub(super) async fn send(sender: &Sender, message: Out) -> bool {
    sender
        .send(Ok(v1::ExecResponse {
            message: Some(message),
        }))
        .await
        .is_ok()
}

/// Carries an output to its end, or as far as `late` lets it once `ended` is true.
pub(super) async fn pump(
    output: Option<Output>,
    sender: &Sender,
    message: fn(Bytes) -> Out,
    mut ended: watch::Receiver<bool>,
    late: Late,
) {
    let Some(mut output) = output else { return };
    loop {
        let chunk = tokio::select! {
            biased;
            // A sender that is gone means the same.
            _ = ended.wait_for(|ended| *ended) => break,
            chunk = output.next() => chunk,
        };
        let Some(chunk) = chunk else { return };
        if !send(sender, message(chunk)).await {
            return;
        }
    }
    let Late {
        mut time,
        mut bytes,
    } = late;
    while bytes > 0 {
        let begin = Instant::now();
        // With no time left this still takes what is there.
        let Ok(Some(chunk)) = timeout(time, output.next()).await else {
            return;
        };
        time = time.saturating_sub(begin.elapsed());
        bytes = bytes.saturating_sub(chunk.len());
        if !send(sender, message(chunk)).await {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::Write as _;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;
    use crate::runtime::fifo::open_output;

    const DEADLINE: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(20);

    /// The two ends of a FIFO, and the folder that it is in.
    fn fifo() -> (Option<Output>, File, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout");
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        let output = open_output(Some(&path)).unwrap();
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        (output, writer, dir)
    }

    async fn total(mut messages: mpsc::Receiver<Result<v1::ExecResponse, Status>>) -> usize {
        let mut total = 0;
        while let Some(message) = messages.recv().await {
            if let Some(Out::Stdout(data)) = message.unwrap().message {
                total += data.len();
            }
        }
        total
    }

    #[tokio::test]
    async fn a_slow_client_gets_all_that_the_process_wrote() {
        const WRITTEN: usize = 1_000_000;
        let (output, mut writer, _dir) = fifo();
        // As the shim: it goes on copying what the process left in its pipe.
        let shim = std::thread::spawn(move || writer.write_all(&vec![7; WRITTEN]).unwrap());
        let (sender, messages) = mpsc::channel(1);
        let ended = watch::Sender::new(true);
        let late = Late {
            // Less than the client takes.
            time: SHORT * 5,
            bytes: WRITTEN * 2,
        };
        let pumped = tokio::spawn(async move {
            pump(output, &sender, Out::Stdout, ended.subscribe(), late).await;
        });
        // The client sleeps while the pipe is full and the channel too.
        tokio::time::sleep(SHORT * 10).await;
        let read = tokio::time::timeout(DEADLINE, total(messages)).await;
        assert_eq!(read.unwrap(), WRITTEN);
        pumped.await.unwrap();
        shim.join().unwrap();
    }

    #[tokio::test]
    async fn children_that_keep_the_pipe_open_are_given_up() {
        for (time, bytes) in [(SHORT, usize::MAX), (DEADLINE * 10, 4)] {
            let (output, mut writer, _dir) = fifo();
            writer.write_all(b"last").unwrap();
            let (sender, messages) = mpsc::channel(8);
            let ended = watch::Sender::new(true);
            let late = Late { time, bytes };
            let pumped = pump(output, &sender, Out::Stdout, ended.subscribe(), late);
            tokio::time::timeout(DEADLINE, pumped).await.unwrap();
            drop(sender);
            assert_eq!(total(messages).await, 4);
        }
    }
}
