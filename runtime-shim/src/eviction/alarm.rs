//! The kernel's own word that processes wait for memory (PSI, `Documentation/accounting/psi.rst`),
//! so that a sudden shortage is seen before the next look.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const PRESSURE: &str = "/proc/pressure/memory";
/// Some task waited 150 ms within two seconds. Without CAP_SYS_RESOURCE a window must be a
/// multiple of two seconds.
const TRIGGER: &[u8] = b"some 150000 2000000\0";

/// Rings when memory is short; for ever silent where the kernel has no such thing.
pub(super) struct Alarm(Option<AsyncFd<OwnedFd>>);

impl Alarm {
    pub(super) fn set() -> Self {
        let set = || -> io::Result<AsyncFd<OwnedFd>> {
            let mut file = OpenOptions::new().read(true).write(true).open(PRESSURE)?;
            file.write_all(TRIGGER)?;
            // SAFETY: an `OwnedFd` names one open descriptor, which stays open and the same for as
            // long as it lives.
            let registered =
                unsafe { AsyncFd::register_with_interest(OwnedFd::from(file), Interest::PRIORITY) };
            registered.map_err(|error| error.into_parts().1)
        };
        Self(match set() {
            Ok(file) => Some(file),
            Err(error) => {
                tracing::info!(%error, "no memory pressure events; looking every few seconds only");
                None
            }
        })
    }

    pub(super) async fn rings(&mut self) {
        let Some(file) = &self.0 else {
            return std::future::pending().await;
        };
        match file.ready(Interest::PRIORITY).await {
            Ok(mut ready) => ready.clear_ready(),
            Err(error) => {
                tracing::warn!(%error, "memory pressure events ended");
                self.0 = None;
            }
        }
    }
}
