//! The sockets of a [`Relay`]: where containerd connects, its connections, and the shim's one. Also
//! how the shim is started again when it is gone.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nix::sys::socket::{MsgFlags, SockFlag, accept4, recv, send};

use super::relay::Relay;
use super::spawn;

/// Token of the listening socket.
const LISTENER: u64 = 3;
/// Token of the shim's connection.
const SHIM: u64 = 4;
/// Connections count up from here, far above the holder's own clients.
const FIRST_CONNECTION: u64 = 1 << 32;
/// Read at a time.
const CHUNK: usize = 64 * 1024;
/// Longest pause before a shim that does not come up is started again.
const LONGEST: Duration = Duration::from_secs(5);

/// How to start a shim.
#[derive(Debug, Default)]
pub(super) struct Command {
    /// Program and arguments; none if somebody else does it.
    pub(super) argv: Vec<Vec<u8>>,
    /// Its environment.
    pub(super) env: Vec<Vec<u8>>,
    /// Its stderr.
    pub(super) log: Option<OwnedFd>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Front {
    relay: Relay,
    listener: OwnedFd,
    sockets: HashMap<u64, OwnedFd>,
    shim: Option<OwnedFd>,
    next: u64,
    command: Command,
    /// The shim that was started from here, until it has been reaped.
    pid: Option<i32>,
    pause: Duration,
    due: Option<Instant>,
    /// It ends because it wants to.
    retired: bool,
    /// There was no descriptor for one more connection.
    full: bool,
    /// A connection has been closed since.
    left: bool,
}

impl Front {
    /// Serves `listener`.
    pub(super) fn new(epoll: &Epoll, listener: OwnedFd) -> io::Result<Self> {
        non_blocking(&listener)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
        Ok(Self {
            relay: Relay::default(),
            listener,
            sockets: HashMap::new(),
            shim: None,
            next: FIRST_CONNECTION,
            command: Command::default(),
            pid: None,
            pause: Duration::ZERO,
            due: None,
            retired: false,
            full: false,
            left: false,
        })
    }

