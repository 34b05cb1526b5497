//! The processes that the host has asked for, and from them what is to be said next.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use sandman_agent_protocol::{self as protocol, Kind, MAX_EXECS, MAX_TEXT, Reply};

use super::Message;
use super::child;
use crate::sys::process::{Ended, Pid};

/// Why a request was not done.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    kind: Kind,
    text: String,
}

impl Refusal {
    pub(super) fn new(kind: Kind, text: String) -> Self {
        Self { kind, text }
    }
}

impl From<Refusal> for Reply {
    fn from(refusal: Refusal) -> Self {
        Self::Refused {
            kind: refusal.kind,
            text: refusal.text,
        }
    }
}

/// A child that is about to become its program.
pub(super) struct Starting {
    pub(super) exec: u64,
    /// The request to answer.
    pub(super) number: u32,
    pub(super) pid: Pid,
    /// Its number among the events.
    pub(super) key: u64,
    /// Where it says what went wrong; closed once it runs.
    pub(super) told: OwnedFd,
    /// Of its terminal.
    pub(super) master: Option<OwnedFd>,
}

enum Stage {
    Starting(u64, File),
    Running,
    Failed(Kind, String),
}

struct Exec {
    id: u64,
    /// The request that started it; 0 once it is answered, or if another host asked.
    number: u32,
    pid: Pid,
    stage: Stage,
    /// The host knows that it runs, or does not.
    start_said: bool,
    master: Option<OwnedFd>,
    ended: Option<Ended>,
    end_said: bool,
}

/// What a message says, to be noted once it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Answer,
    Start(u64),
    End(u64),
}

/// See the module.
#[derive(Default)]
pub(super) struct Table {
    execs: Vec<Exec>,
    answer: Option<(u32, Reply)>,
}

impl Table {
    /// Answers request `number`, as soon as the socket takes it.
    pub(super) fn answer(&mut self, number: u32, reply: Reply) {
        self.answer = Some((number, reply));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.execs.is_empty()
    }

    pub(super) fn owes_answer(&self) -> bool {
        self.answer.is_some()
    }

    /// There is a new host: it is told of everything that goes on, and nothing is left of what
    /// the last one was still to hear.
    pub(super) fn greet(&mut self) {
        for exec in &mut self.execs {
            exec.number = 0;
            exec.end_said = false;
            // Nobody waits any more for what failed.
            exec.start_said = matches!(exec.stage, Stage::Failed(..));
        }
        self.tidy();
    }

    /// Whether `exec` can be begun.
    pub(super) fn room(&self, exec: u64) -> Result<(), Refusal> {
        if self.execs.iter().any(|known| known.id == exec) {
            return Err(Refusal::new(Kind::Invalid, "the name is taken".into()));
        }
        if self.execs.len() >= MAX_EXECS {
            return Err(Refusal::new(Kind::Unable, "too many processes".into()));
        }
        Ok(())
    }

    pub(super) fn begin(&mut self, starting: Starting) {
        self.execs.push(Exec {
            id: starting.exec,
            number: starting.number,
            pid: starting.pid,
            stage: Stage::Starting(starting.key, File::from(starting.told)),
            start_said: false,
            master: starting.master,
            ended: None,
            end_said: false,
        });
    }

    /// The child with this number among the events runs its program, or has said why not.
    pub(super) fn became(&mut self, key: u64) {
        let found = self
            .execs
            .iter_mut()
            .find(|exec| matches!(exec.stage, Stage::Starting(known, _) if known == key));
        let Some(exec) = found else { return };
        if let Stage::Starting(_, told) = &mut exec.stage {
            exec.stage = stage(told);
        }
        if matches!(exec.stage, Stage::Failed(..)) {
            exec.master = None;
            exec.start_said |= exec.number == 0;
        }
        self.tidy();
    }

    /// A child was reaped.
    pub(super) fn ended(&mut self, pid: Pid, ended: Ended) {
        let found = self
            .execs
            .iter_mut()
            .find(|exec| exec.pid == pid && exec.ended.is_none());
        if let Some(exec) = found {
            exec.ended = Some(ended);
            self.tidy();
        }
    }

