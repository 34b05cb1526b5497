//! What a host asks.

use alloc::vec::Vec;

use crate::wire::{Malformed, Reader, Result, Writer};
use crate::{MAX_GROUPS, MAX_LIMITS, MAX_MESSAGE, MAX_STRINGS};

/// What a host asks of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// A host is here, for the first time or again.
    Hello {
        /// Its [`crate::VERSION`].
        version: u16,
        /// Comes back in the answer, and in no other's.
        nonce: u64,
    },
    /// Start a process. Unless it has a terminal, its three streams come along.
    Start(Start<'a>),
    /// Send a signal to a process that was started.
    Signal {
        /// Which.
        exec: u64,
        /// 1 to 64.
        signal: u8,
        /// To all processes that come from it, as far as they can be found.
        tree: bool,
    },
    /// The end of a process is recorded.
    Forget {
        /// Which.
        exec: u64,
    },
}

/// A process to start. Everything that is not here it has from the agent: namespaces, cgroups, the
/// root, the seccomp filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start<'a> {
    /// The host's name for it.
    pub exec: u64,
    /// Program and arguments.
    pub args: Vec<&'a [u8]>,
    /// `NAME=value`.
    pub env: Vec<&'a [u8]>,
    /// Working directory.
    pub cwd: &'a [u8],
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
    /// File mode mask; 022 if it is not given, as runc has it.
    pub umask: Option<u32>,
    /// Capabilities, all of which the host itself could give.
    pub capabilities: Capabilities,
    /// Resource limits.
    pub limits: Vec<Limit>,
    /// Set no_new_privs.
    pub no_new_privileges: bool,
    /// It gets a new terminal of this size.
    pub terminal: Option<Size>,
}

/// Size of a terminal in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Columns; 0 leaves the kernel's default.
    pub width: u16,
    /// Rows.
    pub height: u16,
}

/// A resource limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// `RLIMIT_*`.
    pub resource: u32,
    /// Soft limit.
    pub soft: u64,
    /// Hard limit.
    pub hard: u64,
}

/// Capability sets, a bit each by the kernel's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Bounding.
    pub bounding: u64,
    /// Effective.
    pub effective: u64,
    /// Permitted.
    pub permitted: u64,
    /// Inheritable.
    pub inheritable: u64,
    /// Ambient.
    pub ambient: u64,
}

impl<'a> Request<'a> {
    /// The message that asks this under `number`.
    ///
    /// # Errors
    /// [`Malformed`] when it is longer than an agent takes.
    pub fn encode(&self, number: u32) -> Result<Vec<u8>> {
        let mut w = Writer::default();
        w.u32(number);
        match self {
            Self::Hello { version, nonce } => {
                w.u8(0);
                w.u16(*version);
                w.u64(*nonce);
            }
            Self::Start(start) => {
                w.u8(1);
                start.write(&mut w)?;
            }
            Self::Signal { exec, signal, tree } => {
                w.u8(2);
                w.u64(*exec);
                w.u8(*signal);
                w.bool(*tree);
            }
            Self::Forget { exec } => {
                w.u8(3);
                w.u64(*exec);
            }
        }
        if w.0.len() > MAX_MESSAGE {
            return Err(Malformed("length"));
        }
        Ok(w.0)
    }

    /// Reads a message: its number, and what it asks.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(message: &'a [u8]) -> Result<(u32, Self)> {
        let mut reader = Reader::new(message, MAX_MESSAGE)?;
        let r = &mut reader;
        let number = r.u32()?;
        let request = match r.u8()? {
            0 => Self::Hello {
                version: r.u16()?,
                nonce: r.u64()?,
            },
            1 => Self::Start(Start::read(r)?),
            2 => Self::Signal {
                exec: r.u64()?,
                signal: match r.u8()? {
                    signal @ 1..=64 => signal,
                    _ => return Err(Malformed("signal")),
                },
                tree: r.bool()?,
            },
            3 => Self::Forget { exec: r.u64()? },
            _ => return Err(Malformed("kind of request")),
        };
        reader.end()?;
        Ok((number, request))
    }
}

impl<'a> Start<'a> {
    fn write(&self, w: &mut Writer) -> Result<()> {
        w.u64(self.exec);
        w.list(&self.args, MAX_STRINGS, "arguments", |w, s| w.bytes(s))?;
        w.list(&self.env, MAX_STRINGS, "environment", |w, s| w.bytes(s))?;
        w.bytes(self.cwd);
        w.u32(self.uid);
        w.u32(self.gid);
        w.list(&self.groups, MAX_GROUPS, "groups", |w, g| w.u32(*g))?;
        w.bool(self.umask.is_some());
        if let Some(umask) = self.umask {
            w.u32(umask);
        }
        for set in self.capabilities.all() {
            w.u64(set);
        }
        w.list(&self.limits, MAX_LIMITS, "limits", |w, limit| {
            w.u32(limit.resource);
            w.u64(limit.soft);
            w.u64(limit.hard);
        })?;
        w.bool(self.no_new_privileges);
        w.bool(self.terminal.is_some());
        if let Some(size) = self.terminal {
            w.u16(size.width);
            w.u16(size.height);
        }
        Ok(())
    }

