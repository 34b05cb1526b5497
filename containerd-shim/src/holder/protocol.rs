//! Messages between a shim and the holder.
//!
//! A `SOCK_SEQPACKET` socket, one message a datagram, descriptors beside it (`SCM_RIGHTS`). A
//! request carries a number that its answer repeats; exits come unasked with number 0. One
//! client at a time owns the holder: a newer one takes over and the older one is cut off.
//!
//! Everything the holder knows hangs on a [`Key`], chosen by the shim: a process, descriptors in
//! numbered slots, a note. It lives until [`Request::Forget`], whatever becomes of the shim.

use crate::wire::{Malformed, Reader, Writer};

/// Version of these messages; a holder refuses a client that speaks another one.
pub const VERSION: u32 = 1;

/// Longest datagram in bytes. Plans are longer than that at times and travel as a memfd.
pub const MAX_MESSAGE: usize = 128 * 1024;
/// Most descriptors beside one datagram (the kernel's SCM_MAX_FD).
pub const MAX_FDS: usize = 253;
/// Longest key in bytes.
pub const MAX_KEY: usize = 255;
/// Longest note in bytes.
pub const MAX_NOTE: usize = 16 * 1024;
/// Most descriptors kept with one key.
pub const MAX_SLOTS: usize = 16;

/// What the shim calls a process or a set of descriptors. Means nothing to the holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Vec<u8>);

impl Key {
    /// A key of 1 to [`MAX_KEY`] bytes; `None` for any other length.
    #[must_use]
    pub fn new(bytes: impl Into<Vec<u8>>) -> Option<Self> {
        let bytes = bytes.into();
        (1..=MAX_KEY).contains(&bytes.len()).then_some(Self(bytes))
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::new(reader.bytes()?).ok_or(Malformed("key"))
    }
}

/// Where among the descriptors of a key; the shim gives slots their meaning.
pub type Slot = u8;

/// What the zygote must know before it clones; the rest is in the plan, which only the clone reads.
/// Indices count the descriptors that follow the kept ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloneHeader {
    /// `CLONE_NEW*` flags of clone3(2).
    pub flags: u64,
    /// cgroup v2 folder in which the child is born (`CLONE_INTO_CGROUP`).
    pub cgroup: Option<u8>,
    /// PID namespace (or pidfd) that the child joins.
    pub pid_namespace: Option<u8>,
}

/// What a shim asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// First message of a connection.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Has the zygote clone a sandbox. The first `kept` descriptors stay with the holder in those
    /// slots, the others go to the clone: the plan (a memfd) first. Answer: [`Reply::Started`].
    Launch {
        /// A key that has no process yet.
        key: Key,
        /// Slots of the first descriptors.
        kept: Vec<Slot>,
        /// For the zygote.
        header: CloneHeader,
    },
    /// Runs a host program (runc, a logger) as the holder's child, in a session of its own. The
    /// descriptors become its 0, 1, 2, 3 ...; without any, it has `/dev/null` for 0, 1 and 2.
    /// Answer: [`Reply::Started`].
    Spawn {
        /// A key that has no process yet.
        key: Key,
        /// Program (absolute path) and arguments.
        argv: Vec<Vec<u8>>,
        /// `NAME=value`, the whole environment.
        env: Vec<Vec<u8>>,
        /// Working directory.
        cwd: Vec<u8>,
    },
    /// Gives a key to a process that fell to the holder as an orphan: a container that runc made.
    /// Answer: [`Reply::Started`], or [`Code::NotFound`] when it is neither a child of the holder
    /// nor among the orphans that ended lately. Its exit is told as any other.
    Claim {
        /// A key that has no process yet.
        key: Key,
        /// Process id on the host.
        pid: i32,
    },
    /// Keeps the one descriptor beside the message. Replaces what is in the slot.
    Keep {
        /// Made if need be.
        key: Key,
        /// Where.
        slot: Slot,
    },
    /// Closes what is in the slot.
    Drop {
        /// Whose.
        key: Key,
        /// Which.
        slot: Slot,
    },
    /// Remembers up to [`MAX_NOTE`] bytes with the key, in place of earlier ones.
    Note {
        /// Made if need be.
        key: Key,
        /// Anything.
        note: Vec<u8>,
    },
    /// Sends a signal to the key's process. It cannot hit another one: a process id is free again
    /// only after the holder has reaped it.
    Signal {
        /// Whose.
        key: Key,
        /// Signal number; 0 only asks whether it runs.
        signal: i32,
    },
    /// Asks for all keys. Answer: one [`Reply::Entry`] each, without descriptors, then
    /// [`Reply::Done`].
    List,
    /// Asks for one key. Answer: [`Reply::Entry`] with a copy of each descriptor, in the order of
    /// its slots.
    Take {
        /// Which.
        key: Key,
    },
    /// Serves containerd's connections for the shim: their requests go to the first descriptor
    /// beside the message, a stream socket of ttrpc, and its answers back. The second is the stderr
    /// of shims to come. The third, if there is one, listens for containerd. Once the shim's
    /// connection to the holder ends, the command starts another one. Answer: [`Reply::Done`], or
    /// [`Code::NotFound`] when nothing listens yet.
    Front {
        /// Program and arguments; none if somebody else starts shims.
        argv: Vec<Vec<u8>>,
        /// `NAME=value`, the whole environment.
        env: Vec<Vec<u8>>,
    },
    /// The shim is about to end, and is not to be started again.
    Retire,
    /// Acknowledges the exit, if there was a process, and forgets the key with all it holds.
    /// Refused with [`Code::Running`] while the process lives; an unknown key is no error.
    Forget {
        /// Which.
        key: Key,
    },
}

