//! Frames between containerd's connections and the shim's one; pure.
//!
//! containerd takes a lost connection for a lost task, and opens one a task. So its connections end
//! at the holder, which lives as long as the sandboxes do, and a shim that is killed is not missed:
//! what it had not answered is asked again of the next one where that is harmless, and refused as
//! unavailable where it is not.
//!
//! Of a frame only the header is read (ttrpc: length, stream and kind, big endian), and of a request
//! the name of its method.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Bytes before the payload of a frame.
const HEADER: usize = 10;
/// Longest payload, as ttrpc has it.
const MAX_PAYLOAD: usize = 4 << 20;
/// Kind of a frame that answers, and the only one of unary calls besides the request.
const RESPONSE: u8 = 2;
/// Requests that only look, so that asking again changes nothing.
const LOOKS: [&str; 5] = ["Wait", "State", "Pids", "Stats", "Connect"];
/// What waits to be sent to the shim before more requests wait with their connections.
const MAX_AHEAD: usize = 8 << 20;
/// What may wait with one connection.
const MAX_WAITING: usize = 16 << 20;

/// The other side sent what is no frame; its connection is to be closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoFrame;

/// Bytes on their way in and out of a connection.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Buffers {
    /// What waits to be sent.
    pub(super) fn output(&self) -> &[u8] {
        &self.output
    }

    /// Its first `count` bytes are sent.
    pub(super) fn sent(&mut self, count: usize) {
        self.output.drain(..count.min(self.output.len()));
    }

    /// The next whole frame that has come in.
    fn frame(&mut self) -> Result<Option<Vec<u8>>, NoFrame> {
        let Some(header) = self.input.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [a, b, c, d, ..] = *header;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if length > MAX_PAYLOAD {
            return Err(NoFrame);
        }
        let rest = match self.input.get(HEADER + length..) {
            Some(rest) => rest.to_vec(),
            None => return Ok(None),
        };
        let mut frame = std::mem::replace(&mut self.input, rest);
        frame.truncate(HEADER + length);
        Ok(Some(frame))
    }
}

/// A request without an answer.
#[derive(Debug)]
struct Call {
    connection: u64,
    stream: u32,
    /// The frame, if it may be sent once more.
    again: Option<Vec<u8>>,
}

/// See the module. Connections are known by numbers of the caller's.
#[derive(Debug, Default)]
pub(super) struct Relay {
    connections: BTreeMap<u64, Buffers>,
    shim: Option<Buffers>,
    calls: HashMap<u32, Call>,
    last: u32,
    /// Connections that have something to be sent.
    ready: BTreeSet<u64>,
    /// Requests wait because the shim does not keep up.
    full: bool,
}

impl Relay {
    /// containerd has connected.
    pub(super) fn connect(&mut self, connection: u64) {
        self.connections.insert(connection, Buffers::default());
    }

    /// containerd has left; answers to it are dropped when they come.
    pub(super) fn disconnect(&mut self, connection: u64) {
        self.connections.remove(&connection);
    }

    /// What waits for a connection.
    pub(super) fn connection(&mut self, connection: u64) -> Option<&mut Buffers> {
        self.connections.get_mut(&connection)
    }

    /// What waits for the shim.
    pub(super) fn shim(&mut self) -> Option<&mut Buffers> {
        self.shim.as_mut()
    }

