//! Starts the container's command as PID 1's child.
//!
//! The command always leads a session of its own, as it would if the runtime had
//! started it directly: a `kill 0` in a script then cannot reach PID 1 and come
//! back as a forwarded signal.

use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use crate::init::lookup;
use crate::init::report::StartError;
use crate::sys::error_text;
use crate::sys::process::{self, Pid, SpawnError};

/// Starts `command` and returns once it runs.
pub(super) fn spawn(command: &[OsString]) -> Result<Pid, StartError> {
    let name = match command.first() {
        Some(name) if !name.is_empty() => name,
        _ => return Err(StartError::cannot_run("exec: no command")),
    };
    let program = lookup::find(name, env::var_os("PATH").as_deref())?;
    let argv = command
        .iter()
        .map(|argument| CString::new(argument.clone().into_vec()))
        .collect::<Result<Vec<_>, _>>()
        // The arguments came in as C strings: this is for the type system.
        .map_err(|_| StartError::cannot_run("exec: argument with a NUL byte"))?;

    let terminal = hand_over_terminal()
        .map_err(|e| StartError::cannot_run(format!("sandman-daemon: terminal: {e}")))?;
    process::spawn(program.as_c_str(), &argv, terminal)
        .map_err(|error| start_error(&program.to_string_lossy(), name, error))
}

/// If stdin is our controlling terminal, gives it up for the command's session,
/// so that what is typed (^C, ^\, ^Z, a hang-up) reaches the command's foreground
/// group and never PID 1. Returns whether there is a terminal to take.
fn hand_over_terminal() -> io::Result<bool> {
    let stdin = io::stdin();
    if !process::leads_terminal(stdin.as_fd()) {
        return Ok(false);
    }
    process::release_terminal(stdin.as_fd())?;
    // Sent to us by the release itself; the command must not be told of it.
    process::discard_pending(libc::SIGHUP);
    process::discard_pending(libc::SIGCONT);
    Ok(true)
}

/// Names the failure as container runtimes do.
fn start_error(program: &str, name: &OsStr, error: SpawnError) -> StartError {
    match error {
        SpawnError::Setup(error) => StartError::cannot_run(format!(
            "exec: {:?}: cannot start a process: {}",
            Path::new(name),
            lower(&error)
        )),
        // The file was there a moment ago: its interpreter is what is missing.
        SpawnError::Exec(error) if error.kind() == io::ErrorKind::NotFound => {
            StartError::not_found(format!("exec {program}: {}", lower(&error)))
        }
        SpawnError::Exec(error) => {
            StartError::cannot_run(format!("exec {program}: {}", lower(&error)))
        }
    }
}

/// The system's text in the lower case that runtimes print.
pub(crate) fn lower(error: &io::Error) -> String {
    let text = error_text(error);
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => text,
    }
}
