//! Which stream of the connection plays which part in a session.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::options::StreamOptions;

/// Parts of a session, by the `streamtype` header or the channel number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Error,
    Stdin,
    Stdout,
    Stderr,
    Resize,
}

impl Role {
    pub(super) fn from_stream_type(value: &str) -> Option<Self> {
        Some(match value {
            "error" => Self::Error,
            "stdin" => Self::Stdin,
            "stdout" => Self::Stdout,
            "stderr" => Self::Stderr,
            "resize" => Self::Resize,
            _ => return None,
        })
    }
}

/// Streams by role, shared by the reader, which learns of them, and the session.
#[derive(Clone, Debug, Default)]
pub(super) struct Streams {
    ids: Arc<Mutex<Ids>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Ids {
    error: Option<u32>,
    stdin: Option<u32>,
    stdout: Option<u32>,
    stderr: Option<u32>,
    resize: Option<u32>,
}

impl Ids {
    fn slot(&mut self, role: Role) -> &mut Option<u32> {
        match role {
            Role::Error => &mut self.error,
            Role::Stdin => &mut self.stdin,
            Role::Stdout => &mut self.stdout,
            Role::Stderr => &mut self.stderr,
            Role::Resize => &mut self.resize,
        }
    }
}

impl Streams {
    /// The fixed channels of WebSocket sessions.
    pub(super) fn channels(options: StreamOptions) -> Self {
        let ids = Ids {
            stdin: options.stdin.then_some(0),
            stdout: options.stdout.then_some(1),
            stderr: options.stderr.then_some(2),
            error: Some(3),
            resize: Some(4),
        };
        Self {
            ids: Arc::new(Mutex::new(ids)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ids> {
        // No code that can panic runs under the lock.
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a stream its role, unless another has it already.
    pub(super) fn assign(&self, role: Role, stream: u32) -> bool {
        let mut ids = self.lock();
        let slot = ids.slot(role);
        let free = slot.is_none();
        if free {
            *slot = Some(stream);
        }
        free
    }

    pub(super) fn get(&self, role: Role) -> Option<u32> {
        *self.lock().slot(role)
    }

    pub(super) fn role(&self, stream: u32) -> Option<Role> {
        let mut ids = self.lock();
        [
            Role::Stdin,
            Role::Resize,
            Role::Stdout,
            Role::Stderr,
            Role::Error,
        ]
        .into_iter()
        .find(|role| *ids.slot(*role) == Some(stream))
    }

    /// Whether the process can start. The resize stream is not waited for: a client
    /// without terminal that attaches to a container with one never opens it.
    pub(super) fn complete(&self, options: StreamOptions) -> bool {
        let ids = self.lock();
        ids.error.is_some()
            && (!options.stdin || ids.stdin.is_some())
            && (!options.stdout || ids.stdout.is_some())
            && (!options.stderr || ids.stderr.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_without_resize() {
        let options = StreamOptions {
            stdin: true,
            stdout: true,
            stderr: false,
            tty: true,
        };
        let streams = Streams::default();
        for (role, stream) in [(Role::Error, 1), (Role::Stdin, 3), (Role::Stdout, 5)] {
            assert!(!streams.complete(options));
            assert!(streams.assign(role, stream));
        }
        assert!(streams.complete(options));
        assert!(!streams.assign(Role::Stdin, 7));
        assert_eq!(streams.role(3), Some(Role::Stdin));
        assert_eq!(streams.role(7), None);
    }
}
