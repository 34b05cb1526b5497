//! A host that plays scripts instead of running processes.

use std::net::SocketAddr;
use std::pin::Pin;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use sandman_protocol::v1::exec_request::Message as Request;
use sandman_protocol::v1::exec_response::Message as Response;
use sandman_protocol::v1::host_server::{Host, HostServer};
use sandman_protocol::v1::port_forward_request::Message as ForwardRequest;
use sandman_protocol::v1::port_forward_response::Message as ForwardResponse;
use sandman_protocol::v1::{self as v1};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Status, Streaming};

/// What the host saw, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    Cancelled,
    ExecDropped,
    ForwardEnded,
    LogDropped,
}

/// Starts the host on loopback; what it sees goes to `seen`.
pub(super) async fn start(seen: mpsc::UnboundedSender<Seen>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let serving = tonic::transport::Server::builder()
        .add_service(HostServer::new(Scripted { seen }))
        .serve_with_incoming(TcpListenerStream::new(listener));
    tokio::spawn(serving);
    address
}

struct Scripted {
    seen: mpsc::UnboundedSender<Seen>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Answer<T> = Result<tonic::Response<T>, Status>;

fn say(message: Response) -> Result<v1::ExecResponse, Status> {
    Ok(v1::ExecResponse {
        message: Some(message),
    })
}

fn exited(exit_code: i32) -> Response {
    Response::Exited(v1::ExecExited { exit_code })
}

/// One exec. Commands: `cat`, `exit N`, `missing`, `hang`, `die`, `size`,
/// `flood N`.
async fn play(
    start: v1::ExecStart,
    mut input: Streaming<v1::ExecRequest>,
    answers: mpsc::Sender<Result<v1::ExecResponse, Status>>,
    seen: mpsc::UnboundedSender<Seen>,
) {
    let send = |message| answers.send(say(message));
    let number = || start.command.get(1).and_then(|text| text.parse().ok());
    if start.command[0] == "missing" {
        let failed = v1::ExecFailed {
            kind: v1::exec_failed::Kind::CommandNotStarted.into(),
            message: r#"exec: "missing": executable file not found in $PATH"#.into(),
        };
        let _ = send(Response::Failed(failed)).await;
        return;
    }
    let _ = send(Response::Started(v1::ExecStarted {})).await;
    match start.command[0].as_str() {
        "exit" => {
            let _ = send(Response::Stderr(Bytes::from_static(b"bye"))).await;
            let _ = send(exited(number().unwrap_or(0))).await;
        }
        "size" => {
            let size = start.size.unwrap_or_default();
            let text = format!("{}x{}", size.width, size.height);
            let _ = send(Response::Stdout(text.into())).await;
            let _ = send(exited(0)).await;
        }
        "flood" => {
            let mut left = usize::try_from(number().unwrap_or(0)).unwrap_or(0);
            while left > 0 {
                let piece = left.min(32 << 10);
                left -= piece;
                let chunk = Bytes::from(vec![b'x'; piece]);
                if send(Response::Stdout(chunk)).await.is_err() {
                    return;
                }
            }
            let _ = send(exited(0)).await;
        }
        "die" => {
            let _ = answers
                .send(Err(Status::unavailable("host fell over")))
                .await;
        }
        _ => loop {
            match input
                .next()
                .await
                .and_then(Result::ok)
                .and_then(|one| one.message)
            {
                Some(Request::Stdin(chunk)) if start.command[0] == "cat" => {
                    let _ = send(Response::Stdout(chunk)).await;
                }
                Some(Request::CloseStdin(_)) if start.command[0] == "cat" => {
                    let _ = send(exited(0)).await;
                    return;
                }
                Some(Request::Cancel(_)) => {
                    let _ = seen.send(Seen::Cancelled);
                    let _ = send(exited(137)).await;
                    return;
                }
                Some(_) => {}
                None => {
                    let _ = seen.send(Seen::ExecDropped);
                    return;
                }
            }
        },
    }
}

#[tonic::async_trait]
impl Host for Scripted {
    type ExecStream = Answers<v1::ExecResponse>;
    type LogsStream = Answers<v1::LogsResponse>;
    type WatchStream = Answers<v1::WatchResponse>;
    type AttachStream = Answers<v1::ExecResponse>;
    type PortForwardStream = Answers<v1::PortForwardResponse>;

