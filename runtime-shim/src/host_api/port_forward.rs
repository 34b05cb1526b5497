//! The `PortForward` stream: one TCP connection into a sandbox, as messages.
//!
//! Each side goes no faster than its reader: a client that does not read stops
//! the reading of the socket, a sandbox that does not read stops the reading
//! of the client's messages. A half close is passed on either way.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt};
use sandman_protocol::v1;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Status;
use v1::port_forward_request::Message as In;
use v1::port_forward_response::Message as Out;

use crate::sandbox::Host;

/// Messages to the client.
pub(super) type Sender = mpsc::Sender<Result<v1::PortForwardResponse, Status>>;

/// Size of one message: large enough to be cheap, small enough to be fair.
const CHUNK: usize = 32 * 1024;
/// Time for the sandbox to accept; its backlog may be full.
const DIAL_WAIT: Duration = Duration::from_secs(30);
/// How long what the client still sends is taken after the sandbox has sent its
/// last; the same as in containerd.
const LATE_INPUT: Duration = Duration::from_millis(500);

/// Serves one connection from its first message to its last.
pub(super) async fn serve(
    host: Arc<Host>,
    mut requests: impl Stream<Item = Result<v1::PortForwardRequest, Status>> + Unpin + Send,
    sender: Sender,
) {
    let start = match requests.next().await {
        Some(Ok(v1::PortForwardRequest {
            message: Some(In::Start(start)),
        })) => start,
        Some(Ok(_)) => {
            let status = Status::invalid_argument("the first message must be `start`");
            let _ = sender.send(Err(status)).await;
            return;
        }
        Some(Err(_)) | None => return,
    };
    let dialled = tokio::select! {
        dialled = dial(&host, &start) => dialled,
        () = sender.closed() => return,
    };
    match dialled {
        Ok(stream) => {
            if send(&sender, Out::Opened(v1::PortForwardOpened {})).await {
                run(stream, requests, &sender).await;
            }
        }
        Err(message) => {
            send(&sender, Out::Failed(v1::PortForwardFailed { message })).await;
        }
    }
}

async fn dial(host: &Host, start: &v1::PortForwardStart) -> Result<TcpStream, String> {
    let port = u16::try_from(start.port)
        .ok()
        .filter(|port| *port > 0)
        .ok_or_else(|| format!("{} is not a port from 1 to 65535", start.port))?;
    match timeout(DIAL_WAIT, host.network.dial(&start.uid, port)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!(
            "failed to connect to localhost:{port} inside the pod: i/o timeout"
        )),
    }
}

/// How the client's side ended.
enum Client {
    /// It dropped the connection.
    Gone,
}

async fn run(
    stream: TcpStream,
    requests: impl Stream<Item = Result<v1::PortForwardRequest, Status>> + Unpin,
    sender: &Sender,
) {
    let (from, to) = stream.into_split();
    let (input_over, mut over) = mpsc::channel::<()>(1);
    let input = input(to, requests, input_over);
    tokio::pin!(input);
    let output = async {
        if output(from, sender).await.is_ok() {
            // The sandbox may have closed one direction only.
            let _ = timeout(LATE_INPUT, over.recv()).await;
        }
    };
    tokio::select! {
        () = output => {}
        Client::Gone = &mut input => {}
        () = sender.closed() => {}
    }
}

