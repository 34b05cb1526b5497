//! What an agent says.

use alloc::string::String;
use alloc::vec::Vec;

use crate::wire::{Malformed, Reader, Result, Writer};
use crate::{MAX_REPLY, MAX_TEXT};

/// What an agent says to a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Answers [`crate::Request::Hello`].
    Hello {
        /// The agent's [`crate::VERSION`].
        version: u16,
        /// The host's.
        nonce: u64,
    },
    /// A process runs its program. Without a request: it still does. The master of its terminal
    /// comes along, the first time.
    Started {
        /// Which.
        exec: u64,
    },
    /// A process has ended. Told to each host until it is forgotten.
    Exited {
        /// Which.
        exec: u64,
        /// How.
        ended: Ended,
    },
    /// It was not done.
    Refused {
        /// What that means for the host.
        kind: Kind,
        /// Why, for people.
        text: String,
    },
    /// It was done.
    Done,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// `exit(code)`.
    Exited(u8),
    /// Killed by this signal.
    Signaled(u8),
}

impl Ended {
    /// The exit code that stands for it, by the convention of shells and container runtimes.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Signaled(signal) => 128_u8.saturating_add(signal),
        }
    }
}

/// What a refusal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is the user's mistake: a program that is not there. Nobody else could do it.
    Failed,
    /// The agent lacks a right or a resource that the host may have.
    Unable,
    /// There is no such process, or it has ended.
    Gone,
    /// The request makes no sense here.
    Invalid,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Failed, Self::Unable, Self::Gone, Self::Invalid];
}

impl Reply {
    /// The message that says this; `number` is that of the request, 0 without one. Texts are cut
    /// to what may be sent.
    #[must_use]
    pub fn encode(&self, number: u32) -> Vec<u8> {
        let mut w = Writer::default();
        w.u32(number);
        match self {
            Self::Hello { version, nonce } => {
                w.u8(0);
                w.u16(*version);
                w.u64(*nonce);
            }
            Self::Started { exec } => {
                w.u8(1);
                w.u64(*exec);
            }
            Self::Exited { exec, ended } => {
                w.u8(2);
                w.u64(*exec);
                let (signaled, number) = match ended {
                    Ended::Exited(code) => (false, *code),
                    Ended::Signaled(signal) => (true, *signal),
                };
                w.bool(signaled);
                w.u8(number);
            }
            Self::Refused { kind, text } => {
                w.u8(3);
                let kinds = (0_u8..).zip(Kind::ALL);
                w.u8(kinds.filter(|(_, k)| k == kind).map(|(n, _)| n).sum());
                w.bytes(&text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]);
            }
            Self::Done => w.u8(4),
        }
        w.0
    }

    /// Reads a message: the number of the request that it answers, and what it says.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(message: &[u8]) -> Result<(u32, Self)> {
        let mut reader = Reader::new(message, MAX_REPLY)?;
        let r = &mut reader;
        let number = r.u32()?;
        let reply = match r.u8()? {
            0 => Self::Hello {
                version: r.u16()?,
                nonce: r.u64()?,
            },
            1 => Self::Started { exec: r.u64()? },
            2 => Self::Exited {
                exec: r.u64()?,
                ended: match (r.bool()?, r.u8()?) {
                    (false, code) => Ended::Exited(code),
                    (true, signal @ 1..=64) => Ended::Signaled(signal),
                    (true, _) => return Err(Malformed("signal")),
                },
            },
            3 => Self::Refused {
                kind: *Kind::ALL
                    .get(usize::from(r.u8()?))
                    .ok_or(Malformed("kind of refusal"))?,
                text: {
                    let bytes = r.bytes()?;
                    if bytes.len() > MAX_TEXT {
                        return Err(Malformed("text"));
                    }
                    let text = core::str::from_utf8(bytes).map_err(|_| Malformed("text"))?;
                    text.into()
                },
            },
            4 => Self::Done,
            _ => return Err(Malformed("kind of reply")),
        };
        reader.end()?;
        Ok((number, reply))
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    fn all() -> Vec<Reply> {
        let mut all = vec![
            Reply::Hello {
                version: 1,
                nonce: 2,
            },
            Reply::Started { exec: u64::MAX },
            Reply::Exited {
                exec: 1,
                ended: Ended::Exited(255),
            },
            Reply::Exited {
                exec: 1,
                ended: Ended::Signaled(9),
            },
            Reply::Done,
        ];
        all.extend(Kind::ALL.map(|kind| Reply::Refused {
            kind,
            text: "exec: \"ü\"".into(),
        }));
        all
    }

    #[test]
    fn replies_survive_the_wire() {
        for (number, reply) in (0..).zip(all()) {
            let bytes = reply.encode(number);
            assert_eq!(Reply::decode(&bytes), Ok((number, reply.clone())));
            for end in 0..bytes.len() {
                assert!(Reply::decode(&bytes[..end]).is_err(), "{reply:?} {end}");
            }
        }
    }

    #[test]
    fn texts_are_cut_and_long_ones_refused() {
        let long = Reply::Refused {
            kind: Kind::Failed,
            text: "ü".repeat(MAX_TEXT),
        };
        let bytes = long.encode(1);
        assert!(bytes.len() <= MAX_REPLY);
        let Ok((1, Reply::Refused { text, .. })) = Reply::decode(&bytes) else {
            panic!("a refusal");
        };
        assert_eq!(text, "ü".repeat(MAX_TEXT / 2));

        let mut forged = vec![0, 0, 0, 0, 3, 0];
        let length = u32::try_from(MAX_TEXT + 1).unwrap();
        forged.extend(length.to_le_bytes());
        forged.extend(vec![b'x'; MAX_TEXT + 1]);
        assert_eq!(Reply::decode(&forged), Err(Malformed("text")));
    }

    #[test]
    fn ends_become_exit_codes() {
        assert_eq!(Ended::Exited(7).code(), 7);
        assert_eq!(Ended::Signaled(9).code(), 137);
        assert_eq!(Ended::Signaled(64).code(), 192);
    }

    proptest! {
        #[test]
        fn nonsense_is_refused_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok((number, reply)) = Reply::decode(&bytes) {
                prop_assert_eq!(reply.encode(number), bytes);
            }
        }
    }
}
