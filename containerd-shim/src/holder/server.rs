//! The holder's event loop: a listener, one client, the zygote and SIGCHLD.

use std::collections::VecDeque;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, listen, socket,
};

use super::front::{Command, Front};
use super::protocol::{CloneHeader, Code, Exit, Key, MAX_MESSAGE, Reply, Request, Slot, VERSION};
use super::registry::{Refusal, Registry};
use super::spawn;
use super::world::{Anchor, Origin, Zygote};
use crate::sys::process::{self, Whose};
use crate::sys::{message, privileges};
use crate::wire::Writer;

/// Name of the socket in the holder's folder.
pub const SOCKET: &str = "holder.sock";
const LOCK: &str = "holder.lock";
/// Answers that may wait for a client that does not read, before its requests wait too.
const MAX_WAITING: usize = 256;

const LISTENER: u64 = 0;
const CHILDREN: u64 = 1;
const ZYGOTE: u64 = 2;
/// Clients count up from here: an event of one that was cut off must not meet its successor.
const FIRST_CLIENT: u64 = 16;

/// What came of a request that is answered at once.
type Answered = Result<(), Refusal>;

/// A launch on its way to the zygote.
struct Launch {
    key: Key,
    /// Whom to answer: the client's token and the request's number.
    asked: (u64, u32),
    header: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// Something to say to the client; what may be large is made when it is sent.
enum Outgoing {
    Reply(u32, Reply),
    Entry(u32, Key, bool),
    Exit(Key),
}

struct Client {
    token: u64,
    socket: OwnedFd,
    welcome: bool,
    outgoing: VecDeque<Outgoing>,
    interest: EpollFlags,
}

struct Holder {
    epoll: Epoll,
    front: Option<Front>,
    listener: OwnedFd,
    children: SignalFd,
    origin: Origin,
    anchor: Anchor,
    zygote: Option<Zygote>,
    client: Option<Client>,
    next_token: u64,
    registry: Registry<OwnedFd>,
    queue: VecDeque<Launch>,
    in_flight: Option<Launch>,
    buffer: Vec<u8>,
    _lock: Flock<File>,
}

/// Serves the folder `directory` until its client has left and no key is left. Calls `ready` once
/// clients can connect. A client that loses its connection to that finds the socket gone, and
/// starts another holder.
///
/// # Errors
/// `AddrInUse` when another holder serves the folder; otherwise what kept it from starting, or an
/// error of the event loop itself, which does not occur.
pub fn serve(
    directory: &Path,
    program: File,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let mut holder = Holder::start(directory, program)?;
    ready()?;
    holder.run()?;
    // While the lock is ours: the next holder's socket has the same name.
    std::fs::remove_file(directory.join(SOCKET))
}

impl Holder {
    fn start(directory: &Path, program: File) -> io::Result<Self> {
        let lock = lock(directory)?;
        let nofile = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, nofile.1, nofile.1)?;
        privileges::become_subreaper()?;
        privileges::set_undumpable()?;

        let mut chld = SigSet::empty();
        chld.add(Signal::SIGCHLD);
        chld.thread_block()?;
        let children = SignalFd::with_flags(&chld, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;

        let origin = Origin { program, nofile };
        let anchor = Anchor::start()?;
        let zygote = Zygote::start(&origin, &anchor)?;
        let listener = listener(&directory.join(SOCKET))?;

        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
        epoll.add(&children, EpollEvent::new(EpollFlags::EPOLLIN, CHILDREN))?;
        epoll.add(&zygote.socket, EpollEvent::new(EpollFlags::EPOLLIN, ZYGOTE))?;
        Ok(Self {
            epoll,
            front: None,
            listener,
            children,
            origin,
            anchor,
            zygote: Some(zygote),
            client: None,
            next_token: FIRST_CLIENT,
            registry: Registry::default(),
            queue: VecDeque::new(),
            in_flight: None,
            buffer: vec![0; MAX_MESSAGE],
            _lock: lock,
        })
    }

