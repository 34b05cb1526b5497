//! A process's standard streams: pipes or a terminal of our own, copied from and to where the
//! client wants them.
//!
//! A process never gets the client's FIFO itself: it would lose its output, or its life to SIGPIPE,
//! when the reader goes away for a while. For the same reason our ends of its pipes are left with
//! the holder too: while no shim runs, output waits in them.

mod channel;
mod logger;
mod target;
mod uri;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::holder::protocol::Slot;
use crate::runc::Streams;
use crate::task::error::{Result, TaskError};
use crate::task::processes::{Name, Processes};
use channel::{Channel, Sink, copy};
use target::{open_input, open_output};
use uri::Target;

/// What the client asked for; part of the durable record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Names {
    /// Where input comes from.
    pub(crate) stdin: String,
    /// Where output goes.
    pub(crate) stdout: String,
    /// Where diagnostics go; empty with a terminal.
    pub(crate) stderr: String,
    /// One terminal instead of three pipes.
    pub(crate) terminal: bool,
}

/// Whose streams they are.
pub(crate) struct Owner<'a> {
    /// The container.
    pub(crate) id: &'a str,
    /// Its containerd namespace.
    pub(crate) namespace: &'a str,
    /// Where logging programs are started and descriptors kept.
    pub(crate) processes: &'a Arc<Processes>,
    /// The process.
    pub(crate) name: Name<'a>,
}

/// Where our ends are kept at the holder; the launcher has those below.
const TERMINAL: Slot = 2;
const STDIN: Slot = 3;
const STDOUT: Slot = 4;
const STDERR: Slot = 5;

/// How long output may go on after the process has ended: something it left behind may hold the
/// other end for ever.
const DRAIN: Duration = Duration::from_secs(2);

/// Streams that are open on both sides; nothing is copied yet.
#[derive(Default)]
pub(crate) struct Opened {
    /// Keeps the input FIFO from ending while its clients come and go.
    stdin_hold: Option<OwnedFd>,
    console: Option<Channel>,
    /// From the client to the process.
    input: Option<(Slot, Channel, Channel)>,
    /// From the process to the client.
    outputs: Vec<(Slot, Channel, Sink)>,
}

/// The copying for one process.
pub(crate) struct Io {
    stdin_hold: Mutex<Option<OwnedFd>>,
    console: Option<Channel>,
    input: Option<JoinHandle<()>>,
    outputs: Mutex<Vec<JoinHandle<()>>>,
}

impl Opened {
    /// Makes pipes as `names` asks: the process's ends, and ours.
    pub(crate) async fn pipes(names: &Names, owner: &Owner<'_>) -> Result<(Streams, Self)> {
        let mut opened = Self::default();
        let mut streams = Streams::default();
        if !names.stdin.is_empty() {
            let (reader, writer) = pipe("stdin")?;
            opened.connect_input(names, STDIN, channel("stdin", writer)?)?;
            streams.stdin = Some(reader);
        }
        if let Target::Binary(logger) = Target::parse("stdout", &names.stdout)? {
            // It takes both; what stderr says is ignored, as containerd's own shim does.
            let (out_reader, out) = pipe("stdout")?;
            let (err_reader, err) = pipe("stderr")?;
            logger::start(&logger, owner, out_reader, err_reader).await?;
            streams.stdout = Some(out);
            streams.stderr = Some(err);
            return Ok((streams, opened));
        }
        for (slot, field, name, end) in [
            (STDOUT, "stdout", &names.stdout, &mut streams.stdout),
            (STDERR, "stderr", &names.stderr, &mut streams.stderr),
        ] {
            if let Some(sink) = open_output(field, Target::parse(field, name)?)? {
                let (reader, writer) = pipe(field)?;
                opened.outputs.push((slot, channel(field, reader)?, sink));
                *end = Some(writer);
            }
        }
        Ok((streams, opened))
    }

    /// For a process whose terminal's other end is `master`.
    pub(crate) async fn terminal(
        names: &Names,
        owner: &Owner<'_>,
        master: OwnedFd,
    ) -> Result<Self> {
        let mut opened = Self::default();
        let console = channel("terminal", master)?;
        opened.connect_input(names, TERMINAL, console.clone())?;
        let sink = match Target::parse("stdout", &names.stdout)? {
            Target::Binary(logger) => {
                let (reader, writer) = pipe("stdout")?;
                let (err_reader, _) = pipe("stderr")?;
                logger::start(&logger, owner, reader, err_reader).await?;
                Sink::Channel(channel("stdout", writer)?)
            }
            target => open_output("stdout", target)?.unwrap_or(Sink::Nobody),
        };
        opened.outputs.push((TERMINAL, console.clone(), sink));
        opened.console = Some(console);
        Ok(opened)
    }