/// How a process ended, as wait(2) told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, or 128 + signal.
    pub code: u32,
    /// When it was reaped, in nanoseconds since the epoch (wall clock).
    pub at_ns: u64,
}

/// What the holder knows by a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Key,
    /// Process id on the host, once there is or was a process.
    pub pid: Option<i32>,
    /// Present once it ended.
    pub exit: Option<Exit>,
    /// Filled slots, ascending.
    pub slots: Vec<Slot>,
    /// What [`Request::Note`] left.
    pub note: Vec<u8>,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The message makes no sense, or the client speaks another version.
    Invalid,
    /// No such key, or no such process.
    NotFound,
    /// The key has a process already.
    Exists,
    /// The process still runs.
    Running,
    /// A system call failed; its errno comes along.
    System,
    /// The zygote died over it; another one is there, and trying again is right.
    Zygote,
}

/// What the holder says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done as asked.
    Done,
    /// A process runs under the key.
    Started {
        /// Its id on the host.
        pid: i32,
    },
    /// Answers [`Request::List`] and [`Request::Take`].
    Entry(Entry),
    /// Not done.
    Refused {
        /// Why.
        code: Code,
        /// errno of the failed system call; 0 without one.
        errno: i32,
        /// What failed, for people.
        text: String,
    },
    /// A process ended. Told once a connection, until it is forgotten.
    Exited {
        /// Whose.
        key: Key,
        /// Its id on the host.
        pid: i32,
        /// How.
        exit: Exit,
    },
}

impl CloneHeader {
    /// Appends it to a message.
    pub fn write(&self, w: &mut Writer) {
        w.u64(self.flags);
        w.option(self.cgroup.as_ref(), |w, index| w.u8(*index));
        w.option(self.pid_namespace.as_ref(), |w, index| w.u8(*index));
    }

    /// Takes it off a message.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            flags: r.u64()?,
            cgroup: r.option(Reader::u8)?,
            pid_namespace: r.option(Reader::u8)?,
        })
    }
}

impl Request {
    /// The datagram that asks this.
    #[must_use]
    pub fn encode(&self, number: u32) -> Vec<u8> {
        let mut w = Writer::new();
        w.u32(number);
        match self {
            Self::Hello { version } => {
                w.u8(0);
                w.u32(*version);
            }
            Self::Launch { key, kept, header } => {
                w.u8(1);
                w.bytes(key.as_bytes());
                w.bytes(kept);
                header.write(&mut w);
            }
            Self::Spawn {
                key,
                argv,
                env,
                cwd,
            } => {
                w.u8(2);
                w.bytes(key.as_bytes());
                w.list(argv, |w, word| w.bytes(word));
                w.list(env, |w, variable| w.bytes(variable));
                w.bytes(cwd);
            }
            Self::Claim { key, pid } => {
                w.u8(3);
                w.bytes(key.as_bytes());
                w.i32(*pid);
            }
            Self::Keep { key, slot } => {
                w.u8(4);
                w.bytes(key.as_bytes());
                w.u8(*slot);
            }
            Self::Drop { key, slot } => {
                w.u8(5);
                w.bytes(key.as_bytes());
                w.u8(*slot);
            }
            Self::Note { key, note } => {
                w.u8(6);
                w.bytes(key.as_bytes());
                w.bytes(note);
            }
            Self::Signal { key, signal } => {
                w.u8(7);
                w.bytes(key.as_bytes());
                w.i32(*signal);
            }
            Self::List => w.u8(8),
            Self::Take { key } => {
                w.u8(9);
                w.bytes(key.as_bytes());
            }
            Self::Forget { key } => {
                w.u8(10);
                w.bytes(key.as_bytes());
            }
            Self::Front { argv, env } => {
                w.u8(11);
                w.list(argv, |w, word| w.bytes(word));
                w.list(env, |w, variable| w.bytes(variable));
            }
            Self::Retire => w.u8(12),
        }
        w.finish()
    }