    fn run(&mut self) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); 64];
        let mut timeout = EpollTimeout::NONE;
        loop {
            let count = match self.epoll.wait(&mut events, timeout) {
                Err(Errno::EINTR) => 0,
                other => other?,
            };
            for event in &events[..count] {
                match event.data() {
                    LISTENER => self.accept()?,
                    CHILDREN => {
                        while matches!(self.children.read_signal(), Ok(Some(_))) {}
                        self.reap()?;
                    }
                    ZYGOTE => self.hear_zygote()?,
                    token => match &mut self.front {
                        Some(front) if front.owns(token) => {
                            front.hear(&self.epoll, token, event.events())?;
                        }
                        _ => self.hear_client(token),
                    },
                }
            }
            // What follows from the events, whatever they were.
            self.send_launch();
            self.speak();
            if self.is_done() {
                return Ok(());
            }
            timeout = match self.tend_front() {
                Some(wait) => EpollTimeout::try_from(wait).unwrap_or(EpollTimeout::MAX),
                None => EpollTimeout::NONE,
            };
        }
    }

    /// Whether nobody needs this holder any more: it had clients, the last one has left, and there
    /// is nothing that the next one could miss.
    fn is_done(&self) -> bool {
        let served = self.next_token > FIRST_CLIENT;
        let idle = self.queue.is_empty() && self.in_flight.is_none();
        let used = self.front.as_ref().is_some_and(Front::is_used);
        served && self.client.is_none() && idle && !used && !self.keeps_any()
    }

    fn keeps_any(&self) -> bool {
        self.registry.keys().next().is_some()
    }

    /// Sends what containerd and the shim have for each other, and sees to it that there is a shim.
    /// Returns how soon to look again.
    fn tend_front(&mut self) -> Option<Duration> {
        let keeps_any = self.keeps_any();
        let front = self.front.as_mut()?;
        front.speak(&self.epoll);
        if self.client.is_some() {
            return None;
        }
        let needed = keeps_any || front.is_used();
        front.revive(needed, self.origin.nofile)
    }

    fn front(&mut self, argv: Vec<Vec<u8>>, env: Vec<Vec<u8>>, fds: Vec<OwnedFd>) -> Answered {
        let mut fds = fds.into_iter();
        let (Some(shim), Some(log)) = (fds.next(), fds.next()) else {
            return Err((Code::Invalid, "Front takes two descriptors or three"));
        };
        let failed = |_| (Code::System, "serving the sockets");
        if let Some(listener) = fds.next() {
            // containerd has nobody at an older one: its name is gone.
            self.front = Some(Front::new(&self.epoll, listener).map_err(failed)?);
        }
        let Some(front) = &mut self.front else {
            return Err((Code::NotFound, "there is no listening socket yet"));
        };
        let command = Command {
            argv,
            env,
            log: Some(log),
        };
        front.shim_came(&self.epoll, shim, command).map_err(failed)
    }

    fn accept(&mut self) -> io::Result<()> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let Ok(socket) = accept4(&self.listener, flags) else {
            // It has gone again, or there is no descriptor: the next one may do better.
            return Ok(());
        };
        let token = self.next_token;
        self.next_token += 1;
        let interest = EpollFlags::EPOLLIN;
        self.epoll.add(&socket, EpollEvent::new(interest, token))?;
        // Dropping the predecessor closes its socket, which tells it.
        self.client = Some(Client {
            token,
            socket,
            welcome: false,
            outgoing: VecDeque::new(),
            interest,
        });
        Ok(())
    }

    fn hear_client(&mut self, token: u64) {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.hear_client_into(token, &mut buffer);
        self.buffer = buffer;
    }

    fn hear_client_into(&mut self, token: u64, buffer: &mut [u8]) {
        loop {
            let Some(client) = self.client.as_ref().filter(|client| client.token == token) else {
                return;
            };
            if client.outgoing.len() >= MAX_WAITING {
                return;
            }
            let received = match message::receive(client.socket.as_fd(), buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(received) if received.length > 0 => received,
                // Closed, broken, or a message beyond all limits.
                Ok(_) | Err(_) => {
                    self.client = None;
                    return;
                }
            };
            match Request::decode(&buffer[..received.length]) {
                Ok((number, request)) => self.request(token, number, request, received.fds),
                Err(_) => {
                    self.client = None;
                    return;
                }
            }
        }
    }

    fn request(&mut self, token: u64, number: u32, request: Request, fds: Vec<OwnedFd>) {
        let Some(client) = &mut self.client else {
            return;
        };
        if !client.welcome && !matches!(request, Request::Hello { .. }) {
            return self.say(
                number,
                refused((Code::Invalid, "the first message must be Hello")),
            );
        }
        let answer = match request {
            Request::Hello { version } if version == VERSION => {
                client.welcome = true;
                let ended = self
                    .registry
                    .keys()
                    .filter(|key| self.registry.exit(key).is_some());
                client
                    .outgoing
                    .push_back(Outgoing::Reply(number, Reply::Done));
                client.outgoing.extend(ended.cloned().map(Outgoing::Exit));
                return;
            }
            Request::Hello { .. } => Err((Code::Invalid, "another version of the protocol")),
            Request::Launch { key, kept, header } => {
                match self.launch((token, number), key, &kept, &header, fds) {
                    // Answered when the zygote has answered.
                    Ok(()) => return,
                    Err(refusal) => Err(refusal),
                }
            }
            Request::Spawn {
                key,
                argv,
                env,
                cwd,
            } => match self.registry.reserve(&key) {
                Err(refusal) => Err(refusal),
                Ok(()) => {
                    let answer = match spawn::start(argv, env, cwd, fds, self.origin.nofile) {
                        Ok(pid) => {
                            self.registry.started(&key, pid);
                            Reply::Started { pid }
                        }
                        Err(error) => {
                            self.registry.failed(&key);
                            system("starting the program", &error)
                        }
                    };
                    return self.say(number, answer);
                }
            },
            Request::Claim { key, pid } => return self.claim(number, &key, pid),
            Request::Keep { key, slot } => match <[OwnedFd; 1]>::try_from(fds) {
                Ok([fd]) => self.registry.keep(&key, slot, fd),
                Err(_) => Err((Code::Invalid, "Keep takes one descriptor")),
            },
            Request::Drop { key, slot } => {
                self.registry.drop_slot(&key, slot);
                Ok(())
            }
            Request::Note { key, note } => {
                self.registry.note(&key, note);
                Ok(())
            }
            Request::Signal { key, signal } => match self.registry.running(&key) {
                // Ours to reap, so the number cannot have passed to another process.
                Some(pid) => return self.say(number, signalled(pid, signal)),
                None => Err((Code::NotFound, "no process runs under the key")),
            },
            Request::List => {
                let entries = self.registry.keys().cloned();
                client
                    .outgoing
                    .extend(entries.map(|key| Outgoing::Entry(number, key, false)));
                Ok(())
            }
            Request::Take { key } => {
                if self.registry.entry(&key).is_some() {
                    client
                        .outgoing
                        .push_back(Outgoing::Entry(number, key, true));
                    return;
                }
                Err((Code::NotFound, "no such key"))
            }
            Request::Forget { key } => self.registry.forget(&key),
            Request::Front { argv, env } => self.front(argv, env, fds),
            Request::Retire => {
                if let Some(front) = &mut self.front {
                    front.retire();
                }
                Ok(())
            }
        };
        self.say(number, answer.map_or_else(refused, |()| Reply::Done));
    }

    fn say(&mut self, number: u32, reply: Reply) {
        if let Some(client) = &mut self.client {
            client.outgoing.push_back(Outgoing::Reply(number, reply));
        }
    }

    fn launch(
        &mut self,
        asked: (u64, u32),
        key: Key,
        kept: &[Slot],
        header: &CloneHeader,
        mut fds: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        if fds.len() <= kept.len() {
            return Err((
                Code::Invalid,
                "Launch takes the kept descriptors and a plan",
            ));
        }
        self.registry.reserve(&key)?;
        let rest = fds.split_off(kept.len());
        for (slot, fd) in kept.iter().zip(fds) {
            if let Err(refusal) = self.registry.keep(&key, *slot, fd) {
                self.registry.failed(&key);
                return Err(refusal);
            }
        }
        let mut writer = Writer::new();
        header.write(&mut writer);
        self.queue.push_back(Launch {
            key,
            asked,
            header: writer.finish(),
            fds: rest,
        });
        Ok(())
    }

    fn claim(&mut self, number: u32, key: &Key, pid: i32) {
        // Whatever ended meanwhile is recorded first.
        let reaped = self.reap();
        let answer = match self.registry.reserve(key) {
            Err(refusal) => refused(refusal),
            Ok(()) if pid <= 0 || self.registry.knows(pid) || reaped.is_err() => {
                self.registry.failed(key);
                refused((Code::Invalid, "the process has a key, or is none"))
            }
            Ok(()) if self.registry.claim_ended(key, pid) => {
                self.tell_exit(key.clone());
                Reply::Started { pid }
            }
            Ok(()) => match process::ended(Whose::Child(pid), true) {
                Ok(_) => {
                    self.registry.started(key, pid);
                    Reply::Started { pid }
                }
                Err(_) => {
                    self.registry.failed(key);
                    refused((Code::NotFound, "no child of the holder"))
                }
            },
        };
        // Before its exit, if that is known already.
        if let Some(client) = &mut self.client {
            let exit = client
                .outgoing
                .pop_back_if(|last| matches!(last, Outgoing::Exit(told) if told == key));
            client.outgoing.push_back(Outgoing::Reply(number, answer));
            client.outgoing.extend(exit);
        }
    }

    fn tell_exit(&mut self, key: Key) {
        if let Some(client) = self.client.as_mut().filter(|client| client.welcome) {
            client.outgoing.push_back(Outgoing::Exit(key));
        }
    }

    /// Sends the next launch once the zygote has answered the last.
    fn send_launch(&mut self) {
        while self.in_flight.is_none() {
            let Some(launch) = self.queue.pop_front() else {
                return;
            };
            if self.zygote.is_none() {
                // Never a reason to die ourselves: sandboxes run, and the next launch may do better.
                if let Err(error) = self.restart_world() {
                    self.launch_failed(&launch, zygote_died(&error));
                    continue;
                }
            }
            let Some(zygote) = &self.zygote else { return };
            let numbers: Vec<RawFd> = launch.fds.iter().map(AsRawFd::as_raw_fd).collect();
            let sent = message::send(zygote.socket.as_fd(), &launch.header, &numbers, None);
            let launch = Launch {
                fds: Vec::new(),
                ..launch
            };
            match sent {
                Ok(()) => self.in_flight = Some(launch),
                Err(error) => self.launch_failed(&launch, zygote_died(&error)),
            }
        }
    }

    fn launch_failed(&mut self, launch: &Launch, reply: Reply) {
        // What came for it is dropped: the clone, if there is one, loses its other end and ends.
        self.registry.failed(&launch.key);
        self.answer_launch(launch, reply);
    }

    fn answer_launch(&mut self, launch: &Launch, reply: Reply) {
        let (token, number) = launch.asked;
        if self
            .client
            .as_ref()
            .is_some_and(|client| client.token == token)
        {
            self.say(number, reply);
        }
    }

    fn hear_zygote(&mut self) -> io::Result<()> {
        let Some(zygote) = self.zygote.take() else {
            return Ok(());
        };
        if !self.take_answers(&zygote) {
            // Its end also comes as SIGCHLD, which cleans up; until then there is nothing to hear.
            self.epoll.delete(&zygote.socket)?;
        }
        self.zygote = Some(zygote);
        // What was left a zombie because of the launch that is answered now.
        self.reap()
    }

    /// Takes what the zygote has said; whether it may say more.
    fn take_answers(&mut self, zygote: &Zygote) -> bool {
        let mut buffer = [0; 16];
        loop {
            let received = match message::receive(zygote.socket.as_fd(), &mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Ok(received) if received.length > 0 => received,
                Ok(_) | Err(_) => return false,
            };
            let errno = buffer[..received.length].first_chunk::<4>().copied();
            let Some(launch) = self.in_flight.take() else {
                continue;
            };
            match (errno.map(i32::from_le_bytes), received.pid) {
                (Some(0), Some(pid)) => {
                    self.registry.started(&launch.key, pid);
                    self.answer_launch(&launch, Reply::Started { pid });
                }
                (Some(errno @ 1..), _) => {
                    let error = io::Error::from_raw_os_error(errno);
                    self.launch_failed(&launch, system("cloning the sandbox", &error));
                }
                _ => self.launch_failed(
                    &launch,
                    zygote_died(&io::Error::other("an answer without a meaning")),
                ),
            }
        }
    }

    /// The one place that waits for children.
    fn reap(&mut self) -> io::Result<()> {
        loop {
            let ended = match process::ended(Whose::Any, true) {
                Ok(Some(ended)) => ended,
                Ok(None) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok(()),
                Err(error) => return Err(error),
            };
            let zygote = self.zygote.as_ref().map(|zygote| zygote.pid);
            let shim = self.front.as_ref().is_some_and(|f| f.is_shim(ended.pid));
            let own = zygote == Some(ended.pid) || self.anchor.pid == ended.pid || shim;
            if !own && !self.registry.knows(ended.pid) && self.in_flight.is_some() {
                // It may be the clone that the zygote is about to name.
                return Ok(());
            }
            process::ended(Whose::Child(ended.pid), false)?;
            if zygote == Some(ended.pid) {
                self.zygote_ended();
            } else if self.anchor.pid == ended.pid {
                // The kernel has killed the zygote and all sandboxes; they are reaped in turn.
                self.anchor.pid = 0;
            } else if shim {
                if let Some(front) = &mut self.front {
                    front.reaped();
                }
            } else {
                let exit = Exit {
                    code: ended.code,
                    at_ns: now_ns(),
                };
                if let Some(key) = self.registry.ended(ended.pid, exit) {
                    self.tell_exit(key);
                }
            }
        }
    }

    fn zygote_ended(&mut self) {
        if let Some(zygote) = self.zygote.take() {
            // What it said before it died still counts.
            self.take_answers(&zygote);
        }
        if let Some(launch) = self.in_flight.take() {
            self.launch_failed(&launch, zygote_died(&io::Error::other("it was killed")));
        }
    }

    fn restart_world(&mut self) -> io::Result<()> {
        if self.anchor.pid == 0 {
            self.anchor = Anchor::start()?;
        }
        let zygote = Zygote::start(&self.origin, &self.anchor)?;
        self.epoll
            .add(&zygote.socket, EpollEvent::new(EpollFlags::EPOLLIN, ZYGOTE))?;
        self.zygote = Some(zygote);
        Ok(())
    }

    /// Sends the client what waits for it, as far as it reads.
    fn speak(&mut self) {
        let Some(client) = &mut self.client else {
            return;
        };
        while let Some(next) = client.outgoing.front() {
            let (bytes, fds) = render(next, &self.registry);
            match message::send(client.socket.as_fd(), &bytes, &fds, None) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(()) => {
                    client.outgoing.pop_front();
                }
                Err(_) => {
                    self.client = None;
                    return;
                }
            }
        }
        let mut interest = EpollFlags::empty();
        if client.outgoing.len() < MAX_WAITING {
            interest |= EpollFlags::EPOLLIN;
        }
        if !client.outgoing.is_empty() {
            interest |= EpollFlags::EPOLLOUT;
        }
        if interest != client.interest {
            client.interest = interest;
            let mut event = EpollEvent::new(interest, client.token);
            if self.epoll.modify(&client.socket, &mut event).is_err() {
                self.client = None;
            }
        }
    }
}

