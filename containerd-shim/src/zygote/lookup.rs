//! Finding the program, with the texts that runc and its users know.

use std::ffi::CString;
use std::io;

use nix::unistd::{AccessFlags, access};

use super::child::Step;
use super::gate::Failure;
use super::plan::Process;

/// The program's path, as the process itself finds it (execvp's rules; Go's for the texts).
pub(super) fn find(process: &Process) -> Step<CString> {
    let name = process.args.first().map(Vec::as_slice).unwrap_or_default();
    if name.is_empty() {
        return Err(failure(process, 0, "no command"));
    }
    if name.contains(&b'/') {
        return match runnable(name) {
            Ok(path) => Ok(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let path = String::from_utf8_lossy(name).into_owned();
                let mut failure = failure(process, libc::ENOENT, "");
                failure.step = format!("{}: stat {path}", failure.step);
                Err(failure)
            }
            Err(error) => Err(failure(
                process,
                error.raw_os_error().unwrap_or_default(),
                "",
            )),
        };
    }
    let mut denied = false;
    for folder in path(process).split(|byte| *byte == b':') {
        let folder = if folder.is_empty() {
            b".".as_slice()
        } else {
            folder
        };
        match runnable(&[folder, b"/", name].concat()) {
            Ok(path) => return Ok(path),
            Err(error) => denied |= error.kind() == io::ErrorKind::PermissionDenied,
        }
    }
    if denied {
        return Err(failure(process, libc::EACCES, ""));
    }
    Err(failure(process, 0, "executable file not found in $PATH"))
}

fn path(process: &Process) -> &[u8] {
    process
        .env
        .iter()
        .find_map(|variable| variable.strip_prefix(b"PATH="))
        .unwrap_or_default()
}

fn runnable(path: &[u8]) -> io::Result<CString> {
    let path = CString::new(path)?;
    // Follows links as exec will; with the user's own rights, which are in effect already.
    let meta = nix::sys::stat::stat(path.as_c_str())?;
    if meta.st_mode & libc::S_IFMT == libc::S_IFDIR {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    access(path.as_c_str(), AccessFlags::X_OK)?;
    Ok(path)
}

fn failure(process: &Process, errno: i32, detail: &str) -> Failure {
    let name = process.args.first().map(Vec::as_slice).unwrap_or_default();
    Failure {
        step: format!("exec: {:?}", String::from_utf8_lossy(name)),
        errno,
        detail: detail.to_owned(),
    }
}

/// Says what exec itself refused.
pub(super) fn exec_failure(process: &Process, error: &io::Error) -> Failure {
    let name = process.args.first().map(Vec::as_slice).unwrap_or_default();
    Failure {
        step: format!("exec {}", String::from_utf8_lossy(name)),
        errno: error.raw_os_error().unwrap_or_default(),
        detail: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(word: &str, path: &str) -> Process {
        Process {
            args: vec![word.into()],
            env: vec![format!("PATH={path}").into_bytes()],
            ..Process::default()
        }
    }

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let found = |word, path| find(&process(word, path)).map(|found| found.into_bytes());
        assert_eq!(found("sh", "/nowhere:/bin"), Ok(b"/bin/sh".to_vec()));
        assert_eq!(found("/bin/sh", ""), Ok(b"/bin/sh".to_vec()));
        let text = |word, path| find(&process(word, path)).unwrap_err().to_string();
        assert_eq!(
            text("nothing-here", "/bin"),
            "exec: \"nothing-here\": executable file not found in $PATH"
        );
        assert_eq!(
            text("/none", ""),
            "exec: \"/none\": stat /none: no such file or directory"
        );
        assert_eq!(
            text("/etc/passwd", ""),
            "exec: \"/etc/passwd\": permission denied"
        );
        assert_eq!(text("/etc", ""), "exec: \"/etc\": is a directory");
        assert_eq!(text("", ""), "exec: \"\": no command");
    }
}
