//! What a sandbox that is being made and its shim say to each other.
//!
//! A SEQPACKET pair, made by the shim for one sandbox. The sandbox says that it is ready, or what
//! failed; it then waits for the word to go. Exec closes its end, so the end of the socket after
//! that word means that the program runs. If the shim's ends (its own and the holder's copy) are
//! gone before, the sandbox ends.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use crate::sys::message;
use crate::wire::{Malformed, Reader, Writer};

/// Longest message in bytes.
pub const MAX_MESSAGE: usize = 8 * 1024;

/// The one word a shim says.
pub const GO: u8 = 1;

/// What a sandbox says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// Everything is prepared. The master of the terminal comes along, if there is one.
    Ready,
    /// It cannot be made.
    Failed(Failure),
}

/// Which step failed, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What it was about to do, for people: `mount "/data"`.
    pub step: String,
    /// errno; 0 when no system call failed.
    pub errno: i32,
    /// More about it; may be empty.
    pub detail: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.step)?;
        if self.errno != 0 {
            let error = io::Error::from_raw_os_error(self.errno);
            write!(f, ": {}", words(&error))?;
        }
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// A system call's error in the words that runc's users know: `no such file or directory`.
pub(crate) fn words(error: &io::Error) -> String {
    let text = error.to_string();
    match (error.raw_os_error(), text.split_once(" (os error")) {
        (Some(_), Some((words, _))) => words.to_lowercase(),
        _ => text,
    }
}

impl Said {
    /// The datagram that says this.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Self::Ready => w.u8(0),
            Self::Failed(failure) => {
                // Paths in it may be as long as they like.
                let short = |text: &str| text.as_bytes().iter().take(2048).copied().collect();
                let (step, detail): (Vec<u8>, Vec<u8>) =
                    (short(&failure.step), short(&failure.detail));
                w.u8(1);
                w.bytes(&step);
                w.i32(failure.errno);
                w.bytes(&detail);
            }
        }
        w.finish()
    }

    /// Reads a datagram.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(message: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(message);
        let r = &mut reader;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = match r.u8()? {
            0 => Self::Ready,
            1 => Self::Failed(Failure {
                step: text(r.bytes()?),
                errno: r.i32()?,
                detail: text(r.bytes()?),
            }),
            _ => return Err(Malformed("what a sandbox said")),
        };
        reader.end()?;
        Ok(said)
    }
}

/// The sandbox's side: says something, with a descriptor if there is one.
pub(super) fn say(gate: BorrowedFd<'_>, said: &Said, fd: Option<RawFd>) -> io::Result<()> {
    message::send(gate, &said.encode(), fd.as_slice(), None)
}

/// The sandbox's side: waits for the word to go; `false` when nobody is left to say it.
pub(super) fn wait(gate: BorrowedFd<'_>) -> io::Result<bool> {
    let mut buffer = [0; 4];
    let received = message::receive(gate, &mut buffer)?;
    Ok(received.length == 1 && buffer[0] == GO)
}

/// The shim's side: what the sandbox has said, `None` for the end of the socket.
///
/// # Errors
/// `WouldBlock` on a non-blocking socket that is still silent; `InvalidData` for nonsense.
pub fn hear(gate: BorrowedFd<'_>) -> io::Result<Option<(Said, Option<OwnedFd>)>> {
    let mut buffer = [0; MAX_MESSAGE];
    let received = match message::receive(gate, &mut buffer) {
        // Its end died with something of ours unread.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        other => other?,
    };
    if received.length == 0 {
        return Ok(None);
    }
    let said = Said::decode(&buffer[..received.length])
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Some((said, received.fds.into_iter().next())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_wire() {
        let failure = Failure {
            step: "mount \"/x\"".into(),
            errno: libc::ENOENT,
            detail: "d".into(),
        };
        assert_eq!(
            failure.to_string(),
            "mount \"/x\": no such file or directory: d"
        );
        for said in [Said::Ready, Said::Failed(failure)] {
            assert_eq!(Said::decode(&said.encode()), Ok(said));
        }
        assert!(Said::decode(&[0, 0]).is_err());
        assert!(Said::decode(&[9]).is_err());
        let long = Failure {
            step: "x".repeat(9000),
            errno: 0,
            detail: "y".repeat(9000),
        };
        assert!(Said::Failed(long).encode().len() < MAX_MESSAGE);
    }
}