    /// The container echoes as `cat` does and ends with its input.
    async fn attach(
        &self,
        request: tonic::Request<Streaming<v1::ExecRequest>>,
    ) -> Answer<Self::AttachStream> {
        let mut input = request.into_inner();
        let first = input.message().await?.and_then(|first| first.message);
        let Some(Request::Start(mut start)) = first else {
            return Err(Status::invalid_argument("the first message is start"));
        };
        assert!(start.command.is_empty(), "{start:?}");
        start.command.push("cat".into());
        let (answers, receiver) = mpsc::channel(4);
        tokio::spawn(play(start, input, answers, self.seen.clone()));
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(
            receiver,
        ))))
    }

    /// Port 7 echoes until the half close, then says `bye`; on others nobody
    /// listens.
    async fn port_forward(
        &self,
        request: tonic::Request<Streaming<v1::PortForwardRequest>>,
    ) -> Answer<Self::PortForwardStream> {
        let mut input = request.into_inner();
        let first = input.message().await?.and_then(|first| first.message);
        let Some(ForwardRequest::Start(start)) = first else {
            return Err(Status::invalid_argument("the first message is start"));
        };
        let (answers, receiver) = mpsc::channel(4);
        let seen = self.seen.clone();
        tokio::spawn(async move {
            let send = |message| {
                let message = Some(message);
                answers.send(Ok(v1::PortForwardResponse { message }))
            };
            if start.port != 7 {
                let message = "connect: connection refused".into();
                let failed = v1::PortForwardFailed { message };
                let _ = send(ForwardResponse::Failed(failed)).await;
                return;
            }
            let _ = send(ForwardResponse::Opened(v1::PortForwardOpened {})).await;
            // Until a loss, or a half close that may be followed by one.
            while let Some(Ok(request)) = input.next().await {
                if let Some(ForwardRequest::Data(data)) = request.message {
                    let _ = send(ForwardResponse::Data(data)).await;
                }
            }
            let _ = seen.send(Seen::ForwardEnded);
            let _ = send(ForwardResponse::Data(Bytes::from_static(b"bye"))).await;
        });
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(
            receiver,
        ))))
    }

    async fn exec(
        &self,
        request: tonic::Request<Streaming<v1::ExecRequest>>,
    ) -> Answer<Self::ExecStream> {
        let mut input = request.into_inner();
        let first = input.message().await?.and_then(|first| first.message);
        let Some(Request::Start(start)) = first else {
            return Err(Status::invalid_argument("the first message is start"));
        };
        let (answers, receiver) = mpsc::channel(4);
        tokio::spawn(play(start, input, answers, self.seen.clone()));
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(
            receiver,
        ))))
    }

    /// Two lines, then an open end if followed.
    async fn logs(&self, request: tonic::Request<v1::LogsRequest>) -> Answer<Self::LogsStream> {
        let request = request.into_inner();
        if request.previous {
            return Err(Status::not_found("no such log"));
        }
        let (lines, receiver) = mpsc::channel(4);
        let seen = self.seen.clone();
        tokio::spawn(async move {
            for text in ["one\n", "two\n"] {
                let data = Bytes::from_static(text.as_bytes());
                let _ = lines.send(Ok(v1::LogsResponse { data })).await;
            }
            if request.follow {
                lines.closed().await;
                let _ = seen.send(Seen::LogDropped);
            }
        });
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(
            receiver,
        ))))
    }

    async fn get_inventory(
        &self,
        _: tonic::Request<v1::GetInventoryRequest>,
    ) -> Answer<v1::Inventory> {
        Err(Status::unimplemented("not played"))
    }

    async fn apply(&self, _: tonic::Request<v1::ApplyRequest>) -> Answer<v1::ApplyResponse> {
        Err(Status::unimplemented("not played"))
    }

    async fn remove(&self, _: tonic::Request<v1::RemoveRequest>) -> Answer<v1::RemoveResponse> {
        Err(Status::unimplemented("not played"))
    }

    async fn forget(&self, _: tonic::Request<v1::ForgetRequest>) -> Answer<v1::ForgetResponse> {
        Err(Status::unimplemented("not played"))
    }

    async fn watch(&self, _: tonic::Request<v1::WatchRequest>) -> Answer<Self::WatchStream> {
        Err(Status::unimplemented("not played"))
    }

    async fn set_cluster_network(
        &self,
        _: tonic::Request<v1::ClusterNetworkRequest>,
    ) -> Answer<v1::ClusterNetworkResponse> {
        Err(Status::unimplemented("not here"))
    }

    async fn get_stats(&self, _: tonic::Request<v1::GetStatsRequest>) -> Answer<v1::Stats> {
        Err(Status::unimplemented("not played"))
    }
}
