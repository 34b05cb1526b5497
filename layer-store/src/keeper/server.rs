//! The keeper's loop: one thread that waits for the kernel, for clients and for the next deadline.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{Timespec, epoll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::time::ClockId;

use super::desk::{Desk, Inheritance};
use super::protocol::{Kept, Notice, Request};
use super::socket;
use super::table::Instant;
use crate::layout;

/// Clients at once; more wait in the listener's queue.
const MAX_CLIENTS: usize = 32;
const LISTENER: u64 = u64::MAX;
const GROUP: u64 = u64::MAX - 1;

/// What a connection is for.
#[derive(Debug)]
enum Role {
    Controller,
    Filler,
    /// What has not been told yet.
    Holder(VecDeque<Notice>),
}

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    role: Role,
    /// Whether we wait for room in its socket.
    full: bool,
}

/// A failure that ends the keeper or a request: what was tried, and why it failed.
pub type Failure = (&'static str, io::Error);

/// A running keeper.
#[derive(Debug)]
pub struct Server {
    root: OwnedFd,
    /// Held for as long as the process lives.
    _lock: OwnedFd,
    listener: OwnedFd,
    epoll: OwnedFd,
    clients: [Option<Client>; MAX_CLIENTS],
    inheritance: Inheritance,
    desk: Option<Desk>,
    reads_group: bool,
}

impl Server {
    /// Listens at `socket` for the layers under `root`.
    ///
    /// # Errors
    /// What failed, with the system's error. `WouldBlock` when another keeper serves `root`.
    pub fn new(root: &Path, socket: &Path) -> Result<Self, Failure> {
        let folder = rustix::fs::open(
            root,
            OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::PATH,
            Mode::empty(),
        )
        .map_err(|errno| ("open the store's folder", errno.into()))?;
        let lock = rustix::fs::openat(
            &folder,
            layout::KEEPER_LOCK,
            OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW,
            Mode::RUSR | Mode::WUSR,
        )
        .map_err(|errno| ("open the store's lock", errno.into()))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|errno| ("lock the store; another keeper may serve it", errno.into()))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|errno| ("make an epoll", errno.into()))?;
        let listener = socket::listen(socket).map_err(|error| ("listen", error))?;
        add(&epoll, listener.as_fd(), LISTENER).map_err(|error| ("wait for clients", error))?;
        Ok(Self {
            root: folder,
            _lock: lock,
            listener,
            epoll,
            clients: [const { None }; MAX_CLIENTS],
            inheritance: Inheritance::default(),
            desk: None,
            reads_group: false,
        })
    }

    /// Serves until something that cannot fail does. The group is then for a successor.
    ///
    /// # Errors
    /// What failed, with the system's error.
    pub fn run(&mut self) -> Result<std::convert::Infallible, Failure> {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; MAX_CLIENTS];
        loop {
            let timeout = self.timeout();
            let ready = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                Ok((ready, _)) => &*ready,
                Err(rustix::io::Errno::INTR) => &[],
                Err(errno) => return Err(("wait", errno.into())),
            };
            for event in ready {
                match event.data.u64() {
                    LISTENER => self.accept().map_err(|error| ("accept", error))?,
                    GROUP => self.read().map_err(|error| ("read events", error))?,
                    client => self.serve(client)?,
                }
            }
            if let Some(desk) = &mut self.desk {
                desk.expire(now())
                    .map_err(|error| ("end a question", error))?;
            }
            self.tell_gone();
            self.deliver();
            self.watch_group()
                .map_err(|error| ("watch the group", error))?;
        }
    }

    fn timeout(&self) -> Option<Timespec> {
        let due = self.desk.as_ref()?.next_deadline()?;
        let nanos = due.0.saturating_sub(now().0);
        Some(Timespec {
            tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(nanos % 1_000_000_000).unwrap_or(0),
        })
    }

    fn read(&mut self) -> io::Result<()> {
        self.desk.as_mut().map_or(Ok(()), |desk| desk.read(now()))
    }

    /// Listens to the group as long as there is room for what it says.
    fn watch_group(&mut self) -> io::Result<()> {
        let Some(desk) = &self.desk else {
            return Ok(());
        };
        let wanted = desk.may_read();
        if wanted == self.reads_group {
            return Ok(());
        }
        if let Some(group) = desk.kept(Kept::Group) {
            if wanted {
                add(&self.epoll, group, GROUP)?;
            } else {
                epoll::delete(&self.epoll, group)?;
            }
        }
        self.reads_group = wanted;
        Ok(())
    }

    fn accept(&mut self) -> io::Result<()> {
        let Some(socket) = socket::accept(self.listener.as_fd())? else {
            return Ok(());
        };
        // Without room the client sees its connection end.
        if let Some(at) = self.clients.iter().position(Option::is_none) {
            add(&self.epoll, socket.as_fd(), at as u64)?;
            self.clients[at] = Some(Client {
                socket,
                role: Role::Controller,
                full: false,
            });
        }
        Ok(())
    }

    /// One message of a client. A client that breaks the protocol or is gone is dropped.
    fn serve(&mut self, at: u64) -> Result<(), Failure> {
        let Some(at) = usize::try_from(at).ok().filter(|at| *at < MAX_CLIENTS) else {
            return Ok(());
        };
        let Some(client) = &self.clients[at] else {
            return Ok(());
        };
        let packet = match socket::receive(&client.socket) {
            Ok(Some(packet)) => packet,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Ok(None) | Err(_) => {
                self.drop_client(at);
                return Ok(());
            }
        };
        let Some(request) = Request::decode(packet.bytes()) else {
            self.drop_client(at);
            return Ok(());
        };
        if let Request::Answer(event, verdict) = request {
            let desk = self.desk.as_mut();
            return desk
                .map_or(Ok(()), |desk| desk.answer(event, verdict))
                .map_err(|error| ("answer a question", error));
        }
        let notice = match self.handle(at, request, packet.fd) {
            Ok(notice) => notice,
            Err((what, error)) => Notice::Failed {
                errno: error.raw_os_error().unwrap_or(libc::EIO),
                what: format!("{what}: {error}"),
            },
        };
        self.reply(at, request, &notice);
        Ok(())
    }

    fn handle(
        &mut self,
        at: usize,
        request: Request,
        fd: Option<OwnedFd>,
    ) -> Result<Notice, Failure> {
        let invalid = |what| (what, io::Error::from(io::ErrorKind::InvalidInput));
        match request {
            Request::Start(limits) if self.desk.is_none() => {
                self.desk = Some(Desk::start(limits)?);
                self.inheritance = Inheritance::default();
            }
            Request::Restore(kept) if self.desk.is_none() => {
                let fd = fd.ok_or_else(|| invalid("take back what came without a descriptor"))?;
                self.inheritance.add(kept, fd);
            }
            Request::Restored(limits) if self.desk.is_none() => {
                let inheritance = std::mem::take(&mut self.inheritance);
                self.desk = Some(Desk::resume(inheritance, self.root.as_fd(), limits, now())?);
            }
            Request::Start(_) | Request::Restore(_) | Request::Restored(_) => {
                return Err(("begin: a group is served already", already()));
            }
            Request::Hold => {
                let all = self.desk.iter().flat_map(Desk::all_kept).map(Notice::Keep);
                let outbox = all.chain([Notice::UpToDate]).collect();
                self.set_role(at, Role::Holder(outbox));
            }
            Request::Fill => {
                self.dismiss_filler();
                self.set_role(at, Role::Filler);
            }
            Request::Watch(layer) => {
                let known = self.desk()?.is_watched(layer);
                let Self { desk, root, .. } = self;
                desk.as_mut()
                    .ok_or_else(no_group)?
                    .watch(root.as_fd(), layer)?;
                if !known {
                    self.tell_holders(&Notice::Keep(Kept::Blob(layer)));
                }
                return Ok(Notice::Descriptor);
            }
            Request::Unwatch(layer) => {
                let Self { desk, root, .. } = self;
                let desk = desk.as_mut().ok_or_else(no_group)?;
                if desk.unwatch(root.as_fd(), layer)? {
                    self.tell_holders(&Notice::Drop(Kept::Blob(layer)));
                }
            }
            Request::Blob(layer) => return self.descriptor(Kept::Blob(layer)),
            Request::Mount(layer) => return self.descriptor(Kept::Mount(layer)),
            Request::Tree => return self.descriptor(Kept::Tree),
            Request::KeepMount(layer) => {
                let fd =
                    fd.ok_or_else(|| invalid("keep a mount that came without a descriptor"))?;
                self.desk()?.keep_mount(layer, fd);
                self.tell_holders(&Notice::Keep(Kept::Mount(layer)));
            }
            Request::DropMount(layer) => {
                self.desk()?.drop_mount(layer);
                self.tell_holders(&Notice::Drop(Kept::Mount(layer)));
            }
            Request::Status => {
                let mut status = self.desk.as_ref().map(Desk::status).unwrap_or_default();
                let mut roles = self.clients.iter().flatten().map(|client| &client.role);
                status.filler = roles.any(|role| matches!(role, Role::Filler));
                return Ok(Notice::Status(status));
            }
            // Taken before.
            Request::Answer(..) => {}
        }
        Ok(Notice::Done)
    }

    fn desk(&mut self) -> Result<&mut Desk, Failure> {
        self.desk.as_mut().ok_or_else(no_group)
    }

    fn descriptor(&mut self, kept: Kept) -> Result<Notice, Failure> {
        let missing = || {
            (
                "find it: it is not kept",
                io::Error::from_raw_os_error(libc::ENOENT),
            )
        };
        self.desk()?
            .kept(kept)
            .map(|_| Notice::Descriptor)
            .ok_or_else(missing)
    }

    fn set_role(&mut self, at: usize, role: Role) {
        if let Some(client) = &mut self.clients[at] {
            client.role = role;
        }
    }

    /// One filler at a time: the newer one is what its owner wants.
    fn dismiss_filler(&mut self) {
        let filler = |client: &Option<Client>| {
            client
                .as_ref()
                .is_some_and(|client| matches!(client.role, Role::Filler))
        };
        if let Some(at) = self.clients.iter().position(filler) {
            self.drop_client(at);
        }
        if let Some(desk) = &mut self.desk {
            desk.deliver_again();
        }
    }

    fn drop_client(&mut self, at: usize) {
        let gone = self.clients[at].take();
        if gone.is_some_and(|client| matches!(client.role, Role::Filler))
            && let Some(desk) = &mut self.desk
        {
            desk.deliver_again();
        }
    }

    /// Tells of blobs that were let go of since.
    fn tell_gone(&mut self) {
        while let Some(layer) = self.desk.as_mut().and_then(Desk::next_gone) {
            self.tell_holders(&Notice::Drop(Kept::Blob(layer)));
        }
    }

    fn tell_holders(&mut self, notice: &Notice) {
        for client in self.clients.iter_mut().flatten() {
            if let Role::Holder(outbox) = &mut client.role {
                outbox.push_back(notice.clone());
            }
        }
    }

    /// A controller that does not read its answers is dropped.
    fn reply(&mut self, at: usize, request: Request, notice: &Notice) {
        let Some(client) = &self.clients[at] else {
            return;
        };
        let kept = match request {
            Request::Watch(layer) | Request::Blob(layer) => Some(Kept::Blob(layer)),
            Request::Mount(layer) => Some(Kept::Mount(layer)),
            Request::Tree => Some(Kept::Tree),
            _ => None,
        };
        let fd = kept
            .filter(|_| *notice == Notice::Descriptor)
            .and_then(|kept| self.desk.as_ref()?.kept(kept));
        if socket::send(&client.socket, &notice.encode(), fd).is_err() {
            self.drop_client(at);
        }
    }

    /// Sends what there is to send, as far as the sockets take it.
    fn deliver(&mut self) {
        for at in 0..MAX_CLIENTS {
            let Some(client) = &mut self.clients[at] else {
                continue;
            };
            let sent = match &mut client.role {
                Role::Controller => continue,
                Role::Filler => deliver_questions(&client.socket, self.desk.as_mut()),
                Role::Holder(outbox) => deliver_copies(&client.socket, outbox, self.desk.as_ref()),
            };
            let full = match sent {
                Ok(()) => false,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
                Err(_) => {
                    self.drop_client(at);
                    continue;
                }
            };
            if full == client.full {
                continue;
            }
            client.full = full;
            let flags = match full {
                true => epoll::EventFlags::IN | epoll::EventFlags::OUT,
                false => epoll::EventFlags::IN,
            };
            let data = epoll::EventData::new_u64(at as u64);
            if epoll::modify(&self.epoll, &client.socket, data, flags).is_err() {
                self.drop_client(at);
            }
        }
    }
}

