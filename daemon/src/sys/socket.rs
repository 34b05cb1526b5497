//! Datagrams with descriptors beside them.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use super::check;

/// Most descriptors of a message.
const MAX_FDS: usize = 3;
/// Room for them as ancillary data, aligned as that wants it.
type Space = [u64; 8];

/// A received message.
pub(crate) struct Received {
    /// Its bytes; none once the peer has closed its end.
    pub(crate) bytes: Vec<u8>,
    /// What came along, close-on-exec.
    pub(crate) fds: Vec<OwnedFd>,
}

/// Takes over descriptor `number` if it is one end of a connected pair of local sockets that keep
/// boundaries and order, and closes it to programs that are run from now on.
pub(crate) fn take(number: i32) -> Option<OwnedFd> {
    let option = |name| {
        let mut value: libc::c_int = 0;
        let mut length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `value` has the room that `length` says; a bad number only returns an error.
        let got = check(unsafe {
            libc::getsockopt(
                number,
                libc::SOL_SOCKET,
                name,
                (&raw mut value).cast(),
                &raw mut length,
            )
        });
        got.ok().map(|_| value)
    };
    if option(libc::SO_DOMAIN)? != libc::AF_UNIX || option(libc::SO_TYPE)? != libc::SOCK_SEQPACKET {
        return None;
    }
    // SAFETY: a structure of plain numbers, for which zero is valid.
    let mut name: libc::sockaddr_un = unsafe { mem::zeroed() };
    let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: `name` has the room that `length` says.
    let peer = unsafe { libc::getpeername(number, (&raw mut name).cast(), &raw mut length) };
    check(peer).ok()?;
    // SAFETY: takes numbers.
    check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) }).ok()?;
    // SAFETY: it is open, and the runtime made it for this process: nobody else here owns it.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Takes one message without waiting; no longer one than `max` bytes.
///
/// # Errors
/// `WouldBlock` when there is none; `InvalidData` when it was longer or had too many descriptors.
pub(crate) fn receive(socket: BorrowedFd<'_>, max: usize) -> io::Result<Received> {
    // Its length first: the buffer is not kept, and a sandbox is not to pay for the longest.
    let flags = libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    // SAFETY: no byte is written to the null buffer of no length.
    let length = unsafe { libc::recv(socket.as_raw_fd(), ptr::null_mut(), 0, flags) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    let mut bytes = vec![0; length.min(max)];
    let mut space: Space = [0; 8];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: a structure of numbers and pointers, for which zero is valid.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = space.as_mut_ptr().cast();
    // SAFETY: computes a number. The room is for exactly so many descriptors.
    let room = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<libc::c_int>()) as u32) } as usize;
    header.msg_controllen = room.min(size_of::<Space>());
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: everything that the header points to is alive and as long as it says.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    bytes.truncate(got);
    let fds = descriptors(&header);
    if length > max || header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Received { bytes, fds })
}

fn descriptors(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the header is as the kernel left it, and its buffer is alive.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !control.is_null() {
        // SAFETY: a header within the buffer, by the macro that found it.
        let (level, kind, length) = unsafe {
            (
                (*control).cmsg_level,
                (*control).cmsg_type,
                (*control).cmsg_len,
            )
        };
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            // SAFETY: computes a number.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = length.saturating_sub(head) / size_of::<libc::c_int>();
            for place in 0..count {
                // SAFETY: `count` descriptors follow the header; the kernel installed them for
                // us, and nobody else knows them.
                let fd = unsafe {
                    let data = libc::CMSG_DATA(control).cast::<libc::c_int>();
                    OwnedFd::from_raw_fd(data.add(place).read_unaligned())
                };
                fds.push(fd);
            }
        }
        // SAFETY: as above.
        control = unsafe { libc::CMSG_NXTHDR(header, control) };
    }
    fds
}

/// Sends one message without waiting.
///
/// # Errors
/// `WouldBlock` when the peer reads too slowly, `BrokenPipe` when it is gone.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space: Space = [0; 8];
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: a structure of numbers and pointers, for which zero is valid.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    if let Some(fd) = fd {
        header.msg_control = space.as_mut_ptr().cast();
        // SAFETY: the space is larger than a header and one descriptor, and aligned for both.
        unsafe {
            header.msg_controllen = libc::CMSG_SPACE(size_of::<libc::c_int>() as u32) as usize;
            let control = libc::CMSG_FIRSTHDR(&header);
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(size_of::<libc::c_int>() as u32) as usize;
            libc::CMSG_DATA(control)
                .cast::<libc::c_int>()
                .write_unaligned(fd.as_raw_fd());
        }
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: everything that the header points to is alive and as long as it says; the bytes
    // are only read.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags) };
    usize::try_from(sent)
        .map(drop)
        .map_err(|_| io::Error::last_os_error())
}