    /// Our ends as an earlier shim left them with the holder.
    pub(crate) fn adopted(names: &Names, fds: Vec<(Slot, OwnedFd)>) -> Result<Self> {
        let mut opened = Self::default();
        for (slot, fd) in fds {
            let (field, name) = match slot {
                TERMINAL | STDOUT => ("stdout", &names.stdout),
                STDERR => ("stderr", &names.stderr),
                STDIN => {
                    opened.connect_input(names, slot, channel("stdin", fd)?)?;
                    continue;
                }
                _ => continue,
            };
            let end = channel(field, fd)?;
            if slot == TERMINAL {
                opened.connect_input(names, slot, end.clone())?;
                opened.console = Some(end.clone());
            }
            // The client's side may have gone meanwhile; the process goes on all the same.
            let target = Target::parse(field, name)?;
            let sink = match open_output(field, target) {
                Ok(sink) => sink.unwrap_or(Sink::Nobody),
                Err(error) => {
                    tracing::warn!(%error, "output goes nowhere from now on");
                    Sink::Nobody
                }
            };
            opened.outputs.push((slot, end, sink));
        }
        Ok(opened)
    }

    fn connect_input(&mut self, names: &Names, slot: Slot, sink: Channel) -> Result<()> {
        if let Some((fifo, hold)) = open_input(&names.stdin)? {
            self.stdin_hold = Some(hold);
            self.input = Some((slot, fifo, sink));
        }
        Ok(())
    }

    /// Leaves our ends with the holder and starts copying.
    pub(crate) async fn begin(self, owner: &Owner<'_>) -> Result<Io> {
        for (slot, end, _) in &self.outputs {
            owner.processes.keep(&owner.name, *slot, end.fd()).await?;
        }
        if let Some((STDIN, _, end)) = &self.input {
            owner.processes.keep(&owner.name, STDIN, end.fd()).await?;
        }
        self.run(owner)
    }

    /// Starts copying what the holder has already.
    pub(crate) fn run(self, owner: &Owner<'_>) -> Result<Io> {
        let key = owner.name.key()?;
        let input = self.input.map(|(slot, source, sink)| {
            let processes = Arc::clone(owner.processes);
            tokio::spawn(async move {
                copy(source, Sink::Channel(sink)).await;
                // A pipe ends for the process when the last copy of our end is closed.
                if slot == STDIN {
                    processes.drop_slot(&key, slot).await;
                }
            })
        });
        let outputs = self.outputs.into_iter();
        Ok(Io {
            stdin_hold: Mutex::new(self.stdin_hold),
            console: self.console,
            input,
            outputs: Mutex::new(
                outputs
                    .map(|(_, source, sink)| tokio::spawn(copy(source, sink)))
                    .collect(),
            ),
        })
    }
}

impl Io {
    /// The client has no more input: once it has closed its end too, the process sees the end.
    pub(crate) fn close_stdin(&self) {
        drop(lock(&self.stdin_hold).take());
    }

    /// Sets the terminal's size, in characters.
    pub(crate) fn resize(&self, width: u32, height: u32) -> Result<()> {
        let Some(console) = &self.console else {
            return Err(TaskError::FailedPrecondition(
                "the process has no terminal to resize".into(),
            ));
        };
        let side = |name: &str, value: u32| {
            u16::try_from(value).map_err(|_| {
                TaskError::InvalidArgument(format!("{name}: {value} is more than a terminal has"))
            })
        };
        let size = rustix::termios::Winsize {
            ws_row: side("height", height)?,
            ws_col: side("width", width)?,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        rustix::termios::tcsetwinsize(console.fd(), size)
            .map_err(|error| TaskError::failed("resizing the terminal", error))
    }

    /// Waits until all output of the ended process is with the client, within reason.
    pub(crate) async fn drain(&self) {
        let outputs = std::mem::take(&mut *lock(&self.outputs));
        let deadline = tokio::time::Instant::now() + DRAIN;
        for mut output in outputs {
            if tokio::time::timeout_at(deadline, &mut output)
                .await
                .is_err()
            {
                output.abort();
            }
        }
        if let Some(input) = &self.input {
            input.abort();
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if let Some(input) = &self.input {
            input.abort();
        }
        for output in lock(&self.outputs).iter() {
            output.abort();
        }
    }
}

/// Refuses what [`Opened`] would refuse, before anything is made.
pub(crate) fn check(names: &Names) -> Result<()> {
    for (field, value) in [
        ("stdin", &names.stdin),
        ("stdout", &names.stdout),
        ("stderr", &names.stderr),
    ] {
        Target::parse(field, value)?;
    }
    Ok(())
}

fn pipe(field: &str) -> Result<(OwnedFd, OwnedFd)> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| TaskError::failed(format_args!("{field}: pipe"), error))
}

fn channel(field: &str, fd: OwnedFd) -> Result<Channel> {
    Channel::new(fd).map_err(TaskError::io(format!("{field}: pipe")))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
