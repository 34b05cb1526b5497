//! A shim's side of the holder's socket, for tokio.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use super::protocol::{
    CloneHeader, Code, Entry, Exit, Key, MAX_FDS, MAX_MESSAGE, Reply, Request, Slot, VERSION,
};
use crate::sys::message;

/// A process ended. Told again on each new connection until [`Client::forget`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exited {
    /// Whose.
    pub key: Key,
    /// Its id on the host.
    pub pid: i32,
    /// How.
    pub exit: Exit,
}

/// What a key holds, with copies of its descriptors.
#[derive(Debug)]
pub struct Taken {
    /// All but the descriptors.
    pub entry: Entry,
    /// By slot.
    pub fds: Vec<(Slot, OwnedFd)>,
}

/// Why the holder did not do it.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// It is not there any more, and with it all sandboxes.
    #[error("the holder is gone: {0}")]
    Gone(String),
    /// It said no.
    #[error("{text}")]
    Refused {
        /// Why.
        code: Code,
        /// errno of the failed system call; 0 without one.
        errno: i32,
        /// For people.
        text: String,
    },
    /// The request is longer than a message may be.
    #[error("the request is too long: {0}")]
    TooLong(&'static str),
}

type Answer = (Reply, Vec<OwnedFd>);

/// Requests that wait for their answers; `None` once the holder is gone.
type Waiting = Option<HashMap<u32, Asked>>;

#[derive(Debug)]
struct Asked {
    /// Answered by entries and then Done; everything else has one answer.
    list: bool,
    answer: mpsc::UnboundedSender<Answer>,
}

#[derive(Debug)]
struct Shared {
    socket: AsyncFd<OwnedFd>,
    waiting: Mutex<Waiting>,
    next: std::sync::atomic::AtomicU32,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection to the holder. Clones share it; the last one closes it.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    /// Ends the reader with the last clone.
    _alive: Arc<ReaderGuard>,
}

#[derive(Debug)]
struct ReaderGuard(tokio::task::AbortHandle);

impl Drop for ReaderGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Client {
    /// Connects to the holder's socket and takes it over from any earlier client.
    ///
    /// The receiver gets exits, first those that nobody has acknowledged; it ends when the holder
    /// is gone.
    ///
    /// # Errors
    /// Nobody listens there, or it speaks another version.
    pub async fn connect(
        path: &Path,
    ) -> Result<(Self, mpsc::UnboundedReceiver<Exited>), HolderError> {
        let gone = |error: io::Error| HolderError::Gone(format!("{}: {error}", path.display()));
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
            .map_err(|errno| gone(errno.into()))?;
        UnixAddr::new(path)
            .and_then(|address| connect(socket.as_raw_fd(), &address))
            .map_err(|errno| gone(errno.into()))?;
        // SAFETY: an `OwnedFd` keeps its number and stays open while the registration owns it.
        #[expect(unsafe_code, reason = "the descriptor is ours alone")]
        let socket = unsafe { AsyncFd::register(socket) }.map_err(|error| gone(error.into()))?;
        let shared = Arc::new(Shared {
            socket,
            waiting: Mutex::new(Some(HashMap::new())),
            next: std::sync::atomic::AtomicU32::new(1),
        });
        let (exits, exited) = mpsc::unbounded_channel();
        let reader = tokio::spawn(read(Arc::downgrade(&shared), exits));
        let client = Self {
            shared,
            _alive: Arc::new(ReaderGuard(reader.abort_handle())),
        };
        client
            .done(&Request::Hello { version: VERSION }, &[])
            .await?;
        Ok((client, exited))
    }