/// Carries what the sandbox sends. An error when the connection is over in both directions.
async fn output(from: OwnedReadHalf, sender: &Sender) -> io::Result<()> {
    loop {
        // No memory is held for a connection that is silent.
        from.readable().await?;
        let mut buffer = BytesMut::with_capacity(CHUNK);
        match from.try_read_buf(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {
                if !send(sender, Out::Data(buffer.freeze())).await {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    send(sender, Out::OutputEnded(v1::PortForwardOutputEnded {})).await;
    Ok(())
}

/// Carries what the client sends; returns only when the client is gone. `over` is dropped at the
/// end of its input.
async fn input(
    to: OwnedWriteHalf,
    mut requests: impl Stream<Item = Result<v1::PortForwardRequest, Status>> + Unpin,
    over: mpsc::Sender<()>,
) -> Client {
    let mut to = Some(to);
    loop {
        match requests.next().await {
            Some(Ok(request)) => {
                if let Some(In::Data(data)) = request.message {
                    write(&mut to, &data).await;
                }
            }
            Some(Err(_)) => return Client::Gone,
            None => break,
        }
    }
    if let Some(mut to) = to {
        // A sandbox that has closed already needs no half close.
        let _ = to.shutdown().await;
    }
    drop(over);
    pending().await
}

/// Writes as fast as the sandbox reads. Once it has closed its side, what the client sends is
/// dropped; what the sandbox had sent before still arrives.
async fn write(to: &mut Option<OwnedWriteHalf>, data: &Bytes) {
    if let Some(socket) = to
        && socket.write_all(data).await.is_err()
    {
        *to = None;
    }
}

async fn send(sender: &Sender, message: Out) -> bool {
    sender
        .send(Ok(v1::PortForwardResponse {
            message: Some(message),
        }))
        .await
        .is_ok()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    type Requests = mpsc::Sender<Result<v1::PortForwardRequest, Status>>;
    type Responses = mpsc::Receiver<Result<v1::PortForwardResponse, Status>>;

    /// A connection being carried: the client's ends, the sandbox's end.
    async fn carried() -> (Requests, Responses, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let (requests, receiver) = mpsc::channel(2);
        let (sender, responses) = mpsc::channel(2);
        tokio::spawn(async move { run(near, ReceiverStream::new(receiver), &sender).await });
        (requests, responses, far)
    }

    fn data(bytes: &'static [u8]) -> Result<v1::PortForwardRequest, Status> {
        Ok(v1::PortForwardRequest {
            message: Some(In::Data(Bytes::from_static(bytes))),
        })
    }

    async fn next(responses: &mut Responses) -> Option<Out> {
        let next = timeout(DEADLINE, responses.recv()).await.unwrap();
        next.map(|response| response.unwrap().message.unwrap())
    }

    #[tokio::test]
    async fn an_answer_after_a_half_close_arrives() {
        let (requests, mut responses, mut far) = carried().await;
        requests.send(data(b"question")).await.unwrap();
        drop(requests);
        let mut question = String::new();
        far.read_to_string(&mut question).await.unwrap();
        assert_eq!(question, "question");
        far.write_all(b"answer").await.unwrap();
        drop(far);
        assert_eq!(next(&mut responses).await, Some(Out::Data("answer".into())));
        let ended = Out::OutputEnded(v1::PortForwardOutputEnded {});
        assert_eq!(next(&mut responses).await, Some(ended));
        assert_eq!(next(&mut responses).await, None);
    }

    #[tokio::test]
    async fn input_after_the_sandboxs_last_word_arrives() {
        let (requests, mut responses, mut far) = carried().await;
        far.shutdown().await.unwrap();
        let ended = Out::OutputEnded(v1::PortForwardOutputEnded {});
        assert_eq!(next(&mut responses).await, Some(ended));
        requests.send(data(b"late")).await.unwrap();
        drop(requests);
        let mut late = String::new();
        timeout(DEADLINE, far.read_to_string(&mut late))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(late, "late");
    }

    #[tokio::test]
    async fn a_client_that_is_gone_closes_the_connection() {
        let (requests, responses, mut far) = carried().await;
        requests
            .send(Err(Status::cancelled("reset")))
            .await
            .unwrap();
        let mut rest = Vec::new();
        timeout(DEADLINE, far.read_to_end(&mut rest))
            .await
            .unwrap()
            .unwrap();
        drop(responses);
        let (_requests, responses, mut far) = carried().await;
        drop(responses);
        timeout(DEADLINE, far.read_to_end(&mut rest))
            .await
            .unwrap()
            .unwrap();
        assert!(rest.is_empty());
    }
}