    /// A shim serves `socket` from now on, and is started again by `command`.
    pub(super) fn shim_came(
        &mut self,
        epoll: &Epoll,
        socket: OwnedFd,
        command: Command,
    ) -> io::Result<()> {
        non_blocking(&socket)?;
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, SHIM))?;
        // Closing the old one takes it out of the epoll.
        self.shim = Some(socket);
        self.command = command;
        (self.pause, self.due, self.retired) = (Duration::ZERO, None, false);
        for connection in self.relay.shim_came() {
            self.close(connection);
        }
        Ok(())
    }

    /// The shim says that nobody needs it any more.
    pub(super) fn retire(&mut self) {
        self.retired = true;
    }

    /// The shim's process has ended.
    pub(super) fn reaped(&mut self) {
        self.pid = None;
    }

    /// Whether the process `pid` is the shim.
    pub(super) fn is_shim(&self, pid: i32) -> bool {
        self.pid == Some(pid)
    }

    /// Whether somebody is connected whom a shim could serve.
    pub(super) fn is_used(&self) -> bool {
        !self.retired && !self.sockets.is_empty()
    }

    /// Starts the shim unless it is there or on its way; `needed` unless nothing would miss it.
    /// Returns how long to wait before looking again, if that is so.
    pub(super) fn revive(&mut self, needed: bool, nofile: (u64, u64)) -> Option<Duration> {
        if self.retired || !needed || self.pid.is_some() || self.command.argv.is_empty() {
            return None;
        }
        let now = Instant::now();
        let due = *self.due.get_or_insert(now);
        if due > now {
            return Some(due - now);
        }
        self.pause = (self.pause * 2).clamp(Duration::from_millis(50), LONGEST);
        self.due = Some(now + self.pause);
        self.pid = self.start(nofile).ok();
        // One that cannot even be started gives no sign of its end.
        self.pid.is_none().then_some(self.pause)
    }

    fn start(&self, nofile: (u64, u64)) -> io::Result<i32> {
        let null = || {
            std::fs::File::options()
                .read(true)
                .write(true)
                .open("/dev/null")
        };
        let log = match &self.command.log {
            Some(log) => log.try_clone()?,
            None => null()?.into(),
        };
        let fds = vec![null()?.into(), null()?.into(), log];
        let (argv, env) = (self.command.argv.clone(), self.command.env.clone());
        spawn::start(argv, env, b"/".to_vec(), fds, nofile)
    }

    /// Whether events of this token are its own.
    pub(super) fn owns(&self, token: u64) -> bool {
        token == LISTENER || token == SHIM || token >= FIRST_CONNECTION
    }

    /// Something can be done with one of the sockets.
    pub(super) fn hear(&mut self, epoll: &Epoll, token: u64, what: EpollFlags) -> io::Result<()> {
        match token {
            LISTENER => self.accept(epoll)?,
            SHIM => self.hear_shim(),
            connection => {
                if what.contains(EpollFlags::EPOLLOUT) {
                    self.relay.mark_ready(connection);
                }
                self.hear_connection(connection);
            }
        }
        Ok(())
    }

    /// Takes whoever connects.
    fn accept(&mut self, epoll: &Epoll) -> io::Result<()> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = match accept4(&self.listener, flags) {
            Ok(socket) => socket,
            // Whoever knocks waits until somebody leaves.
            Err(Errno::EMFILE | Errno::ENFILE) => {
                self.full = true;
                let none = EpollFlags::empty();
                let mut event = EpollEvent::new(none, LISTENER);
                return Ok(epoll.modify(&self.listener, &mut event)?);
            }
            // Gone again.
            Err(_) => return Ok(()),
        };
        let connection = self.next;
        self.next += 1;
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, connection))?;
        self.sockets.insert(connection, socket);
        self.relay.connect(connection);
        Ok(())
    }

    fn hear_connection(&mut self, connection: u64) {
        let Some(socket) = self.sockets.get(&connection) else {
            return;
        };
        let relay = &mut self.relay;
        if !read_all(socket, |bytes| relay.request(connection, bytes).is_ok()) {
            self.close(connection);
        }
    }

    fn hear_shim(&mut self) {
        let Some(socket) = &self.shim else { return };
        let relay = &mut self.relay;
        if !read_all(socket, |bytes| relay.answer(bytes).is_ok()) {
            self.shim_left();
        }
    }

    fn shim_left(&mut self) {
        self.shim = None;
        self.relay.shim_left();
    }

    fn close(&mut self, connection: u64) {
        self.sockets.remove(&connection);
        self.relay.disconnect(connection);
        self.left = true;
    }

    /// Sends what waits, as far as it is taken.
    pub(super) fn speak(&mut self, epoll: &Epoll) {
        if std::mem::take(&mut self.left) && std::mem::take(&mut self.full) {
            let mut event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER);
            // It fails for no listener that is open.
            self.full = epoll.modify(&self.listener, &mut event).is_err();
        }
        for connection in self.relay.take_ready() {
            let (Some(socket), Some(buffers)) = (
                self.sockets.get(&connection),
                self.relay.connection(connection),
            ) else {
                continue;
            };
            let sent = write_some(socket, buffers.output());
            let waits = sent.map(|count| {
                buffers.sent(count);
                !buffers.output().is_empty()
            });
            if waits.is_none_or(|waits| !want(epoll, socket, connection, waits)) {
                self.close(connection);
            }
        }
        loop {
            let (Some(socket), Some(buffers)) = (&self.shim, self.relay.shim()) else {
                return;
            };
            if buffers.output().is_empty() {
                return;
            }
            let Some(count) = write_some(socket, buffers.output()) else {
                return self.shim_left();
            };
            buffers.sent(count);
            let waits = !buffers.output().is_empty();
            if !want(epoll, socket, SHIM, waits) {
                return self.shim_left();
            }
            for connection in self.relay.resume() {
                self.close(connection);
            }
            if waits {
                return;
            }
        }
    }
}

/// Reads until there is no more for now; false once the connection is of no more use.
fn read_all(socket: &OwnedFd, mut take: impl FnMut(&[u8]) -> bool) -> bool {
    let mut buffer = [0; CHUNK];
    loop {
        match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            Err(Errno::EAGAIN) => return true,
            Err(Errno::EINTR) => {}
            Ok(count @ 1..) if take(&buffer[..count]) => {
                // The rest comes with the next event: others wait too.
                if count < buffer.len() {
                    return true;
                }
            }
            Ok(_) | Err(_) => return false,
        }
    }
}

/// Writes until no more is taken for now; none once the connection is of no more use.
fn write_some(socket: &OwnedFd, bytes: &[u8]) -> Option<usize> {
    let mut sent = 0;
    while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
        match send(socket.as_raw_fd(), rest, MsgFlags::MSG_NOSIGNAL) {
            Ok(count) => sent += count,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => break,
            Err(_) => return None,
        }
    }
    Some(sent)
}

/// Has the epoll tell when more can be written, or no longer.
fn want(epoll: &Epoll, socket: &OwnedFd, token: u64, waits: bool) -> bool {
    let mut interest = EpollFlags::EPOLLIN;
    interest.set(EpollFlags::EPOLLOUT, waits);
    epoll
        .modify(socket, &mut EpollEvent::new(interest, token))
        .is_ok()
}

fn non_blocking(fd: &OwnedFd) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_truncate(fcntl(fd.as_fd(), FcntlArg::F_GETFL)?);
    fcntl(fd.as_fd(), FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
