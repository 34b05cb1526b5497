//! `/bin/sh` of the busybox that Kubernetes' tests get: busybox's own shell, or bash when a
//! variable's name is no identifier, for Debian's busybox does not hand such variables on.

use std::env;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn is_identifier(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    bytes
        .first()
        .is_some_and(|first| first.is_ascii_alphabetic() || *first == b'_')
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

fn main() -> ExitCode {
    let plain = env::vars_os().all(|(name, _)| is_identifier(&name));
    let shell = if plain {
        "/usr/bin/busybox"
    } else {
        "/usr/bin/bash-static"
    };
    // Under the name it was called by, with which a shell begins its messages.
    let mut arguments = env::args_os();
    let name = arguments.next().unwrap_or_else(|| "sh".into());
    let error = Command::new(shell).arg0(name).args(arguments).exec();
    eprintln!("sh: {shell}: {error}");
    ExitCode::from(126)
}
