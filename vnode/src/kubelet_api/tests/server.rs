//! The server under test and its clients.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prometheus_client::registry::Registry;
use rcgen::ExtendedKeyUsagePurpose;
use sandman_protocol::v1::host_client::HostClient;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_util::sync::CancellationToken;

use super::SOON;
use super::cluster::{Hosts, Pods, Policy};
use super::host::{self, Seen};
use super::pki::{Authority, Identity};
use crate::kubelet_api::{ApiMetrics, Config, Node, ServeError, serve};

/// A running server with everything around it.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    pub(super) clients: Authority,
    pub(super) policy: Arc<Policy>,
    pub(super) hosts: Arc<Hosts>,
    pub(super) seen: mpsc::UnboundedReceiver<Seen>,
    pub(super) shutdown: CancellationToken,
    pub(super) running: JoinHandle<Result<(), ServeError>>,
    pub(super) folder: TempDir,
    serving: Authority,
}

/// Who a client is.
#[derive(Clone, Copy)]
pub(super) enum As<'a> {
    Nobody,
    Certificate(&'a Identity),
    Token(&'a str),
}

impl Server {
    pub(super) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(super) async fn start_with(adjust: impl FnOnce(&mut Config)) -> Self {
        let (clients, serving) = (Authority::new("clients"), Authority::new("serving"));
        let folder = tempfile::tempdir().expect("a folder");
        let client_ca = folder.path().join("ca.crt");
        std::fs::write(&client_ca, &clients.pem).expect("a CA file");
        let certificate = serving.issue("node-1", &[], ExtendedKeyUsagePurpose::ServerAuth);

        let (sender, seen) = mpsc::unbounded_channel();
        let host = host::start(sender).await;
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{host}"))
            .expect("an address")
            .connect_lazy();
        let hosts = Arc::new(Hosts {
            client: Mutex::new(Some(HostClient::new(channel))),
        });

        let policy = Arc::new(Policy::default());
        let mut registry = Registry::default();
        let metrics = ApiMetrics::register(&mut registry);
        let node = Node {
            pods: Arc::new(Pods::default()),
            hosts: Arc::clone(&hosts) as _,
            reviews: Arc::clone(&policy) as _,
            listed: tokio::sync::watch::channel(true).1,
            syncloop: Arc::new(|| Ok(())),
            registry: Arc::new(registry),
            metrics,
        };
        let mut config = Config::new("node-1", client_ca);
        // The barrier is for old clients that write, close and go on.
        config.stream_limits.close_barrier = Duration::from_millis(50);
        adjust(&mut config);

        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shutdown = CancellationToken::new();
        let serve = serve(
            config,
            node,
            listener,
            certificate.resolver(),
            shutdown.clone(),
        );
        Self {
            address,
            clients,
            policy,
            hosts,
            seen,
            shutdown,
            running: tokio::spawn(serve),
            folder,
            serving,
        }
    }

    /// The next thing that the host sees.
    pub(super) async fn sees(&mut self) -> Option<Seen> {
        timeout(SOON, self.seen.recv())
            .await
            .expect("the host sees something")
    }

    pub(super) async fn connect(&self, who: As<'_>, protocol: &[u8]) -> TlsStream<TcpStream> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(self.serving.roots());
        let mut config = match who {
            As::Certificate(identity) => builder
                .with_client_auth_cert(identity.chain.clone(), identity.key())
                .expect("an identity"),
            As::Nobody | As::Token(_) => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        let socket = TcpStream::connect(self.address)
            .await
            .expect("a connection");
        let name = "localhost".try_into().expect("a name");
        TlsConnector::from(Arc::new(config))
            .connect(name, socket)
            .await
            .expect("a handshake")
    }

    /// A request whose body is still to be read.
    pub(super) async fn open(&self, who: As<'_>, method: Method, path: &str) -> Response<Incoming> {
        let stream = TokioIo::new(self.connect(who, b"http/1.1").await);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream)
            .await
            .expect("HTTP/1.1");
        tokio::spawn(connection);
        let request = request(who, method, path).header("host", "localhost");
        let request = request.body(Empty::<Bytes>::new()).expect("a request");
        sender.send_request(request).await.expect("a response")
    }

    pub(super) async fn send(&self, who: As<'_>, method: Method, path: &str) -> (u16, String) {
        whole(self.open(who, method, path).await).await
    }

    pub(super) async fn get(&self, who: As<'_>, path: &str) -> (u16, String) {
        self.send(who, Method::GET, path).await
    }

    pub(super) async fn get_http2(&self, who: As<'_>, path: &str) -> (u16, String) {
        let stream = TokioIo::new(self.connect(who, b"h2").await);
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
                .await
                .expect("HTTP/2");
        tokio::spawn(connection);
        let path = format!("https://localhost{path}");
        let request = request(who, Method::GET, &path).body(Empty::<Bytes>::new());
        let request = request.expect("a request");
        whole(sender.send_request(request).await.expect("a response")).await
    }

    /// A WebSocket exec, or the code and body of its refusal.
    pub(super) async fn exec(&self, who: As<'_>, query: &str) -> Result<Exec, (u16, String)> {
        let path = format!("/exec/ns/pod/main?{query}");
        self.websocket(who, &path, "v5.channel.k8s.io").await
    }

    /// A WebSocket session, or the code and body of its refusal.
    pub(super) async fn websocket(
        &self,
        who: As<'_>,
        path: &str,
        protocol: &'static str,
    ) -> Result<Exec, (u16, String)> {
        let stream = self.connect(who, b"http/1.1").await;
        let path = format!("wss://localhost{path}");
        let mut request = path.into_client_request().expect("a request");
        let protocol = http::HeaderValue::from_static(protocol);
        request
            .headers_mut()
            .insert("sec-websocket-protocol", protocol);
        if let As::Token(token) = who {
            let value = format!("Bearer {token}").parse().expect("a header");
            request.headers_mut().insert("authorization", value);
        }
        match tokio_tungstenite::client_async(request, stream).await {
            Ok((socket, _)) => Ok(Exec { socket }),
            Err(tokio_tungstenite::tungstenite::Error::Http(response)) => {
                let body = response.body().clone().unwrap_or_default();
                Err((
                    response.status().as_u16(),
                    String::from_utf8_lossy(&body).into_owned(),
                ))
            }
            Err(error) => panic!("handshake: {error}"),
        }
    }
}

fn request(who: As<'_>, method: Method, path: &str) -> http::request::Builder {
    let request = Request::builder().method(method).uri(path);
    match who {
        As::Token(token) => request.header("authorization", format!("Bearer {token}")),
        _ => request,
    }
}

async fn whole(response: Response<Incoming>) -> (u16, String) {
    let code = response.status().as_u16();
    let body = timeout(SOON, response.into_body().collect())
        .await
        .expect("in time");
    let body = body.expect("a body").to_bytes();
    (code, String::from_utf8_lossy(&body).into_owned())
}

/// A client of the v5 protocol.
pub(super) struct Exec {
    socket: WebSocketStream<TlsStream<TcpStream>>,
}

/// Everything that a session sent.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    pub(super) status: serde_json::Value,
}

