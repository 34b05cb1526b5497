//! The host's socket, on descriptor 3: processes are started, signalled and told of by it.
//!
//! One loop waits for signals, for the socket and for children that become their programs, each
//! of which is an event: nothing here waits for one peer while another could go on, and there is
//! no timer. What is to be said is derived from the table of processes whenever the socket takes
//! it, so a host that is silent, blocked, gone or new costs no memory and loses nothing.
//!
//! The host is believed. Whoever takes this process over, as root inside can, gains nothing by
//! the socket: the host believes none of what it says.

mod child;
mod table;
mod tree;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use sandman_agent_protocol::{DESCRIPTOR, Kind, MAX_MESSAGE, Reply, Request, Start, VERSION};

use crate::complain;
use crate::init::{Fatal, signals};
use crate::sys::events::{self, Events, READABLE, WRITABLE};
use crate::sys::process::{self, Ended, Pid, Side};
use crate::sys::{socket, terminal};
use table::{Refusal, Starting, Table};

/// Number of the signals among the events.
const SIGNALS: u64 = 0;
/// Number of the socket.
const SOCKET: u64 = 1;
/// Number of the first child that becomes its program; the others follow.
const FIRST_CHILD: u64 = 2;

/// The host's socket, before anything uses it.
pub(crate) struct Control(OwnedFd);

impl Control {
    /// Takes the socket over, if the runtime has made one.
    pub(crate) fn take() -> Option<Self> {
        socket::take(DESCRIPTOR).map(Self)
    }

    /// Stands for `main` until it has ended, as [`signals::supervise`] does, and does what the
    /// host asks.
    pub(crate) fn supervise(self, main: Pid) -> Result<Ended, Fatal> {
        let supervisor = Supervisor::new(main, self.0);
        process::trim_memory();
        match supervisor {
            Ok(mut supervisor) => loop {
                if let Some(ended) = supervisor.turn()? {
                    return Ok(ended);
                }
            },
            // A seccomp profile without epoll, for example. The host sees the socket's end, and
            // enters by namespaces.
            Err(error) => {
                complain(format_args!(
                    "sandman-daemon: going on without the host's socket: {error}"
                ));
                signals::supervise(main)
            }
        }
    }
}

struct Supervisor {
    main: Pid,
    events: Events,
    signals: OwnedFd,
    socket: Option<Socket>,
    table: Table,
    next_child: u64,
}

struct Socket {
    fd: OwnedFd,
    /// What it is waited for.
    interest: u32,
    /// It did not take the last message.
    full: bool,
}

impl Supervisor {
    fn new(main: Pid, fd: OwnedFd) -> io::Result<Self> {
        let events = Events::new()?;
        let signals = events::signals()?;
        events.add(signals.as_fd(), SIGNALS, READABLE)?;
        events.add(fd.as_fd(), SOCKET, READABLE)?;
        Ok(Self {
            main,
            events,
            signals,
            socket: Some(Socket {
                fd,
                interest: READABLE,
                full: false,
            }),
            table: Table::default(),
            next_child: FIRST_CHILD,
        })
    }

    /// Says what is to be said, waits, and does what is to be done; the end of the command, once
    /// it has ended.
    fn turn(&mut self) -> Result<Option<Ended>, Fatal> {
        self.speak();
        let happened = self.events.wait().map_err(|error| Fatal {
            action: "wait for events",
            error,
        })?;
        for number in happened {
            match number {
                SIGNALS => {
                    if let Some(ended) = self.take_signals()? {
                        return Ok(Some(ended));
                    }
                }
                SOCKET => self.listen(),
                child => self.table.became(child),
            }
        }
        Ok(None)
    }

    fn take_signals(&mut self) -> Result<Option<Ended>, Fatal> {
        let fatal = |action| move |error| Fatal { action, error };
        while let Some(signal) =
            events::next_signal(self.signals.as_fd()).map_err(fatal("take a signal"))?
        {
            if signal != libc::SIGCHLD {
                signals::forward(self.main, signal);
                continue;
            }
            // One SIGCHLD may stand for many ended children.
            while let Some((pid, ended)) = process::reap().map_err(fatal("reap children"))? {
                if pid == self.main {
                    return Ok(Some(ended));
                }
                self.table.ended(pid, ended);
            }
        }
        Ok(None)
    }