    /// Launches a sandbox; see [`Request::Launch`]. Returns its process id.
    ///
    /// # Errors
    /// [`Code::Zygote`] when trying again is right.
    pub async fn launch(
        &self,
        key: &Key,
        kept: &[(Slot, BorrowedFd<'_>)],
        header: CloneHeader,
        fds: &[BorrowedFd<'_>],
    ) -> Result<i32, HolderError> {
        let request = Request::Launch {
            key: key.clone(),
            kept: kept.iter().map(|(slot, _)| *slot).collect(),
            header,
        };
        let all: Vec<_> = kept
            .iter()
            .map(|(_, fd)| *fd)
            .chain(fds.iter().copied())
            .collect();
        self.started(&request, &all).await
    }

    /// Runs a host program; see [`Request::Spawn`]. Returns its process id.
    ///
    /// # Errors
    /// [`Code::System`] when it does not start.
    pub async fn spawn(
        &self,
        key: &Key,
        argv: Vec<Vec<u8>>,
        env: Vec<Vec<u8>>,
        cwd: &Path,
        fds: &[BorrowedFd<'_>],
    ) -> Result<i32, HolderError> {
        let cwd = cwd.as_os_str().as_encoded_bytes().to_vec();
        self.started(
            &Request::Spawn {
                key: key.clone(),
                argv,
                env,
                cwd,
            },
            fds,
        )
        .await
    }

    /// Gives a key to an orphan; see [`Request::Claim`].
    ///
    /// # Errors
    /// [`Code::NotFound`] when the holder knows nothing of the process.
    pub async fn claim(&self, key: &Key, pid: i32) -> Result<(), HolderError> {
        self.started(
            &Request::Claim {
                key: key.clone(),
                pid,
            },
            &[],
        )
        .await
        .map(drop)
    }

    /// Leaves a copy of a descriptor with the holder.
    ///
    /// # Errors
    /// The key has no slot left.
    pub async fn keep(&self, key: &Key, slot: Slot, fd: BorrowedFd<'_>) -> Result<(), HolderError> {
        self.done(
            &Request::Keep {
                key: key.clone(),
                slot,
            },
            &[fd],
        )
        .await
    }

    /// Has the holder close a descriptor.
    ///
    /// # Errors
    /// Only [`HolderError::Gone`].
    pub async fn drop_slot(&self, key: &Key, slot: Slot) -> Result<(), HolderError> {
        self.done(
            &Request::Drop {
                key: key.clone(),
                slot,
            },
            &[],
        )
        .await
    }

    /// Leaves a note with the key.
    ///
    /// # Errors
    /// [`HolderError::TooLong`].
    pub async fn note(&self, key: &Key, note: Vec<u8>) -> Result<(), HolderError> {
        if note.len() > super::protocol::MAX_NOTE {
            return Err(HolderError::TooLong("note"));
        }
        self.done(
            &Request::Note {
                key: key.clone(),
                note,
            },
            &[],
        )
        .await
    }

    /// Signals the key's process.
    ///
    /// # Errors
    /// [`Code::NotFound`] when none runs.
    pub async fn signal(&self, key: &Key, signal: i32) -> Result<(), HolderError> {
        self.done(
            &Request::Signal {
                key: key.clone(),
                signal,
            },
            &[],
        )
        .await
    }

    /// All that the holder knows, without descriptors.
    ///
    /// # Errors
    /// Only [`HolderError::Gone`].
    pub async fn list(&self) -> Result<Vec<Entry>, HolderError> {
        let mut answers = self.ask(&Request::List, &[]).await?;
        let mut entries = Vec::new();
        while let Some((reply, _)) = answers.recv().await {
            match reply {
                Reply::Entry(entry) => entries.push(entry),
                Reply::Done => return Ok(entries),
                // A key that was forgotten while the list was under way.
                _ => {}
            }
        }
        Err(closed())
    }

    /// What one key holds; `None` for an unknown one.
    ///
    /// # Errors
    /// Only [`HolderError::Gone`].
    pub async fn take(&self, key: &Key) -> Result<Option<Taken>, HolderError> {
        match self.answer(&Request::Take { key: key.clone() }, &[]).await {
            Ok((Reply::Entry(entry), fds)) => {
                let fds = entry.slots.iter().copied().zip(fds).collect();
                Ok(Some(Taken { entry, fds }))
            }
            Ok((reply, _)) => Err(unexpected(&reply)),
            Err(HolderError::Refused {
                code: Code::NotFound,
                ..
            }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acknowledges an exit and forgets the key; see [`Request::Forget`].
    ///
    /// # Errors
    /// [`Code::Running`].
    pub async fn forget(&self, key: &Key) -> Result<(), HolderError> {
        self.done(&Request::Forget { key: key.clone() }, &[]).await
    }

    /// Has the holder serve containerd's connections; see [`Request::Front`].
    ///
    /// # Errors
    /// [`Code::NotFound`] when nothing listens yet and no `listener` is given.
    pub async fn front(
        &self,
        argv: Vec<Vec<u8>>,
        env: Vec<Vec<u8>>,
        shim: BorrowedFd<'_>,
        log: BorrowedFd<'_>,
        listener: Option<BorrowedFd<'_>>,
    ) -> Result<(), HolderError> {
        let fds: Vec<_> = [shim, log].into_iter().chain(listener).collect();
        self.done(&Request::Front { argv, env }, &fds).await
    }

    /// Ends without being started again; see [`Request::Retire`].
    ///
    /// # Errors
    /// Only [`HolderError::Gone`].
    pub async fn retire(&self) -> Result<(), HolderError> {
        self.done(&Request::Retire, &[]).await
    }

    async fn done(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), HolderError> {
        match self.answer(request, fds).await? {
            (Reply::Done, _) => Ok(()),
            (reply, _) => Err(unexpected(&reply)),
        }
    }

    async fn started(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<i32, HolderError> {
        match self.answer(request, fds).await? {
            (Reply::Started { pid }, _) => Ok(pid),
            (reply, _) => Err(unexpected(&reply)),
        }
    }

    async fn answer(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Answer, HolderError> {
        let mut answers = self.ask(request, fds).await?;
        match answers.recv().await {
            Some((Reply::Refused { code, errno, text }, _)) => {
                Err(HolderError::Refused { code, errno, text })
            }
            Some(answer) => Ok(answer),
            None => Err(closed()),
        }
    }

    async fn ask(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<mpsc::UnboundedReceiver<Answer>, HolderError> {
        if fds.len() > MAX_FDS {
            return Err(HolderError::TooLong("descriptors"));
        }
        // 0 is for what comes unasked; after four thousand million requests numbers start again.
        let number = match self
            .shared
            .next
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed)
        {
            0 => self
                .shared
                .next
                .fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            number => number,
        };
        let bytes = request.encode(number);
        if bytes.len() > MAX_MESSAGE {
            return Err(HolderError::TooLong("message"));
        }
        let (sender, answers) = mpsc::unbounded_channel();
        match self.shared.waiting().as_mut() {
            Some(waiting) => {
                let list = matches!(request, Request::List);
                waiting.insert(
                    number,
                    Asked {
                        list,
                        answer: sender,
                    },
                )
            }
            None => return Err(closed()),
        };
        let numbers: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let sent = self
            .shared
            .socket
            .async_io(Interest::WRITABLE, |socket| {
                message::send(socket.as_fd(), &bytes, &numbers, None)
            })
            .await;
        if let Err(error) = sent {
            if let Some(waiting) = self.shared.waiting().as_mut() {
                waiting.remove(&number);
            }
            return Err(HolderError::Gone(error.to_string()));
        }
        Ok(answers)
    }
}

fn closed() -> HolderError {
    HolderError::Gone("it closed the connection".to_owned())
}

fn unexpected(reply: &Reply) -> HolderError {
    HolderError::Gone(format!("it answered out of turn: {reply:?}"))
}

async fn read(shared: Weak<Shared>, exits: mpsc::UnboundedSender<Exited>) {
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let received = shared
            .socket
            .async_io(Interest::READABLE, |socket| {
                message::receive(socket.as_fd(), &mut buffer)
            })
            .await;
        let decoded = match received {
            Ok(received) if received.length > 0 => Reply::decode(&buffer[..received.length])
                .map(|reply| (reply, received.fds))
                .ok(),
            Ok(_) | Err(_) => None,
        };
        let Some(((number, reply), fds)) = decoded else {
            // Drops all that wait, which tells them; nobody waits from now on.
            *shared.waiting() = None;
            return;
        };
        if let Reply::Exited { key, pid, exit } = reply {
            // Nobody listening is no error: exits are asked for by key as well.
            let _ = exits.send(Exited { key, pid, exit });
            continue;
        }
        if let Some(waiting) = shared.waiting().as_mut()
            && let Some(asked) = waiting.get(&number)
        {
            let last = !asked.list || matches!(reply, Reply::Done);
            let gone = asked.answer.send((reply, fds)).is_err();
            if last || gone {
                waiting.remove(&number);
            }
        }
    }
}