    /// Reads a datagram: the request's number, and the request.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(message: &[u8]) -> Result<(u32, Self), Malformed> {
        let mut reader = Reader::new(message);
        let r = &mut reader;
        let number = r.u32()?;
        let request = match r.u8()? {
            0 => Self::Hello { version: r.u32()? },
            1 => Self::Launch {
                key: Key::read(r)?,
                kept: r.bytes()?.to_vec(),
                header: CloneHeader::read(r)?,
            },
            2 => Self::Spawn {
                key: Key::read(r)?,
                argv: r.list(|r| r.bytes().map(<[u8]>::to_vec))?,
                env: r.list(|r| r.bytes().map(<[u8]>::to_vec))?,
                cwd: r.bytes()?.to_vec(),
            },
            3 => Self::Claim {
                key: Key::read(r)?,
                pid: r.i32()?,
            },
            4 => Self::Keep {
                key: Key::read(r)?,
                slot: r.u8()?,
            },
            5 => Self::Drop {
                key: Key::read(r)?,
                slot: r.u8()?,
            },
            6 => Self::Note {
                key: Key::read(r)?,
                note: limited(r.bytes()?, MAX_NOTE, "note")?,
            },
            7 => Self::Signal {
                key: Key::read(r)?,
                signal: r.i32()?,
            },
            8 => Self::List,
            9 => Self::Take { key: Key::read(r)? },
            10 => Self::Forget { key: Key::read(r)? },
            11 => Self::Front {
                argv: r.list(|r| r.bytes().map(<[u8]>::to_vec))?,
                env: r.list(|r| r.bytes().map(<[u8]>::to_vec))?,
            },
            12 => Self::Retire,
            _ => return Err(Malformed("request kind")),
        };
        reader.end()?;
        Ok((number, request))
    }
}

fn limited(bytes: &[u8], limit: usize, what: &'static str) -> Result<Vec<u8>, Malformed> {
    if bytes.len() > limit {
        return Err(Malformed(what));
    }
    Ok(bytes.to_vec())
}

impl Code {
    const ALL: [Self; 6] = [
        Self::Invalid,
        Self::NotFound,
        Self::Exists,
        Self::Running,
        Self::System,
        Self::Zygote,
    ];

    fn write(self, w: &mut Writer) {
        let place = Self::ALL.iter().position(|code| *code == self);
        w.u8(place
            .and_then(|place| u8::try_from(place).ok())
            .unwrap_or_default());
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::ALL
            .get(usize::from(r.u8()?))
            .copied()
            .ok_or(Malformed("code"))
    }
}

impl Exit {
    fn write(&self, w: &mut Writer) {
        w.u32(self.code);
        w.u64(self.at_ns);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            code: r.u32()?,
            at_ns: r.u64()?,
        })
    }
}

impl Reply {
    /// The datagram that says this.
    #[must_use]
    pub fn encode(&self, number: u32) -> Vec<u8> {
        let mut w = Writer::new();
        w.u32(number);
        match self {
            Self::Done => w.u8(0),
            Self::Started { pid } => {
                w.u8(1);
                w.i32(*pid);
            }
            Self::Entry(entry) => {
                w.u8(2);
                w.bytes(entry.key.as_bytes());
                w.option(entry.pid.as_ref(), |w, pid| w.i32(*pid));
                w.option(entry.exit.as_ref(), |w, exit| exit.write(w));
                w.bytes(&entry.slots);
                w.bytes(&entry.note);
            }
            Self::Refused { code, errno, text } => {
                w.u8(3);
                code.write(&mut w);
                w.i32(*errno);
                w.bytes(text.as_bytes());
            }
            Self::Exited { key, pid, exit } => {
                w.u8(4);
                w.bytes(key.as_bytes());
                w.i32(*pid);
                exit.write(&mut w);
            }
        }
        w.finish()
    }

