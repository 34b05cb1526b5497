//! From a prepared launch to a process that waits for the word to start, and on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::cgroup::Cgroup;
use super::prepare::Prepared;
use crate::holder::client::{Client, HolderError};
use crate::holder::protocol::{Key, Slot};
use crate::sys::message;
use crate::zygote::gate::{self, Failure, Said};

/// Slot of the gate, until the sandbox has started.
pub const SLOT_GATE: Slot = 0;
/// Slot of the agent's socket.
pub const SLOT_CONTROL: Slot = 1;
/// Slot of the terminal's master.
pub const SLOT_TERMINAL: Slot = 2;

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The holder did not launch it.
    #[error(transparent)]
    Holder(#[from] HolderError),
    /// A step inside failed. The process ends by itself: its exit is still to be acknowledged.
    #[error("unable to start container process: {0}")]
    Inside(#[from] Failure),
    /// The kernel killed it for lack of memory.
    #[error(
        "unable to start container process: container init was OOM-killed (memory limit too low?)"
    )]
    OutOfMemory,
    /// The process is gone, or says nonsense.
    #[error("the sandbox's process: {0}")]
    Broken(#[from] io::Error),
}

/// A sandbox that waits for the word to start.
#[derive(Debug)]
pub struct Created {
    /// Process id on the host.
    pub pid: i32,
    /// How to start it.
    pub gate: Gate,
    /// The agent's socket.
    pub control: Option<OwnedFd>,
    /// The terminal's master.
    pub terminal: Option<OwnedFd>,
    /// Its cgroup, now the caller's to remove.
    pub cgroup: Option<Cgroup>,
}

/// The shim's end of a gate.
#[derive(Debug)]
pub struct Gate(AsyncFd<OwnedFd>);

impl Gate {
    /// Takes over a gate, for example from a holder.
    ///
    /// # Errors
    /// It is no socket.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        use nix::fcntl::{FcntlArg, OFlag, fcntl};
        fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_RDWR | OFlag::O_NONBLOCK))?;
        // SAFETY: an `OwnedFd` keeps its number and stays open while the registration owns it.
        #[expect(unsafe_code, reason = "the descriptor is ours alone")]
        let registered = unsafe { AsyncFd::register(fd) };
        Ok(Self(registered.map_err(io::Error::from)?))
    }

    async fn hear(&self) -> io::Result<Option<(Said, Option<OwnedFd>)>> {
        self.0
            .async_io(Interest::READABLE, |fd| gate::hear(fd.as_fd()))
            .await
    }

    /// Waits until all is prepared; the terminal's master if there is one.
    ///
    /// # Errors
    /// What failed inside.
    pub async fn ready(&self) -> Result<Option<OwnedFd>, CreateError> {
        match self.hear().await? {
            Some((Said::Ready, fd)) => Ok(fd),
            Some((Said::Failed(failure), _)) => Err(failure.into()),
            None => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        }
    }

    /// Starts the sandbox's program, once it is ready, and waits until it runs.
    ///
    /// # Errors
    /// What failed inside; the process then ends by itself.
    pub async fn start(&self) -> Result<(), CreateError> {
        let sent = self.0.async_io(Interest::WRITABLE, |fd| {
            message::send(fd.as_fd(), &[gate::GO], &[], None)
        });
        match sent.await {
            // An earlier shim has said it, or the process has ended: what follows tells.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            other => other?,
        }
        loop {
            match self.hear().await? {
                // Exec has closed the other end.
                None => return Ok(()),
                // Said before a restart of the shim, and heard only now.
                Some((Said::Ready, _)) => {}
                Some((Said::Failed(failure), _)) => return Err(failure.into()),
            }
        }
    }
}

impl Prepared {
    /// Whether the process has a terminal, whose master comes with [`Created`].
    #[must_use]
    pub fn has_terminal(&self) -> bool {
        self.terminal
    }

    /// Launches it under `key`, which also keeps `extra` descriptors, and waits until it is ready.
    ///
    /// # Errors
    /// [`CreateError::Inside`] for mistakes of the spec. Unless it is [`CreateError::Holder`], the
    /// key has a process whose exit comes and is to be acknowledged.
    pub async fn create(
        self,
        client: &Client,
        key: &Key,
        extra: &[(Slot, BorrowedFd<'_>)],
    ) -> Result<Created, CreateError> {
        let Self {
            header,
            fds,
            gate,
            control,
            oom_score_adj,
            cgroup,
            ..
        } = self;
        let mut kept = vec![(SLOT_GATE, gate.as_fd())];
        kept.extend(
            control
                .as_ref()
                .map(|control| (SLOT_CONTROL, control.as_fd())),
        );
        kept.extend_from_slice(extra);
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let pid = client.launch(key, &kept, header, &borrowed).await?;
        drop(borrowed);
        // Ends the clone's wait for us if we are gone: it holds the only other copies.
        drop(fds);
        drop(kept);
        let gate = Gate::from_fd(gate)?;
        let terminal = match gate.ready().await {
            Ok(terminal) => terminal,
            Err(error) => {
                let killed = cgroup
                    .as_ref()
                    .is_some_and(super::prepare::OwnCgroup::ran_out);
                // Its cgroup goes when it is gone, which is now or in a moment.
                std::mem::drop(cgroup);
                return Err(match error {
                    CreateError::Broken(_) if killed => CreateError::OutOfMemory,
                    error => error,
                });
            }
        };
        // It waits for the gate: the number is its own, and it has not run anything yet.
        if let Some(score) = oom_score_adj {
            std::fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string())
                .map_err(|error| io::Error::new(error.kind(), format!("oom_score_adj: {error}")))?;
        }
        Ok(Created {
            pid,
            gate,
            control,
            terminal,
            cgroup: cgroup.and_then(super::prepare::OwnCgroup::keep),
        })
    }
}