fn render(outgoing: &Outgoing, registry: &Registry<OwnedFd>) -> (Vec<u8>, Vec<RawFd>) {
    let gone = || refused((Code::NotFound, "forgotten meanwhile"));
    match outgoing {
        Outgoing::Reply(number, reply) => (reply.encode(*number), Vec::new()),
        Outgoing::Entry(number, key, with_fds) => match registry.entry(key) {
            Some((entry, fds)) if *with_fds => {
                let fds = fds.iter().map(|fd| fd.as_raw_fd()).collect();
                (Reply::Entry(entry).encode(*number), fds)
            }
            Some((entry, _)) => (Reply::Entry(entry).encode(*number), Vec::new()),
            None => (gone().encode(*number), Vec::new()),
        },
        Outgoing::Exit(key) => match registry.exit(key) {
            Some((pid, exit)) => (
                Reply::Exited {
                    key: key.clone(),
                    pid,
                    exit,
                }
                .encode(0),
                Vec::new(),
            ),
            None => (gone().encode(0), Vec::new()),
        },
    }
}

fn refused((code, text): Refusal) -> Reply {
    Reply::Refused {
        code,
        errno: 0,
        text: text.to_owned(),
    }
}

fn system(what: &str, error: &io::Error) -> Reply {
    Reply::Refused {
        code: Code::System,
        errno: error.raw_os_error().unwrap_or_default(),
        text: format!("{what}: {error}"),
    }
}

fn zygote_died(error: &io::Error) -> Reply {
    Reply::Refused {
        code: Code::Zygote,
        errno: error.raw_os_error().unwrap_or_default(),
        text: format!("the zygote died: {error}"),
    }
}

fn signalled(pid: i32, signal: i32) -> Reply {
    let wanted = match signal {
        // Sends none: it asks whether the process runs.
        0 => Ok(None),
        number => Signal::try_from(number).map(Some),
    };
    match wanted {
        Ok(signal) => match nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal) {
            Ok(()) => Reply::Done,
            Err(errno) => system("kill", &errno.into()),
        },
        Err(errno) => system("kill", &errno.into()),
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Makes the folder, and makes sure that there is one holder in it.
fn lock(directory: &Path) -> io::Result<Flock<File>> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(directory.join(LOCK))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => io::Error::new(
            io::ErrorKind::AddrInUse,
            "another holder serves this folder",
        ),
        other => other.into(),
    })
}

fn listener(path: &Path) -> io::Result<OwnedFd> {
    // Ours by the lock; what is there is a dead holder's.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    // The folder is closed to others; this is for one that somebody opened up.
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listen(&listener, Backlog::new(16)?)?;
    Ok(listener)
}