    /// Connections that have something to be sent, once.
    pub(super) fn take_ready(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.ready)
    }

    /// A connection can take more.
    pub(super) fn mark_ready(&mut self, connection: u64) {
        self.ready.insert(connection);
    }

    /// containerd has sent `bytes`.
    pub(super) fn request(&mut self, connection: u64, bytes: &[u8]) -> Result<(), NoFrame> {
        if let Some(buffers) = self.connections.get_mut(&connection) {
            if buffers.input.len() + bytes.len() > MAX_WAITING {
                return Err(NoFrame);
            }
            buffers.input.extend_from_slice(bytes);
        }
        self.forward(connection)
    }

    /// The shim has sent `bytes`.
    pub(super) fn answer(&mut self, bytes: &[u8]) -> Result<(), NoFrame> {
        let Some(shim) = &mut self.shim else {
            return Ok(());
        };
        shim.input.extend_from_slice(bytes);
        while let Some(mut frame) = shim.frame()? {
            let id = stream(&frame);
            let Some(call) = self.calls.get(&id) else {
                continue;
            };
            rename(&mut frame, call.stream);
            if let Some(buffers) = self.connections.get_mut(&call.connection) {
                buffers.output.extend_from_slice(&frame);
                self.ready.insert(call.connection);
            }
            if kind(&frame) == RESPONSE {
                self.calls.remove(&id);
            }
        }
        Ok(())
    }

    /// A shim is there, in place of any earlier one. Names connections that sent no frames.
    pub(super) fn shim_came(&mut self) -> Vec<u64> {
        self.shim_left();
        let mut shim = Buffers::default();
        let mut waiting: Vec<_> = self.calls.iter_mut().collect();
        waiting.sort_unstable_by_key(|(id, _)| **id);
        for (id, call) in waiting {
            if let Some(frame) = &call.again {
                let mut frame = frame.clone();
                rename(&mut frame, *id);
                shim.output.extend_from_slice(&frame);
            }
        }
        self.shim = Some(shim);
        self.full = true;
        self.resume()
    }

    /// The shim may have taken some: passes on what had to wait. Names connections that sent no
    /// frames.
    pub(super) fn resume(&mut self) -> Vec<u64> {
        if !std::mem::take(&mut self.full) {
            return Vec::new();
        }
        let all: Vec<u64> = self.connections.keys().copied().collect();
        all.into_iter()
            .filter(|connection| self.forward(*connection).is_err())
            .collect()
    }

    /// The shim is gone.
    pub(super) fn shim_left(&mut self) {
        self.shim = None;
        let connections = &mut self.connections;
        self.calls.retain(|_, call| {
            let Some(buffers) = connections.get_mut(&call.connection) else {
                return false;
            };
            if call.again.is_none() {
                buffers.output.extend(unavailable(call.stream));
                self.ready.insert(call.connection);
            }
            call.again.is_some()
        });
    }

    /// Passes on what has come in whole, if there is a shim.
    fn forward(&mut self, connection: u64) -> Result<(), NoFrame> {
        let (Some(shim), Some(buffers)) = (&mut self.shim, self.connections.get_mut(&connection))
        else {
            return Ok(());
        };
        loop {
            if shim.output.len() >= MAX_AHEAD {
                self.full = true;
                return Ok(());
            }
            let Some(mut frame) = buffers.frame()? else {
                return Ok(());
            };
            // Odd, as a client's are; those of waits may be in use for long.
            let id = loop {
                self.last = self.last.wrapping_add(1) | 1;
                if !self.calls.contains_key(&self.last) {
                    break self.last;
                }
            };
            let call = Call {
                connection,
                stream: stream(&frame),
                again: looks_only(&frame).then(|| frame.clone()),
            };
            self.calls.insert(id, call);
            rename(&mut frame, id);
            shim.output.extend_from_slice(&frame);
        }
    }
}

fn stream(frame: &[u8]) -> u32 {
    let id = frame.get(4..8).and_then(|id| <[u8; 4]>::try_from(id).ok());
    u32::from_be_bytes(id.unwrap_or_default())
}

fn rename(frame: &mut [u8], id: u32) {
    if let Some(place) = frame.get_mut(4..8) {
        place.copy_from_slice(&id.to_be_bytes());
    }
}

fn kind(frame: &[u8]) -> u8 {
    frame.get(8).copied().unwrap_or_default()
}

/// Whether a request's method is one of [`LOOKS`]. Its first two fields are the names of service
/// and method, short strings.
fn looks_only(frame: &[u8]) -> bool {
    fn field(message: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
        let (first, rest) = message.split_first()?;
        let (length, rest) = rest.split_first()?;
        (*first == tag && *length < 0x80).then_some(())?;
        rest.split_at_checked(usize::from(*length))
    }
    let method = frame
        .get(HEADER..)
        .and_then(|payload| field(payload, 0x0a))
        .and_then(|(_service, rest)| field(rest, 0x12))
        .map(|(method, _)| method);
    method.is_some_and(|method| LOOKS.iter().any(|name| name.as_bytes() == method))
}

