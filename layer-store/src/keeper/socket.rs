//! Packets with descriptors over Unix sockets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::protocol::MAX_MESSAGE;

/// A packet that came in.
#[derive(Debug)]
pub(super) struct Packet {
    bytes: [u8; MAX_MESSAGE],
    length: usize,
    /// The descriptor that came with it.
    pub fd: Option<OwnedFd>,
}

impl Packet {
    /// What it says.
    #[must_use]
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// A new listening socket at `path`, for the owner alone. What is there is replaced.
///
/// # Errors
/// Those of `bind(2)` and of removing the old one.
pub(super) fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = new_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    // The directory keeps others out; the mode does so too.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 16)?;
    Ok(socket)
}

/// Connects to the socket at `path`.
///
/// # Errors
/// Those of `connect(2)`: `NotFound` and `ConnectionRefused` when nobody listens.
pub(super) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(SocketFlags::CLOEXEC)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(family, kind, flags, None)?)
}

/// The next client of a listening socket, if one waits and is of our own user.
///
/// # Errors
/// Those of `accept(2)`.
pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = match rustix::net::accept_with(listener, flags) {
        Ok(socket) => socket,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    Ok((peer.uid == rustix::process::geteuid()).then_some(socket))
}

/// Sends one packet.
///
/// # Errors
/// `WouldBlock` on a full non-blocking socket, `BrokenPipe` when the peer is gone.
pub(super) fn send(socket: impl AsFd, packet: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(packet)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// The next packet; none at the end of the connection.
///
/// # Errors
/// `WouldBlock` on an empty non-blocking socket, `InvalidData` for what is no message.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<Packet>> {
    let mut packet = Packet {
        bytes: [0; MAX_MESSAGE],
        length: 0,
        fd: None,
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut packet.bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            packet.fd = fds.last();
        }
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the packet is longer than any message",
        ));
    }
    packet.length = received.bytes;
    Ok((received.bytes > 0).then_some(packet))
}