    fn read(r: &mut Reader<'a>) -> Result<Self> {
        Ok(Self {
            exec: r.u64()?,
            args: r.list(MAX_STRINGS, "arguments", Reader::string)?,
            env: r.list(MAX_STRINGS, "environment", Reader::string)?,
            cwd: r.string()?,
            uid: r.u32()?,
            gid: r.u32()?,
            groups: r.list(MAX_GROUPS, "groups", Reader::u32)?,
            umask: if r.bool()? { Some(r.u32()?) } else { None },
            capabilities: Capabilities {
                bounding: r.u64()?,
                effective: r.u64()?,
                permitted: r.u64()?,
                inheritable: r.u64()?,
                ambient: r.u64()?,
            },
            limits: r.list(MAX_LIMITS, "limits", |r| {
                Ok(Limit {
                    resource: r.u32()?,
                    soft: r.u64()?,
                    hard: r.u64()?,
                })
            })?,
            no_new_privileges: r.bool()?,
            terminal: if r.bool()? {
                Some(Size {
                    width: r.u16()?,
                    height: r.u16()?,
                })
            } else {
                None
            },
        })
    }
}

impl Capabilities {
    fn all(&self) -> [u64; 5] {
        [
            self.bounding,
            self.effective,
            self.permitted,
            self.inheritable,
            self.ambient,
        ]
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    fn start() -> Start<'static> {
        Start {
            exec: 1 << 40,
            args: vec![b"sh", b"", b"-c"],
            env: vec![b"A=b", b"PATH=/bin"],
            cwd: b"/tmp",
            uid: 1000,
            gid: u32::MAX,
            groups: vec![1, 2, 3],
            umask: Some(0o27),
            capabilities: Capabilities {
                bounding: 1,
                effective: 2,
                permitted: 3,
                inheritable: 4,
                ambient: u64::MAX,
            },
            limits: vec![Limit {
                resource: 7,
                soft: 1,
                hard: u64::MAX,
            }],
            no_new_privileges: true,
            terminal: Some(Size {
                width: 80,
                height: 24,
            }),
        }
    }

    fn all() -> [Request<'static>; 5] {
        [
            Request::Hello {
                version: 3,
                nonce: u64::MAX,
            },
            Request::Start(start()),
            Request::Start(Start::default()),
            Request::Signal {
                exec: 9,
                signal: 64,
                tree: true,
            },
            Request::Forget { exec: 2 },
        ]
    }

    #[test]
    fn requests_survive_the_wire() {
        for (number, request) in (1..).zip(all()) {
            let bytes = request.encode(number).unwrap();
            assert_eq!(Request::decode(&bytes), Ok((number, request)));
        }
    }

    #[test]
    fn every_cut_and_every_extra_byte_is_seen() {
        for request in all() {
            let mut bytes = request.encode(1).unwrap();
            for end in 0..bytes.len() {
                assert!(Request::decode(&bytes[..end]).is_err(), "{request:?} {end}");
            }
            bytes.push(0);
            assert_eq!(Request::decode(&bytes), Err(Malformed("end")));
        }
    }

    #[test]
    fn limits_hold_for_both_sides() {
        let word: &[u8] = b"x";
        let many = Start {
            args: vec![word; MAX_STRINGS + 1],
            ..Start::default()
        };
        assert_eq!(Request::Start(many).encode(1), Err(Malformed("arguments")));
        let long = vec![b'x'; MAX_MESSAGE];
        let long = Start {
            args: vec![&long],
            ..Start::default()
        };
        assert_eq!(Request::Start(long).encode(1), Err(Malformed("length")));
        assert_eq!(
            Request::decode(&vec![0; MAX_MESSAGE + 1]),
            Err(Malformed("length"))
        );
        let nul = Start {
            args: vec![b"a\0b"],
            ..Start::default()
        };
        let nul = Request::Start(nul).encode(1).unwrap();
        assert_eq!(Request::decode(&nul), Err(Malformed("NUL byte")));
        for signal in [0, 65, 255] {
            let request = Request::Signal {
                exec: 1,
                signal,
                tree: false,
            };
            let bytes = request.encode(1).unwrap();
            assert_eq!(Request::decode(&bytes), Err(Malformed("signal")));
        }
    }

    proptest! {
        /// What decodes encodes to the same bytes: nothing is read twice or skipped.
        #[test]
        fn nonsense_is_refused_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok((number, request)) = Request::decode(&bytes) {
                prop_assert_eq!(request.encode(number).unwrap(), bytes);
            }
        }

        #[test]
        fn a_changed_byte_is_refused_or_means_itself(at in 0_usize..150, byte in any::<u8>()) {
            let mut bytes = Request::Start(start()).encode(7).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok((number, request)) = Request::decode(&bytes) {
                prop_assert_eq!(request.encode(number).unwrap(), bytes);
            }
        }
    }
}