impl Exec {
    pub(super) async fn write(&mut self, channel: u8, payload: &[u8]) {
        let mut message = vec![channel];
        message.extend_from_slice(payload);
        let sent = self.socket.send(Message::Binary(message.into())).await;
        sent.expect("a message is taken");
    }

    pub(super) async fn close_stdin(&mut self) {
        self.write(255, &[0]).await;
    }

    /// The next message with something in it: channel and payload.
    pub(super) async fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            let next = timeout(SOON, self.socket.next()).await.expect("in time");
            match next {
                Some(Ok(Message::Binary(message))) => match message.split_first() {
                    Some((channel, payload)) if !payload.is_empty() => {
                        return Some((*channel, payload.to_vec()));
                    }
                    _ => {}
                },
                Some(Ok(Message::Close(_))) | None => return None,
                Some(Ok(_)) => {}
                Some(Err(error)) => panic!("{error}"),
            }
        }
    }

    /// Reads to the close.
    pub(super) async fn finish(mut self) -> Output {
        let mut output = Output::default();
        loop {
            let next = timeout(SOON, self.socket.next()).await.expect("in time");
            match next {
                Some(Ok(Message::Binary(message))) => match message.split_first() {
                    Some((1, payload)) => output.stdout.extend_from_slice(payload),
                    Some((2, payload)) => output.stderr.extend_from_slice(payload),
                    Some((3, payload)) if !payload.is_empty() => {
                        output.status = serde_json::from_slice(payload).expect("a status");
                    }
                    _ => {}
                },
                Some(Ok(Message::Close(_))) | None => return output,
                Some(Ok(_)) => {}
                Some(Err(error)) => panic!("after {output:?}: {error}"),
            }
        }
    }

    /// Waits for output, so that the process is known to run.
    pub(super) async fn started(&mut self) {
        self.write(0, b"ping").await;
    }
}
