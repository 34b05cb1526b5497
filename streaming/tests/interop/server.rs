//! A node without containers: answers exec and port-forward with programs that live in
//! this process, so that only the streaming protocol is under test.

use std::{convert::Infallible, net::SocketAddr};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Empty, Full, combinators::BoxBody};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use sandman_streaming::{
    ForwardOutcome, ForwardedConnection, Limits, Outcome, Output, Refusal, RemoteCommand,
    StreamOptions, negotiate_port_forward, negotiate_remote_command, serve_port_forward,
    serve_remote_command,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tokio_util::sync::{CancellationToken, DropGuard};

type Body = BoxBody<Bytes, Infallible>;

/// Runs until dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    _stop: DropGuard,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(stopped.run_until_cancelled_owned(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let service = hyper::service::service_fn(|request| async {
                    Ok::<_, Infallible>(answer(request).unwrap_or_else(|refusal| {
                        refusal.into_response().map(|text| Full::from(text).boxed())
                    }))
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades();
                tokio::spawn(connection);
            }
        }));
        Self {
            address,
            _stop: stop.drop_guard(),
        }
    }
}

fn answer(mut request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
    let query = request.uri().query().unwrap_or_default().to_owned();
    let shutdown = CancellationToken::new();
    let limits = Limits::default();
    let head = if request.uri().path().starts_with("/portForward") {
        let upgrade = negotiate_port_forward(request.method(), request.headers(), &query)?;
        let head = upgrade.response();
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let io = TokioIo::new(upgraded.await.unwrap());
            // How clients end port-forwards is what their side of the tests looks at.
            let _ = serve_port_forward(io, upgrade, limits, shutdown, forward).await;
        });
        head
    } else {
        let options = StreamOptions::from_query(&query)?;
        let upgrade = negotiate_remote_command(request.method(), request.headers())?;
        let command: Vec<String> = form_urlencoded::parse(query.as_bytes())
            .filter(|(name, _)| name == "command")
            .map(|(_, value)| value.into_owned())
            .collect();
        let head = upgrade.response();
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let io = TokioIo::new(upgraded.await.unwrap());
            let run = |streams| run(command, streams);
            let _ = serve_remote_command(io, upgrade, options, limits, shutdown, run).await;
        });
        head
    };
    Ok(head.map(|()| Empty::new().boxed()))
}

/// The byte at a position of every generated stream.
fn pattern(position: u64) -> u8 {
    (position ^ (position >> 8) ^ (position >> 16)) as u8
}

async fn emit(output: &mut Output, length: u64) -> std::io::Result<()> {
    let mut sent = 0;
    while sent < length {
        let end = length.min(sent + 100_000);
        let chunk: BytesMut = (sent..end).map(pattern).collect();
        output.write_chunk(chunk.freeze()).await?;
        sent = end;
    }
    Ok(())
}

async fn run(command: Vec<String>, mut streams: RemoteCommand) -> Outcome {
    let number = || command[1].parse::<u64>().unwrap();
    match command[0].as_str() {
        "cat" => {
            let (mut stdin, mut stdout) = (streams.stdin.unwrap(), streams.stdout.unwrap());
            tokio::io::copy(&mut stdin, &mut stdout).await.unwrap();
        }
        "emit" => emit(&mut streams.stdout.unwrap(), number()).await.unwrap(),
        "count" => {
            let mut stdin = streams.stdin.unwrap();
            let mut position = 0;
            while let Some(chunk) = stdin.read_chunk().await {
                for byte in chunk {
                    assert_eq!(byte, pattern(position), "at {position}");
                    position += 1;
                }
            }
            let text = format!("{position}\n");
            streams
                .stdout
                .unwrap()
                .write_all(text.as_bytes())
                .await
                .unwrap();
        }
        // Output goes on long after the client has ended stdin.
        "drain-then-emit" => {
            while streams.stdin.as_mut().unwrap().read_chunk().await.is_some() {}
            emit(&mut streams.stdout.unwrap(), number()).await.unwrap();
        }
        // The process ends while the client is still sending.
        "early" => streams.stdout.unwrap().write_all(b"done").await.unwrap(),
        "both" => {
            streams
                .stdout
                .unwrap()
                .write_all(b"to stdout")
                .await
                .unwrap();
            if let Some(mut stderr) = streams.stderr {
                stderr.write_all(b"to stderr").await.unwrap();
            }
        }
        "size" => {
            let mut stdout = streams.stdout.unwrap();
            for _ in 0..number() {
                let size = streams.resize.next().await.unwrap();
                let text = format!("{}x{}\n", size.width, size.height);
                stdout.write_all(text.as_bytes()).await.unwrap();
            }
        }
        "exit" => return Outcome::Exited(u8::try_from(number()).unwrap()),
        "fail" => {
            return Outcome::Failed {
                message: "no such command".to_owned(),
            };
        }
        "panic" => panic!("on purpose"),
        other => {
            return Outcome::Failed {
                message: format!("unknown program {other}"),
            };
        }
    }
    Outcome::Exited(0)
}

async fn forward(mut connection: ForwardedConnection) -> ForwardOutcome {
    match connection.port {
        80 => {
            // Echo, as a server that answers until the client has ended its side.
            let _ = tokio::io::copy(&mut connection.input, &mut connection.output).await;
            ForwardOutcome::Closed
        }
        // A server that drops its connections after the first byte.
        81 => {
            let _ = connection.input.read_u8().await;
            ForwardOutcome::Closed
        }
        port => ForwardOutcome::Failed {
            message: format!("port {port} refused"),
        },
    }
}