/// A response whose status is "unavailable".
fn unavailable(stream: u32) -> Vec<u8> {
    const UNAVAILABLE: u8 = 14;
    let text = b"the shim was restarted meanwhile; try again";
    let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap_or_default();
    let mut status = vec![0x08, UNAVAILABLE, 0x12, length(text)];
    status.extend_from_slice(text);
    let mut payload = vec![0x0a, length(&status)];
    payload.extend(status);
    let mut frame = u32::from(length(&payload)).to_be_bytes().to_vec();
    frame.extend(stream.to_be_bytes());
    frame.extend([RESPONSE, 0]);
    frame.extend(payload);
    frame
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::protobuf::Message;
    use containerd_shim_protos::ttrpc::proto::{Request, Response};

    use super::*;

    fn frame(stream: u32, kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes().to_vec();
        frame.extend(stream.to_be_bytes());
        frame.extend([kind, 0]);
        frame.extend(payload);
        frame
    }

    fn request(stream: u32, method: &str) -> Vec<u8> {
        let request = Request {
            service: "containerd.task.v3.Task".into(),
            method: method.into(),
            payload: b"payload".to_vec(),
            ..Default::default()
        };
        frame(stream, 1, &request.write_to_bytes().unwrap())
    }

    fn take(buffers: Option<&mut Buffers>) -> Vec<u8> {
        let buffers = buffers.unwrap();
        let bytes = buffers.output().to_vec();
        buffers.sent(bytes.len());
        bytes
    }

    #[test]
    fn calls_of_several_connections_share_one() {
        let mut relay = Relay::default();
        relay.connect(1);
        relay.connect(2);
        assert_eq!(relay.shim_came(), Vec::<u64>::new());
        // In any pieces.
        for byte in request(5, "Create") {
            relay.request(1, &[byte]).unwrap();
        }
        relay
            .request(2, &[request(5, "Kill"), request(7, "Kill")].concat())
            .unwrap();
        let sent = take(relay.shim());
        assert_eq!(
            sent,
            [request(1, "Create"), request(3, "Kill"), request(5, "Kill")].concat()
        );
        relay
            .answer(&[frame(3, 2, b"b"), frame(1, 2, b"a")].concat())
            .unwrap();
        assert_eq!(take(relay.connection(1)), frame(5, 2, b"a"));
        assert_eq!(take(relay.connection(2)), frame(5, 2, b"b"));
        // Who has left gets nothing, and a second answer is nobody's.
        relay.disconnect(2);
        relay
            .answer(&[frame(5, 2, b"c"), frame(1, 2, b"x")].concat())
            .unwrap();
        assert_eq!(take(relay.connection(1)), b"");
        assert!(relay.calls.is_empty());
    }

    #[test]
    fn a_lost_shim_is_not_missed() {
        let mut relay = Relay::default();
        relay.connect(1);
        // Before there is one, requests wait.
        relay.request(1, &request(1, "Wait")).unwrap();
        relay.shim_came();
        assert_eq!(take(relay.shim()), request(1, "Wait"));
        relay.request(1, &request(3, "Create")).unwrap();
        relay.request(1, &request(5, "State")[..12]).unwrap();
        assert_eq!(take(relay.shim()), request(3, "Create"));
        relay.answer(&frame(3, 2, b"lost")[..7]).unwrap();
        relay.shim_left();
        let refused = take(relay.connection(1));
        assert_eq!(stream(&refused), 3);
        let response = Response::parse_from_bytes(&refused[HEADER..]).unwrap();
        assert_eq!(response.status.code.value(), 14);
        relay.request(1, &request(5, "State")[12..]).unwrap();
        relay.shim_came();
        assert_eq!(
            take(relay.shim()),
            [request(1, "Wait"), request(5, "State")].concat()
        );
        relay.answer(&frame(1, 2, b"end")).unwrap();
        assert_eq!(take(relay.connection(1)), frame(1, 2, b"end"));
    }

    #[test]
    fn no_frame_is_longer_than_ttrpc_has_them() {
        let mut relay = Relay::default();
        relay.connect(1);
        relay.shim_came();
        assert_eq!(relay.request(1, &[0xff; HEADER]), Err(NoFrame));
        assert!(!looks_only(&frame(1, 1, b"\x0a")));
        assert!(!looks_only(&frame(1, 1, b"\x0a\x01x\x12\x7fWait")));
    }

    #[test]
    fn numbers_start_again() {
        let mut relay = Relay {
            last: u32::MAX,
            ..Relay::default()
        };
        relay.connect(1);
        relay.shim_came();
        relay.request(1, &request(1, "Kill")).unwrap();
        assert_eq!(take(relay.shim()), request(1, "Kill"));
    }
}
