//! Finding the program, with the texts that runc and its users know.

use std::ffi::CString;
use std::io::{self, Read};

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

/// Most that is read of a file that the container controls.
const MAX_ACCOUNTS: u64 = 1 << 20;

/// The environment with `HOME`, of the user's account unless it is set: as runc does.
pub(super) fn with_home(process: &Process) -> Vec<Vec<u8>> {
    let mut env = process.env.clone();
    if !env.iter().any(|variable| variable.starts_with(b"HOME=")) {
        let home = accounts().and_then(|text| home(&text, process.uid).map(<[u8]>::to_vec));
        env.push([b"HOME=".as_slice(), home.as_deref().unwrap_or(b"/")].concat());
    }
    env
}

/// `/etc/passwd`, if it is a file.
fn accounts() -> Option<Vec<u8>> {
    use std::os::unix::fs::OpenOptionsExt;
    // A FIFO in its place may not hold us up.
    let mut options = std::fs::OpenOptions::new();
    options
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open("/etc/passwd").ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    file.take(MAX_ACCOUNTS).read_to_end(&mut text).ok()?;
    Some(text)
}

/// The home of `uid` in passwd(5).
fn home(accounts: &[u8], uid: u32) -> Option<&[u8]> {
    accounts.split(|byte| *byte == b'\n').find_map(|line| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b':').collect();
        let id = std::str::from_utf8(fields.get(2)?)
            .ok()?
            .parse::<u32>()
            .ok()?;
        let home = fields.get(5)?;
        (id == uid && !home.is_empty() && !home.contains(&0)).then_some(*home)
    })
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

    #[test]
    fn homes_are_found_by_number() {
        let text = b"root:x:0:0:root:/root:/bin/sh\n\nbroken\napp:x:1000:1:,:/home/app:/bin/sh\n\
                     again:x:1000:1::/other:\nnone:x:7:7:::\n";
        assert_eq!(home(text, 0), Some(b"/root".as_slice()));
        assert_eq!(home(text, 1000), Some(b"/home/app".as_slice()));
        assert_eq!(home(text, 7), None);
        assert_eq!(home(text, 8), None);
        assert_eq!(home(b"", 0), None);
    }
}