fn deliver_questions(socket: &OwnedFd, desk: Option<&mut Desk>) -> io::Result<()> {
    let Some(desk) = desk else { return Ok(()) };
    while let Some((event, question)) = desk.next_undelivered() {
        let notice = Notice::Question(event, question.layer, question.range);
        socket::send(socket, &notice.encode(), None)?;
        desk.delivered();
    }
    Ok(())
}

fn deliver_copies(
    socket: &OwnedFd,
    outbox: &mut VecDeque<Notice>,
    desk: Option<&Desk>,
) -> io::Result<()> {
    while let Some(notice) = outbox.front() {
        let fd = match notice {
            Notice::Keep(kept) => match desk.and_then(|desk| desk.kept(*kept)) {
                Some(fd) => Some(fd),
                // Dropped in the meantime.
                None => {
                    outbox.pop_front();
                    continue;
                }
            },
            _ => None,
        };
        socket::send(socket, &notice.encode(), fd)?;
        outbox.pop_front();
    }
    Ok(())
}

fn add(epoll: &OwnedFd, fd: BorrowedFd<'_>, data: u64) -> io::Result<()> {
    let data = epoll::EventData::new_u64(data);
    Ok(epoll::add(epoll, fd, data, epoll::EventFlags::IN)?)
}

fn no_group() -> Failure {
    (
        "find a group: none is served yet",
        io::Error::from_raw_os_error(libc::ENOENT),
    )
}

fn already() -> io::Error {
    io::ErrorKind::AlreadyExists.into()
}

/// The monotonic clock. A suspended host does not make readers late.
fn now() -> Instant {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Instant(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}
