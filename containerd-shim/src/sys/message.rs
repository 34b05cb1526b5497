//! Datagrams with descriptors and process ids beside them.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    UnixCredentials, recvmsg, sendmsg, setsockopt, socketpair, sockopt,
};

use crate::holder::protocol::MAX_FDS;

/// A received datagram.
#[derive(Debug)]
pub struct Received {
    /// Bytes of it in the buffer; 0 when the peer has closed.
    pub length: usize,
    /// Descriptors, close-on-exec.
    pub fds: Vec<OwnedFd>,
    /// Process named by the sender, as it is numbered here. Only on sockets with [`name_processes`].
    pub pid: Option<i32>,
}

/// A connected pair of datagram sockets that keep order and boundaries and see the peer's end.
///
/// # Errors
/// Out of descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Has the kernel translate process ids that arrive on `fd` into this process's PID namespace.
///
/// # Errors
/// `fd` is no unix socket.
pub fn name_processes(fd: &OwnedFd) -> io::Result<()> {
    Ok(setsockopt(fd, sockopt::PassCred, &true)?)
}

/// Sends one datagram; never raises SIGPIPE.
///
/// # Errors
/// `WouldBlock` on a full non-blocking socket; `EPIPE` once the peer has closed.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[RawFd], pid: Option<i32>) -> io::Result<()> {
    let credentials = pid.map(|pid| {
        // The kernel checks these too: ours are the only ones that need no further right.
        UnixCredentials::from(libc::ucred {
            pid,
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
        })
    });
    let mut control = Vec::with_capacity(2);
    if !fds.is_empty() {
        control.push(ControlMessage::ScmRights(fds));
    }
    if let Some(credentials) = &credentials {
        control.push(ControlMessage::ScmCredentials(credentials));
    }
    loop {
        let sent = sendmsg::<()>(
            fd.as_raw_fd(),
            &[IoSlice::new(bytes)],
            &control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        );
        match sent {
            Err(Errno::EINTR) => {}
            other => return other.map(drop).map_err(io::Error::from),
        }
    }
}

/// Receives one datagram into `buffer`.
///
/// # Errors
/// `WouldBlock` when there is none on a non-blocking socket; `InvalidData` when one did not fit,
/// in which case nothing of it is kept.
pub fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = nix::cmsg_space!([RawFd; MAX_FDS], UnixCredentials);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = loop {
        let got = recvmsg::<()>(
            fd.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        );
        match got {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    let mut received = Received {
        length: message.bytes,
        fds: Vec::new(),
        pid: None,
    };
    let whole = !message
        .flags
        .intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
    for control in message.cmsgs().map_err(io::Error::from)? {
        match control {
            ControlMessageOwned::ScmRights(fds) => {
                // SAFETY: the kernel has just installed these for us; nobody else knows them.
                let owned = fds
                    .into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
                received.fds.extend(owned);
            }
            ControlMessageOwned::ScmCredentials(sender) if sender.pid() > 0 => {
                received.pid = Some(sender.pid());
            }
            _ => {}
        }
    }
    if whole {
        Ok(received)
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a datagram longer than allowed",
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn descriptors_travel() {
        let (a, b) = pair().unwrap();
        let (reader, writer) = nix::unistd::pipe().unwrap();
        send(a.as_fd(), b"hi", &[writer.as_raw_fd()], None).unwrap();
        drop(writer);
        let mut buffer = [0; 8];
        let mut got = receive(b.as_fd(), &mut buffer).unwrap();
        assert_eq!(&buffer[..got.length], b"hi");
        File::from(got.fds.remove(0)).write_all(b"x").unwrap();
        let mut text = String::new();
        File::from(reader).read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn the_end_is_seen_and_too_much_is_refused() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &[7; 9], &[a.as_raw_fd()], None).unwrap();
        let error = receive(b.as_fd(), &mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(a);
        assert_eq!(receive(b.as_fd(), &mut [0; 8]).unwrap().length, 0);
        assert_eq!(
            send(b.as_fd(), b"x", &[], None).unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }

    #[test]
    fn a_named_process_arrives() {
        let (a, b) = pair().unwrap();
        name_processes(&b).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        send(a.as_fd(), b"x", &[], Some(own)).unwrap();
        assert_eq!(receive(b.as_fd(), &mut [0; 8]).unwrap().pid, Some(own));
    }
}
