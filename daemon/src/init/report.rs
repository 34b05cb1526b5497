//! Tells the host that the command never ran.
//!
//! An exit status has eight bits and a command may use all of them, so "could not
//! be started" cannot travel in it: a shell that ends with 127 and a missing
//! command look alike. The host therefore names a file with `--report`, in
//! practice the container's termination message file, which it binds into every
//! container anyway and reads when the container ends. If and only if the command
//! was never executed, that file's content becomes one line of JSON:
//!
//! ```json
//! {"startError":{"exitCode":127,"message":"exec: \"x\": executable file not found in $PATH"}}
//! ```
//!
//! The host believes the line only if `exitCode` is also the exit status of the
//! task, and then reports StartError with that message instead of an ordinary
//! exit. A command can forge the line, which misleads about nobody but itself.
//! It cannot happen by accident: the record is written by a container in which
//! no other process has run yet.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::complain;

/// Exit code of a command that was found but could not be run.
pub(super) const EXIT_CANNOT_RUN: u8 = 126;
/// Exit code of a command that does not exist.
const EXIT_NOT_FOUND: u8 = 127;

/// Longest message in a record. Kubernetes shows at most 4 KiB of a termination
/// message, and the command's name in it is the image's choice; the escapes can
/// make six bytes of one.
const MAX_MESSAGE: usize = 600;

/// Why the command does not run, in the words of container runtimes.
#[derive(Debug)]
pub(crate) struct StartError {
    /// What this process exits with.
    pub(crate) exit_code: u8,
    /// One line for people.
    pub(crate) message: String,
}

impl StartError {
    /// The command, or its interpreter, does not exist.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self {
            exit_code: EXIT_NOT_FOUND,
            message: message.into(),
        }
    }

    /// The command exists but did not start.
    pub(crate) fn cannot_run(message: impl Into<String>) -> Self {
        Self {
            exit_code: EXIT_CANNOT_RUN,
            message: message.into(),
        }
    }
}

/// Writes the record for `error` to `path`. A failure only costs the host the
/// distinction, so it is said on stderr and nothing more.
pub(super) fn write(path: &Path, error: &StartError) {
    if let Err(failure) = try_write(path, error) {
        complain(format_args!(
            "sandman-daemon: cannot report to {}: {failure}",
            path.display()
        ));
    }
}

fn try_write(path: &Path, error: &StartError) -> io::Result<()> {
    // Only a file that the host made, and whatever an image has put there
    // instead (a FIFO without a reader) must not hold PID 1 up.
    let mut file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    file.set_len(0)?;
    file.write_all(record(error).as_bytes())
}

fn record(error: &StartError) -> String {
    let message = shorten(&error.message, MAX_MESSAGE);
    let code = error.exit_code;
    format!(
        "{{\"startError\":{{\"exitCode\":{code},\"message\":{}}}}}\n",
        json_string(message)
    )
}

/// At most `max` bytes of `text`, cut between characters.
fn shorten(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

fn json_string(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{MAX_MESSAGE, StartError, record, try_write};

    fn parsed(error: &StartError) -> serde_json::Value {
        let line = record(error);
        assert!(line.ends_with('\n') && line.len() <= 4096, "{line}");
        serde_json::from_str(&line).unwrap()
    }

    #[test]
    fn record_is_one_line_of_json() {
        let message = "exec: \"a\\b\n\u{1b}ü\": not found";
        let value = parsed(&StartError::not_found(message));
        assert_eq!(value["startError"]["exitCode"], 127);
        assert_eq!(value["startError"]["message"], message);
        assert_eq!(record(&StartError::not_found(message)).lines().count(), 1);
    }

    #[test]
    fn long_names_do_not_outgrow_the_message() {
        for name in ["x", "ü", "\u{1}"] {
            let value = parsed(&StartError::cannot_run(name.repeat(10_000)));
            let message = value["startError"]["message"].as_str().unwrap();
            assert!(!message.is_empty() && message.len() <= MAX_MESSAGE);
        }
    }

    #[test]
    fn writes_only_to_an_existing_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let error = StartError::cannot_run("no");

        let file = dir.path().join("file");
        assert!(try_write(&file, &error).is_err(), "must not create a file");
        fs::write(&file, "x".repeat(500)).unwrap();
        try_write(&file, &error).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), record(&error));

        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(try_write(&link, &error).is_err());
        assert!(try_write(dir.path(), &error).is_err());
        assert!(try_write("/dev/null".as_ref(), &error).is_err());
    }
}
