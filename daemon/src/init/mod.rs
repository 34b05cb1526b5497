//! PID 1 of a container: starts the image's command and stands for it.
//!
//! To the runtime this process is the container. It therefore forwards every
//! signal it is sent to the command, ends with the command's exit code, and does
//! so at once: the kernel then kills whatever the command left behind, exactly as
//! if the command itself had been PID 1. Between events it sleeps in
//! `sigwaitinfo`; there is no timer, thread or descriptor of its own. Only where
//! the runtime has given it a socket to the host does it wait for that as well:
//! see [`crate::control`].
//!
//! It stays dumpable on purpose. A non-dumpable PID 1 hides `/proc/1/fd` from
//! everybody in the container without CAP_SYS_PTRACE, and images do write to
//! `/proc/1/fd/1` to reach the container's log. There is nothing to guard in
//! return: this process holds no secret and no right that the command lacks.

pub(crate) mod lookup;
pub(crate) mod report;
pub(crate) mod signals;
pub(crate) mod spawn;

use std::ffi::OsString;
use std::path::PathBuf;
use std::{fmt, io};

use crate::complain;
use crate::control::Control;
use crate::sys::process::{self, Ended};
use report::StartError;

/// Why PID 1 itself cannot go on; it has no part in starting the command.
pub(crate) struct Fatal {
    pub(crate) action: &'static str,
    pub(crate) error: io::Error,
}

impl fmt::Display for Fatal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: {}", self.action, self.error)
    }
}

/// Runs `init [--report FILE] [--] COMMAND [ARG...]` and returns its exit code.
pub(crate) fn run(args: Vec<OsString>) -> u8 {
    let (report, command) = parse(args);
    // Before anything is run that could inherit it.
    let control = Control::take();
    match start(&command) {
        Ok(main) => supervise(main, control).map_or_else(
            |fatal| {
                complain(format_args!("sandman-daemon: {fatal}"));
                report::EXIT_CANNOT_RUN
            },
            exit_code,
        ),
        Err(error) => {
            complain(&error.message);
            if let Some(path) = report {
                report::write(&path, &error);
            }
            error.exit_code
        }
    }
}

/// Stands for `main` until it has ended, and listens to the host if there is a socket to it.
fn supervise(main: process::Pid, control: Option<Control>) -> Result<Ended, Fatal> {
    match control {
        Some(control) => control.supervise(main),
        None => signals::supervise(main),
    }
}

/// Splits init's own options from the command, which starts at the first word
/// that is not an option of ours.
fn parse(args: Vec<OsString>) -> (Option<PathBuf>, Vec<OsString>) {
    let mut args = args.into_iter().peekable();
    let mut report = None;
    loop {
        match args.peek().and_then(|arg| arg.to_str()) {
            Some("--report") => {
                args.next();
                report = args.next().map(PathBuf::from);
            }
            Some("--") => {
                args.next();
                break;
            }
            _ => break,
        }
    }
    (report, args.collect())
}

/// Takes PID 1's duties up, then starts the command.
fn start(command: &[OsString]) -> Result<process::Pid, StartError> {
    let setup = |action, error| {
        StartError::cannot_run(format!("sandman-daemon: {}", Fatal { action, error }))
    };
    // Before the first child, or its end and early signals could be missed.
    process::block_all_signals().map_err(|e| setup("block signals", e))?;
    if std::process::id() != 1 {
        // The pod shares its PID namespace: orphans would pass us by.
        process::become_subreaper().map_err(|e| setup("become a subreaper", e))?;
    }
    spawn::spawn(command)
}

/// The exit code that stands for `ended`, by the convention of shells and
/// container runtimes.
fn exit_code(ended: Ended) -> u8 {
    match ended {
        Ended::Exited(code) => code,
        Ended::Signaled(signal) => 128_u8.saturating_add(signal),
    }
}

#[cfg(test)]
mod tests {
    use super::{Ended, exit_code, parse};

    fn words(words: &[&str]) -> Vec<std::ffi::OsString> {
        words.iter().map(Into::into).collect()
    }

    #[test]
    fn command_starts_after_our_options() {
        let cases: [(&[&str], Option<&str>, &[&str]); 5] = [
            (&["sh", "-c", "--report"], None, &["sh", "-c", "--report"]),
            (&["--", "--report", "x"], None, &["--report", "x"]),
            (&["--report", "/r", "a", "--"], Some("/r"), &["a", "--"]),
            (&["--report", "/r", "--", "--"], Some("/r"), &["--"]),
            (&["--report"], None, &[]),
        ];
        for (input, report, command) in cases {
            let (got_report, got_command) = parse(words(input));
            assert_eq!(
                got_report.as_deref(),
                report.map(std::path::Path::new),
                "{input:?}"
            );
            assert_eq!(got_command, words(command), "{input:?}");
        }
    }

    #[test]
    fn signals_count_from_128() {
        assert_eq!(exit_code(Ended::Exited(7)), 7);
        assert_eq!(exit_code(Ended::Signaled(9)), 137);
        assert_eq!(exit_code(Ended::Signaled(64)), 192);
    }
}