    /// The id of a process that runs its program.
    pub(super) fn running(&self, exec: u64) -> Result<Pid, Refusal> {
        self.execs
            .iter()
            .find(|known| known.id == exec && known.ended.is_none())
            .filter(|known| matches!(known.stage, Stage::Running))
            .map(|known| known.pid)
            .ok_or_else(|| Refusal::new(Kind::Gone, "no such process".into()))
    }

    /// The host has recorded the end of `exec`.
    pub(super) fn forget(&mut self, exec: u64) -> Result<(), Refusal> {
        let Some(at) = self.execs.iter().position(|known| known.id == exec) else {
            return Ok(());
        };
        if self.execs[at].ended.is_none() {
            return Err(Refusal::new(Kind::Invalid, "it has not ended".into()));
        }
        self.execs.remove(at);
        self.shrink();
        Ok(())
    }

    /// The next thing to say. An answer goes first: a new host waits for its own.
    pub(super) fn message(&self) -> Option<Message<'_>> {
        if let Some((number, reply)) = &self.answer {
            return Some(Message {
                bytes: reply.encode(*number),
                fd: None,
                what: What::Answer,
            });
        }
        self.execs.iter().find_map(Exec::message)
    }

    /// That was said.
    pub(super) fn said(&mut self, what: What) {
        match what {
            What::Answer => self.answer = None,
            What::Start(id) => {
                if let Some(exec) = self.find(id) {
                    exec.start_said = true;
                    exec.number = 0;
                    exec.master = None;
                }
            }
            What::End(id) => {
                if let Some(exec) = self.find(id) {
                    exec.end_said = true;
                }
            }
        }
        self.tidy();
    }

    /// That cannot be said, for another reason than a slow host.
    pub(super) fn unsayable(&mut self, what: What, error: &io::Error) {
        match what {
            What::Start(id) => {
                if let Some(exec) = self.find(id)
                    && exec.master.take().is_some()
                {
                    // Its terminal hangs up with the master, which ends it.
                    let text = format!("hand over the terminal: {error}");
                    exec.stage = Stage::Failed(Kind::Unable, text);
                    return;
                }
                self.said(what);
            }
            What::Answer | What::End(_) => self.said(what),
        }
    }

    fn find(&mut self, id: u64) -> Option<&mut Exec> {
        self.execs.iter_mut().find(|exec| exec.id == id)
    }

    /// Drops what never ran, was reaped, and nobody has to be told of.
    fn tidy(&mut self) {
        self.execs.retain(|exec| {
            !matches!(exec.stage, Stage::Failed(..)) || !exec.start_said || exec.ended.is_none()
        });
        self.shrink();
    }

    fn shrink(&mut self) {
        if self.execs.is_empty() {
            self.execs = Vec::new();
        }
    }
}

impl Exec {
    fn message(&self) -> Option<Message<'_>> {
        let (reply, what) = match (&self.stage, self.ended) {
            (Stage::Starting(..), _) => return None,
            (Stage::Running, _) if !self.start_said => {
                (Reply::Started { exec: self.id }, What::Start(self.id))
            }
            (Stage::Failed(kind, text), _) if !self.start_said => (
                Reply::Refused {
                    kind: *kind,
                    text: text.clone(),
                },
                What::Start(self.id),
            ),
            (Stage::Running, Some(ended)) if !self.end_said => {
                let ended = match ended {
                    Ended::Exited(code) => protocol::Ended::Exited(code),
                    Ended::Signaled(signal) => protocol::Ended::Signaled(signal),
                };
                let reply = Reply::Exited {
                    exec: self.id,
                    ended,
                };
                (reply, What::End(self.id))
            }
            _ => return None,
        };
        let (number, fd) = match what {
            What::Start(_) => (self.number, self.master.as_ref().map(AsFd::as_fd)),
            _ => (0, None),
        };
        Some(Message {
            bytes: reply.encode(number),
            fd,
            what,
        })
    }
}

