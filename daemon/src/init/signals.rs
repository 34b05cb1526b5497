//! The loop that PID 1 spends its life in: take a signal, reap or forward.

use crate::complain;
use crate::init::Fatal;
use crate::sys::process::{self, Ended, Pid};

/// Reaps every child and forwards every signal to `main` until `main` has ended.
///
/// All signals are blocked, so none is lost or acted on behind our back: faults
/// of this process aside, the kernel only queues them for `sigwaitinfo`.
pub(crate) fn supervise(main: Pid) -> Result<Ended, Fatal> {
    loop {
        let signal = process::wait_signal().map_err(|error| Fatal {
            action: "wait for a signal",
            error,
        })?;
        if signal == libc::SIGCHLD {
            // One SIGCHLD may stand for many ended children.
            while let Some((pid, ended)) = process::reap().map_err(|error| Fatal {
                action: "reap children",
                error,
            })? {
                if pid == main {
                    return Ok(ended);
                }
            }
        } else {
            forward(main, signal);
        }
    }
}

/// Sends `signal` on to `main`.
pub(crate) fn forward(main: Pid, signal: i32) {
    if let Err(error) = process::kill(main, signal) {
        // Not ESRCH: until it is reaped, `main` keeps its pid. What remains
        // is a policy of the kernel or a security module, and no reason to
        // bring the container down.
        complain(format_args!(
            "sandman-daemon: cannot forward signal {signal}: {error}"
        ));
    }
}