    /// Reads a datagram: the number of the request that it answers (0 for none), and the reply.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(message: &[u8]) -> Result<(u32, Self), Malformed> {
        let mut reader = Reader::new(message);
        let r = &mut reader;
        let number = r.u32()?;
        let reply = match r.u8()? {
            0 => Self::Done,
            1 => Self::Started { pid: r.i32()? },
            2 => Self::Entry(Entry {
                key: Key::read(r)?,
                pid: r.option(Reader::i32)?,
                exit: r.option(Exit::read)?,
                slots: r.bytes()?.to_vec(),
                note: r.bytes()?.to_vec(),
            }),
            3 => Self::Refused {
                code: Code::read(r)?,
                errno: r.i32()?,
                text: String::from_utf8_lossy(r.bytes()?).into_owned(),
            },
            4 => Self::Exited {
                key: Key::read(r)?,
                pid: r.i32()?,
                exit: Exit::read(r)?,
            },
            _ => return Err(Malformed("reply kind")),
        };
        reader.end()?;
        Ok((number, reply))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> Key {
        Key::new(*b"pod/container").unwrap()
    }

    #[test]
    fn requests_survive_the_wire() {
        let header = CloneHeader {
            flags: 1 << 34,
            cgroup: Some(3),
            pid_namespace: None,
        };
        let requests = [
            Request::Hello { version: VERSION },
            Request::Launch {
                key: key(),
                kept: vec![1, 2],
                header,
            },
            Request::Spawn {
                key: key(),
                argv: vec![b"/bin/runc".to_vec(), b"create".to_vec()],
                env: vec![b"A=b".to_vec()],
                cwd: b"/".to_vec(),
            },
            Request::Claim { key: key(), pid: 7 },
            Request::Keep {
                key: key(),
                slot: 9,
            },
            Request::Drop {
                key: key(),
                slot: 9,
            },
            Request::Note {
                key: key(),
                note: vec![0, 255],
            },
            Request::Signal {
                key: key(),
                signal: 9,
            },
            Request::List,
            Request::Take { key: key() },
            Request::Forget { key: key() },
        ];
        for (number, request) in (1..).zip(requests) {
            assert_eq!(
                Request::decode(&request.encode(number)),
                Ok((number, request))
            );
        }
    }

    #[test]
    fn replies_survive_the_wire() {
        let exit = Exit {
            code: 137,
            at_ns: 1 << 60,
        };
        let replies = [
            Reply::Done,
            Reply::Started { pid: 12 },
            Reply::Entry(Entry {
                key: key(),
                pid: Some(4),
                exit: Some(exit),
                slots: vec![0, 4],
                note: b"n".to_vec(),
            }),
            Reply::Refused {
                code: Code::Zygote,
                errno: 5,
                text: "x".into(),
            },
            Reply::Exited {
                key: key(),
                pid: 12,
                exit,
            },
        ];
        for (number, reply) in (0..).zip(replies) {
            assert_eq!(Reply::decode(&reply.encode(number)), Ok((number, reply)));
        }
    }

    #[test]
    fn every_code_has_its_number() {
        for code in Code::ALL {
            let mut w = Writer::new();
            code.write(&mut w);
            assert_eq!(Code::read(&mut Reader::new(&w.finish())), Ok(code));
        }
    }

    #[test]
    fn keys_have_a_length() {
        assert!(Key::new(Vec::new()).is_none());
        assert!(Key::new(vec![1; MAX_KEY]).is_some());
        assert!(Key::new(vec![1; MAX_KEY + 1]).is_none());
    }

    proptest! {
        #[test]
        fn nonsense_is_refused_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            // What decodes also encodes to the same bytes: nothing is read twice or skipped.
            if let Ok((number, request)) = Request::decode(&bytes) {
                prop_assert_eq!(request.encode(number), bytes.clone());
            }
            if let Ok((number, reply)) = Reply::decode(&bytes) {
                // Texts are made valid UTF-8 on reading.
                if !matches!(reply, Reply::Refused { .. }) {
                    prop_assert_eq!(reply.encode(number), bytes);
                }
            }
        }
    }
}
