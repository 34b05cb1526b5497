//! Connections that the kernel tracks. A datagram flow keeps its translation for as long as it
//! goes on, also to an endpoint that is no more; ending its entry lets the next datagram choose.

use std::io;
use std::net::Ipv4Addr;

use super::{Socket, attributes};

const SUBSYSTEM: u16 = 1;
const GET: u16 = 1;
const DELETE: u16 = 2;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
const AF_INET: u8 = 2;
const HEADER: usize = 4;

const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;

/// Where a flow was sent and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::network) struct Flow {
    /// `IPPROTO_*`.
    pub(in crate::network) protocol: u8,
    /// Destination as the sender sees it.
    pub(in crate::network) destination: (Ipv4Addr, u16),
    /// Who answers.
    pub(in crate::network) answers: (Ipv4Addr, u16),
}

/// One end of a flow.
#[derive(Clone, Copy, Debug, Default)]
struct Tuple {
    source: Option<Ipv4Addr>,
    destination: Option<Ipv4Addr>,
    protocol: u8,
    source_port: u16,
    destination_port: u16,
}

impl Socket {
    /// Ends the entries of all flows that are `stale`; gives their number. Those who talk find
    /// a new one with their next packet.
    pub(in crate::network) fn end_flows(
        &mut self,
        stale: impl Fn(&Flow) -> bool,
    ) -> io::Result<usize> {
        let sequence = self.next_sequence();
        let request = message(GET, NLM_F_REQUEST | NLM_F_DUMP, sequence, &[]);
        let mut ended = Vec::new();
        // A torn list misses flows that began or ended meanwhile: those began by the new rules.
        self.dump(&request, sequence, |_, payload| {
            let entry = payload.get(HEADER..).unwrap_or_default();
            if let Some((flow, original)) = read(entry)
                && stale(&flow)
            {
                ended.push(original.to_vec());
            }
            Ok(())
        })?;
        let mut count = 0;
        for original in ended {
            let sequence = self.next_sequence();
            let tuple = nested(TUPLE_ORIGINAL, &original);
            let request = message(DELETE, NLM_F_REQUEST | NLM_F_ACK, sequence, &tuple);
            match self.transact(&request, sequence) {
                Ok(()) => count += 1,
                // It ended by itself.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(count)
    }
}

/// The flow, and its original tuple as the kernel wrote it.
fn read(entry: &[u8]) -> Option<(Flow, &[u8])> {
    let mut original = None;
    let mut reply = None;
    for (kind, value) in attributes(entry) {
        match kind {
            TUPLE_ORIGINAL => original = Some(value),
            TUPLE_REPLY => reply = Some(value),
            _ => {}
        }
    }
    let bytes = original?;
    let (original, reply) = (tuple(bytes), tuple(reply?));
    let flow = Flow {
        protocol: original.protocol,
        destination: (original.destination?, original.destination_port),
        answers: (reply.source?, reply.source_port),
    };
    Some((flow, bytes))
}

fn tuple(nested: &[u8]) -> Tuple {
    let mut tuple = Tuple::default();
    let address = |value: &[u8]| value.first_chunk::<4>().map(|&bytes| bytes.into());
    let port = |value: &[u8]| value.first_chunk().map_or(0, |&b| u16::from_be_bytes(b));
    for (kind, value) in attributes(nested) {
        for (inner, value) in attributes(value) {
            match (kind, inner) {
                (TUPLE_IP, 1) => tuple.source = address(value),
                (TUPLE_IP, 2) => tuple.destination = address(value),
                (TUPLE_PROTOCOL, 1) => tuple.protocol = value.first().copied().unwrap_or(0),
                (TUPLE_PROTOCOL, 2) => tuple.source_port = port(value),
                (TUPLE_PROTOCOL, 3) => tuple.destination_port = port(value),
                _ => {}
            }
        }
    }
    tuple
}

fn nested(kind: u16, value: &[u8]) -> Vec<u8> {
    const NLA_F_NESTED: u16 = 0x8000;
    // A tuple has less than a hundred bytes.
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend_from_slice(&(kind | NLA_F_NESTED).to_ne_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn message(kind: u16, flags: u16, sequence: u32, content: &[u8]) -> Vec<u8> {
    // One tuple at most.
    let length = u32::try_from(16 + HEADER + content.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend_from_slice(&(SUBSYSTEM << 8 | kind).to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&sequence.to_ne_bytes());
    bytes.extend_from_slice(&[0; 4]);
    // nfgenmsg: family, version, resource id.
    bytes.extend_from_slice(&[AF_INET, 0, 0, 0]);
    bytes.extend_from_slice(content);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        nested(kind, value)
    }

    #[test]
    fn reads_flows_and_survives_torn_ones() {
        let side = |addresses: [[u8; 4]; 2], ports: [u16; 2]| {
            let ip = [attribute(1, &addresses[0]), attribute(2, &addresses[1])].concat();
            let protocol = [
                attribute(1, &[17]),
                attribute(2, &ports[0].to_be_bytes()),
                attribute(3, &ports[1].to_be_bytes()),
            ]
            .concat();
            [
                attribute(TUPLE_IP, &ip),
                attribute(TUPLE_PROTOCOL, &protocol),
            ]
            .concat()
        };
        let original = side([[10, 64, 0, 2], [10, 96, 0, 10]], [5000, 53]);
        let reply = side([[10, 64, 0, 9], [10, 64, 0, 2]], [5353, 5000]);
        let bytes = [
            attribute(TUPLE_ORIGINAL, &original),
            attribute(TUPLE_REPLY, &reply),
        ]
        .concat();
        let (flow, tuple) = read(&bytes).unwrap();
        assert_eq!(tuple, original);
        assert_eq!(
            flow,
            Flow {
                protocol: 17,
                destination: ([10, 96, 0, 10].into(), 53),
                answers: ([10, 64, 0, 9].into(), 5353),
            }
        );
        for length in 0..bytes.len() {
            let _ = read(&bytes[..length]);
        }
        assert!(read(&bytes[..original.len() + 4]).is_none());
    }
}