/// What a child has become: its pipe is at its end, or holds all that it has to say.
fn stage(told: &mut File) -> Stage {
    let mut record = [0; MAX_TEXT + 1];
    match told.read(&mut record) {
        Ok(0) => Stage::Running,
        Ok(length) => {
            let (kind, text) = child::read_record(&record[..length]);
            Stage::Failed(kind, text)
        }
        Err(error) => Stage::Failed(Kind::Unable, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::sys::process::pipe;

    /// A child that has not said anything yet, and its end of the pipe.
    fn starting(exec: u64, number: u32) -> (Starting, OwnedFd) {
        let (told, tell) = pipe().unwrap();
        let starting = Starting {
            exec,
            number,
            pid: Pid::try_from(exec).unwrap(),
            key: 100 + exec,
            told,
            master: None,
        };
        (starting, tell)
    }

    fn running(exec: u64, number: u32) -> Table {
        let mut table = Table::default();
        add(&mut table, exec, number);
        table
    }

    fn add(table: &mut Table, exec: u64, number: u32) {
        let (starting, tell) = starting(exec, number);
        table.begin(starting);
        drop(tell);
        table.became(100 + exec);
    }

    /// Everything that is to be said, in order.
    fn said(table: &mut Table) -> Vec<(u32, Reply)> {
        let mut said = Vec::new();
        while let Some(message) = table.message() {
            said.push(Reply::decode(&message.bytes).unwrap());
            let what = message.what;
            table.said(what);
        }
        said
    }

    fn exited(exec: u64, code: u8) -> (u32, Reply) {
        let ended = protocol::Ended::Exited(code);
        (0, Reply::Exited { exec, ended })
    }

    #[test]
    fn a_process_is_told_of_once_and_in_order() {
        let mut table = running(1, 7);
        table.ended(1, Ended::Exited(3));
        assert_eq!(
            said(&mut table),
            [(7, Reply::Started { exec: 1 }), exited(1, 3)]
        );
        assert_eq!(said(&mut table), []);
        assert_eq!(table.running(1).unwrap_err().kind, Kind::Gone);
        table.forget(1).unwrap();
        table.forget(1).unwrap();
        assert!(table.execs.is_empty());
    }

    #[test]
    fn nothing_is_said_of_a_child_before_it_runs() {
        let mut table = Table::default();
        let (child, _tell) = starting(1, 7);
        table.begin(child);
        table.ended(1, Ended::Signaled(9));
        assert_eq!(said(&mut table), []);
        assert_eq!(table.running(1).unwrap_err().kind, Kind::Gone);
    }

    #[test]
    fn what_never_ran_is_refused_and_gone_once_reaped() {
        let mut table = Table::default();
        let (child, tell) = starting(1, 7);
        table.begin(child);
        let record = child::record(Kind::Failed, "exec: no");
        File::from(tell).write_all(&record).unwrap();
        table.became(101);
        let refused = Reply::Refused {
            kind: Kind::Failed,
            text: "exec: no".into(),
        };
        assert_eq!(said(&mut table), [(7, refused)]);
        assert_eq!(table.execs.len(), 1, "not reaped yet");
        table.ended(1, Ended::Exited(127));
        assert!(table.execs.is_empty());
    }

    #[test]
    fn a_new_host_hears_everything_again_but_no_old_answer() {
        let mut table = running(1, 7);
        add(&mut table, 2, 8);
        table.ended(2, Ended::Exited(0));
        said(&mut table);
        // Its request was read, its answer never sent.
        add(&mut table, 3, 9);
        table.greet();
        table.answer(1, Reply::Done);
        assert_eq!(
            said(&mut table),
            [
                (1, Reply::Done),
                (0, Reply::Started { exec: 1 }),
                (0, Reply::Started { exec: 2 }),
                exited(2, 0),
                (0, Reply::Started { exec: 3 }),
            ]
        );
    }

    #[test]
    fn a_failure_that_nobody_waits_for_is_dropped() {
        let mut table = Table::default();
        let (child, tell) = starting(1, 7);
        table.begin(child);
        table.greet();
        File::from(tell)
            .write_all(&child::record(Kind::Failed, "no"))
            .unwrap();
        table.became(101);
        table.ended(1, Ended::Exited(127));
        assert_eq!(said(&mut table), []);
        assert!(table.execs.is_empty());
    }

    #[test]
    fn names_and_room_are_limited() {
        let mut table = running(1, 0);
        assert_eq!(table.room(1).unwrap_err().kind, Kind::Invalid);
        assert_eq!(table.forget(1).unwrap_err().kind, Kind::Invalid);
        for exec in 2..=MAX_EXECS as u64 {
            table.room(exec).unwrap();
            add(&mut table, exec, 0);
        }
        assert_eq!(table.room(0).unwrap_err().kind, Kind::Unable);
    }
}
