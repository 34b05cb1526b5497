//! Clients that do exactly what a test says, byte by byte.

use http::{HeaderMap, HeaderValue, Method};
use sandman_streaming::{RemoteCommandUpgrade, negotiate_remote_command};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

/// What the server sent over WebSocket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Binary(Vec<u8>),
    Text(String),
    Ping,
    Pong(Vec<u8>),
    Close(u16),
    /// The server closed the connection.
    End,
}

pub(crate) fn websocket_upgrade(protocol: &'static str) -> RemoteCommandUpgrade {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-protocol", protocol),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    negotiate_remote_command(&Method::GET, &headers).unwrap()
}

pub(crate) fn spdy_upgrade() -> RemoteCommandUpgrade {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("connection", "Upgrade"),
        ("upgrade", "SPDY/3.1"),
        ("x-stream-protocol-version", "v4.channel.k8s.io"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    negotiate_remote_command(&Method::POST, &headers).unwrap()
}

pub(crate) struct WebSocket {
    pub(crate) io: DuplexStream,
}

impl WebSocket {
    pub(crate) async fn send(&mut self, opcode: u8, payload: &[u8]) {
        let mut frame = vec![0x80 | opcode, 0xff];
        frame.extend(u64::try_from(payload.len()).unwrap().to_be_bytes());
        // The mask 0 leaves the payload as it is.
        frame.extend([0; 4]);
        frame.extend(payload);
        self.io.write_all(&frame).await.unwrap();
    }

    pub(crate) async fn binary(&mut self, message: &[u8]) {
        self.send(2, message).await;
    }

    pub(crate) async fn close(&mut self) {
        let mut frame = vec![0x88, 0x82, 0, 0, 0, 0];
        frame.extend(1000u16.to_be_bytes());
        self.io.write_all(&frame).await.unwrap();
    }

    pub(crate) async fn ping(&mut self) {
        self.io.write_all(b"\x89\x82\0\0\0\0hi").await.unwrap();
    }

    pub(crate) async fn receive(&mut self) -> Received {
        let mut head = [0; 2];
        if self.io.read_exact(&mut head).await.is_err() {
            return Received::End;
        }
        let length = match head[1] {
            126 => self.io.read_u16().await.unwrap().into(),
            127 => self.io.read_u64().await.unwrap(),
            short => short.into(),
        };
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        self.io.read_exact(&mut payload).await.unwrap();
        match head[0] {
            0x81 => Received::Text(String::from_utf8(payload).unwrap()),
            0x82 => Received::Binary(payload),
            0x88 => Received::Close(u16::from_be_bytes([payload[0], payload[1]])),
            0x89 => Received::Ping,
            0x8a => Received::Pong(payload),
            other => panic!("frame with head {other:#x}"),
        }
    }

    /// All messages up to the Close, joined by channel in order of first appearance.
    pub(crate) async fn until_close(&mut self) -> (Vec<(u8, Vec<u8>)>, u16) {
        let mut channels: Vec<(u8, Vec<u8>)> = Vec::new();
        loop {
            match self.receive().await {
                Received::Binary(message) => {
                    let (channel, payload) = message.split_first().unwrap();
                    match channels.iter_mut().find(|(known, _)| known == channel) {
                        Some((_, data)) => data.extend(payload),
                        None => channels.push((*channel, payload.to_vec())),
                    }
                }
                Received::Close(code) => return (channels, code),
                Received::Ping | Received::Pong(_) => {}
                other => panic!("{other:?} before the Close"),
            }
        }
    }
}

pub(crate) struct Spdy {
    pub(crate) io: DuplexStream,
    begun: bool,
}

impl Spdy {
    pub(crate) fn new(io: DuplexStream) -> Self {
        Self { io, begun: false }
    }

    /// SYN_STREAM with one header, in a stored deflate block.
    pub(crate) async fn open(&mut self, stream: u32, stream_type: &str) {
        let mut plain = 1u32.to_be_bytes().to_vec();
        for text in ["streamtype", stream_type] {
            plain.extend(u32::try_from(text.len()).unwrap().to_be_bytes());
            plain.extend(text.as_bytes());
        }
        let mut payload = stream.to_be_bytes().to_vec();
        payload.extend([0; 6]);
        if !std::mem::replace(&mut self.begun, true) {
            payload.extend([0x78, 0x3f, 0xe3, 0xc6, 0xa7, 0xc2]);
        }
        let length = u16::try_from(plain.len()).unwrap();
        payload.push(0);
        payload.extend(length.to_le_bytes());
        payload.extend((!length).to_le_bytes());
        payload.extend(plain);
        payload.extend([0, 0, 0, 0xff, 0xff]);
        self.control(1, &payload).await;
    }

    pub(crate) async fn control(&mut self, frame_type: u8, payload: &[u8]) {
        let mut frame = vec![0x80, 3, 0, frame_type];
        frame.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        frame.extend(payload);
        self.io.write_all(&frame).await.unwrap();
    }

    pub(crate) async fn data(&mut self, stream: u32, fin: bool, payload: &[u8]) {
        let mut frame = stream.to_be_bytes().to_vec();
        let length = u32::try_from(payload.len()).unwrap();
        frame.extend(((u32::from(fin) << 24) | length).to_be_bytes());
        frame.extend(payload);
        self.io.write_all(&frame).await.unwrap();
    }

    /// The next frame in short: `reply 1`, `data 5 text`, `fin 5`, `reset 1 3`, `ping 1`.
    /// `None` at the end of the connection.
    pub(crate) async fn receive(&mut self) -> Option<String> {
        let mut head = [0; 8];
        self.io.read_exact(&mut head).await.ok()?;
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        self.io.read_exact(&mut payload).await.unwrap();
        let word = |bytes: &[u8]| u32::from_be_bytes(bytes[..4].try_into().unwrap());
        if head[0] & 0x80 == 0 {
            let stream = word(&head);
            let text = String::from_utf8_lossy(&payload);
            return Some(match (head[4], payload.is_empty()) {
                (1, true) => format!("fin {stream}"),
                (1, false) => format!("data+fin {stream} {text}"),
                _ => format!("data {stream} {text}"),
            });
        }
        Some(match head[3] {
            2 => format!("reply {}", word(&payload)),
            3 => format!("reset {} {}", word(&payload), word(&payload[4..])),
            4 => "settings".to_owned(),
            6 => format!("ping {}", word(&payload)),
            other => panic!("control frame {other}"),
        })
    }

    pub(crate) async fn rest(&mut self) -> Vec<String> {
        let mut frames = Vec::new();
        while let Some(frame) = self.receive().await {
            frames.push(frame);
        }
        frames
    }
}
