//! A synchronous netlink socket. Synchronous because a socket belongs to the
//! namespace of the thread that opened it, and such threads are short-lived.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, sendto,
    setsockopt, socket, sockopt,
};

pub(super) mod conntrack;
pub(super) mod route;

/// The kernel sends at most 32 KiB in one datagram.
const RECEIVE_BYTES: usize = 64 << 10;
/// Dumps of many thousand links queue up faster than they are read.
const RECEIVE_QUEUE_BYTES: usize = 8 << 20;
const SEND_QUEUE_BYTES: usize = 8 << 20;

const HEADER_LEN: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_DUMP_INTR: u16 = 0x10;

/// An open socket in the namespace that was current when it was opened.
pub(super) struct Socket {
    fd: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

/// One received message: its type and what follows the header.
struct Received<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    payload: &'a [u8],
}

impl Socket {
    /// For links, addresses and routes.
    pub(super) fn route() -> io::Result<Self> {
        Self::open(SockProtocol::NetlinkRoute)
    }

    /// For nftables.
    pub(super) fn netfilter() -> io::Result<Self> {
        let socket = Self::open(SockProtocol::NetlinkNetFilter)?;
        // A whole table is one datagram.
        setsockopt(&socket.fd, sockopt::SndBufForce, &SEND_QUEUE_BYTES)
            .or_else(|_| setsockopt(&socket.fd, sockopt::SndBuf, &SEND_QUEUE_BYTES))?;
        Ok(socket)
    }

    fn open(protocol: SockProtocol) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(&fd, sockopt::RcvBufForce, &RECEIVE_QUEUE_BYTES)
            .or_else(|_| setsockopt(&fd, sockopt::RcvBuf, &RECEIVE_QUEUE_BYTES))?;
        Ok(Self {
            fd,
            sequence: 0,
            buffer: vec![0; RECEIVE_BYTES],
        })
    }

    /// A sequence number for the next message.
    pub(super) fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Sends one datagram and waits until the message numbered `last` is
    /// acknowledged; the first error of any message ends the wait.
    pub(super) fn transact(&mut self, datagram: &[u8], last: u32) -> io::Result<()> {
        self.send(datagram)?;
        loop {
            let length = recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::empty())?;
            for message in messages(&self.buffer[..length]) {
                let message = message?;
                if message.kind != NLMSG_ERROR {
                    continue;
                }
                match error_code(message.payload)? {
                    0 if message.sequence == last => return Ok(()),
                    0 => {}
                    code => return Err(io::Error::from_raw_os_error(-code)),
                }
            }
        }
    }

    /// Sends a request for objects and hands each answer's type and payload on.
    /// Returns false if the table changed meanwhile and the dump may be torn.
    pub(super) fn dump(
        &mut self,
        datagram: &[u8],
        sequence: u32,
        mut each: impl FnMut(u16, &[u8]) -> io::Result<()>,
    ) -> io::Result<bool> {
        self.send(datagram)?;
        let mut consistent = true;
        loop {
            let length = recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::empty())?;
            for message in messages(&self.buffer[..length]) {
                let message = message?;
                if message.sequence != sequence {
                    continue;
                }
                consistent &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.kind {
                    NLMSG_DONE => return Ok(consistent),
                    NLMSG_ERROR => match error_code(message.payload)? {
                        0 => return Ok(consistent),
                        code => return Err(io::Error::from_raw_os_error(-code)),
                    },
                    kind => each(kind, message.payload)?,
                }
            }
        }
    }

    fn send(&self, datagram: &[u8]) -> io::Result<()> {
        let kernel = NetlinkAddr::new(0, 0);
        sendto(self.fd.as_raw_fd(), datagram, &kernel, MsgFlags::empty())?;
        Ok(())
    }
}

/// Splits a datagram into its messages.
fn messages(mut rest: &[u8]) -> impl Iterator<Item = io::Result<Received<'_>>> {
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let torn = || {
            Some(Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "torn netlink message",
            )))
        };
        let Some((header, _)) = rest.split_first_chunk::<HEADER_LEN>() else {
            rest = &[];
            return torn();
        };
        let [l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, ..] = *header;
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let Some(payload) = rest.get(HEADER_LEN..length) else {
            rest = &[];
            return torn();
        };
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some(Ok(Received {
            kind: u16::from_ne_bytes([k0, k1]),
            flags: u16::from_ne_bytes([f0, f1]),
            sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
            payload,
        }))
    })
}

/// Attributes of a message, up to the first that is torn.
pub(super) fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let [l0, l1, k0, k1] = *rest.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([k0, k1]) & 0x3fff, value))
    })
}

fn error_code(payload: &[u8]) -> io::Result<i32> {
    let code = payload.first_chunk::<4>().copied().map(i32::from_ne_bytes);
    code.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "torn netlink error"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_datagrams_and_survives_torn_ones() {
        let mut datagram = Vec::new();
        for (kind, payload) in [(1_u16, &b"abc"[..]), (2, b"")] {
            datagram.extend_from_slice(&(16 + payload.len() as u32).to_ne_bytes());
            datagram.extend_from_slice(&kind.to_ne_bytes());
            datagram.extend_from_slice(&[0; 10]);
            datagram.extend_from_slice(payload);
            datagram.resize(datagram.len().next_multiple_of(4), 0);
        }
        let kinds: Vec<_> = messages(&datagram)
            .map(|message| message.unwrap().kind)
            .collect();
        assert_eq!(kinds, [1, 2]);
        assert!(messages(&datagram[..10]).next().unwrap().is_err());
        datagram[0] = 255;
        assert!(messages(&datagram).next().unwrap().is_err());
        datagram[0] = 3;
        assert!(messages(&datagram).next().unwrap().is_err());
    }
}