    /// Sends what is to be said for as long as the host takes it.
    fn speak(&mut self) {
        let Some(socket) = &mut self.socket else {
            return;
        };
        socket.full = false;
        while let Some(message) = self.table.message() {
            match socket::send(socket.fd.as_fd(), &message.bytes, message.fd) {
                Ok(()) => {
                    let said = message.what;
                    self.table.said(said);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    socket.full = true;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
                // Too many descriptors in flight, or no memory: the next turn tries again, and a
                // terminal that cannot be handed over is a process that cannot be used.
                Err(error) => {
                    complain(format_args!("sandman-daemon: telling the host: {error}"));
                    let said = message.what;
                    self.table.unsayable(said, &error);
                }
            }
        }
        // Requests wait while an answer does: a host that does not read is not worked for.
        let mut interest = 0;
        if !self.table.owes_answer() {
            interest |= READABLE;
        }
        if socket.full {
            interest |= WRITABLE;
        }
        if interest != socket.interest {
            socket.interest = interest;
            if self
                .events
                .change(socket.fd.as_fd(), SOCKET, interest)
                .is_err()
            {
                self.give_up();
            }
        }
    }

    /// Takes one request, or sees the socket's end.
    fn listen(&mut self) {
        let Some(socket) = &self.socket else { return };
        if self.table.owes_answer() {
            return;
        }
        match socket::receive(socket.fd.as_fd(), MAX_MESSAGE) {
            // Nobody holds the other end any more, nor ever will: it has no name.
            Ok(received) if received.bytes.is_empty() => self.give_up(),
            Ok(received) => {
                self.answer(&received.bytes, received.fds);
                if self.table.is_empty() {
                    drop(received.bytes);
                    process::trim_memory();
                }
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {}
                io::ErrorKind::InvalidData => self.table.answer(
                    0,
                    Reply::Refused {
                        kind: Kind::Invalid,
                        text: "a message that is too long".into(),
                    },
                ),
                _ => self.give_up(),
            },
        }
    }

    fn give_up(&mut self) {
        if let Some(socket) = self.socket.take() {
            // The number goes with it in any case.
            drop(self.events.remove(socket.fd.as_fd()));
        }
    }

    fn answer(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) {
        let (number, request) = match Request::decode(bytes) {
            Ok(decoded) => decoded,
            Err(error) => {
                // The number is where it always is, whatever follows.
                let number = bytes.first_chunk().copied().map_or(0, u32::from_le_bytes);
                let refusal = Refusal::new(Kind::Invalid, error.to_string());
                self.table.answer(number, refusal.into());
                return;
            }
        };
        let done = match request {
            Request::Hello { nonce, .. } => {
                self.table.greet();
                Ok(Some(Reply::Hello {
                    version: VERSION,
                    nonce,
                }))
            }
            // Answered once it runs.
            Request::Start(start) => self.start(number, &start, fds).map(|()| None),
            Request::Signal { exec, signal, tree } => self
                .signal(exec, signal.into(), tree)
                .map(|()| Some(Reply::Done)),
            Request::Forget { exec } => self.table.forget(exec).map(|()| Some(Reply::Done)),
        };
        match done {
            Ok(Some(reply)) => self.table.answer(number, reply),
            Ok(None) => {}
            Err(refusal) => self.table.answer(number, refusal.into()),
        }
    }

    fn signal(&self, exec: u64, signal: i32, tree: bool) -> Result<(), Refusal> {
        let pid = self.table.running(exec)?;
        if tree {
            tree::signal(pid, signal);
            return Ok(());
        }
        // Until it is reaped, which only this loop does, the number is its own.
        process::kill(pid, signal).map_err(|error| Refusal::new(Kind::Failed, error.to_string()))
    }

    fn start(&mut self, number: u32, start: &Start<'_>, fds: Vec<OwnedFd>) -> Result<(), Refusal> {
        self.table.room(start.exec)?;
        let unable = |what: &str, error: io::Error| {
            Refusal::new(
                Kind::Unable,
                format!("{what}: {}", crate::init::spawn::lower(&error)),
            )
        };
        let (streams, master) = match (start.terminal, <[OwnedFd; 3]>::try_from(fds)) {
            (None, Ok(streams)) => (streams, None),
            (Some(size), Err(none)) if none.is_empty() => {
                let opened = || -> io::Result<_> {
                    let (master, slave) = terminal::open(size.width, size.height)?;
                    Ok((
                        [slave.try_clone()?, slave.try_clone()?, slave],
                        Some(master),
                    ))
                };
                opened().map_err(|error| unable("open a terminal", error))?
            }
            _ => {
                let words = "three streams, or a terminal and none";
                return Err(Refusal::new(Kind::Invalid, words.into()));
            }
        };
        let (told, tell) = process::pipe().map_err(|error| unable("make a pipe", error))?;
        let key = self.next_child;
        self.next_child += 1;
        self.events
            .add(told.as_fd(), key, READABLE)
            .map_err(|error| unable("wait for a child", error))?;
        match process::fork().map_err(|error| unable("start a process", error))? {
            Side::Child => child::run(start, streams.each_ref().map(AsFd::as_fd), tell.as_fd()),
            Side::Parent(pid) => {
                self.table.begin(Starting {
                    exec: start.exec,
                    number,
                    pid,
                    key,
                    told,
                    master,
                });
                Ok(())
            }
        }
    }
}

/// A message to the host.
struct Message<'a> {
    bytes: Vec<u8>,
    fd: Option<BorrowedFd<'a>>,
    what: table::What,
}
