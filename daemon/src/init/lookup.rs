//! Finds the file of a command in the container's own PATH.
//!
//! The rules and the words of failure are those of Go's `exec.LookPath`, which
//! runc applies to a container's command: users and tools know its messages.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::{fs, io};

use crate::init::report::StartError;
use crate::init::spawn::lower;
use crate::sys::at;

/// What containerd gives a container whose image sets no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The path to execute for `name`: itself if it has a slash, else the first
/// executable file in `path`, whose empty elements mean the working directory.
///
/// # Errors
/// Exit code 127 if there is no such file, 126 if it may not be executed.
pub(crate) fn find(name: &OsStr, path: Option<&OsStr>) -> Result<CString, StartError> {
    let shown = name.to_string_lossy();
    if name.as_bytes().contains(&b'/') {
        return executable(Path::new(name)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                StartError::not_found(format!("exec: {shown:?}: stat {shown}: {}", lower(&error)))
            }
            _ => StartError::cannot_run(format!("exec: {shown:?}: {}", lower(&error))),
        });
    }
    std::env::split_paths(path.unwrap_or(OsStr::new(DEFAULT_PATH)))
        .map(|dir| {
            if dir.as_os_str().is_empty() {
                Path::new(".").join(name)
            } else {
                dir.join(name)
            }
        })
        .find_map(|candidate| executable(&candidate).ok())
        .ok_or_else(|| {
            StartError::not_found(format!(
                "exec: {shown:?}: executable file not found in $PATH"
            ))
        })
}

fn executable(path: &Path) -> io::Result<CString> {
    let metadata = fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    let name = CString::new(path.as_os_str().as_bytes())?;
    match at::may_execute(&name) {
        // An old kernel or a seccomp profile: the mode bits have to do.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
            if metadata.permissions().mode() & 0o111 == 0 {
                return Err(io::Error::from_raw_os_error(libc::EACCES));
            }
        }
        other => other?,
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use std::ffi::{OsStr, OsString};
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::find;

    struct Fixture(tempfile::TempDir);

    impl Fixture {
        /// `one/tool` is not executable, `two/tool` is, `one/dir` is a directory.
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            for dir in ["one/dir", "two"] {
                fs::create_dir_all(root.path().join(dir)).unwrap();
            }
            for (file, mode) in [("one/tool", 0o644), ("two/tool", 0o755), ("two/dir", 0o755)] {
                let path = root.path().join(file);
                fs::write(&path, "").unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            }
            Self(root)
        }

        fn at(&self, name: &str) -> OsString {
            self.0.path().join(name).into_os_string()
        }

        fn path(&self) -> OsString {
            std::env::join_paths([self.at("absent"), self.at("one"), self.at("two")]).unwrap()
        }
    }

    fn found(name: &OsStr, path: Option<&OsStr>) -> OsString {
        use std::os::unix::ffi::OsStringExt;
        OsString::from_vec(find(name, path).unwrap().into_bytes())
    }

    fn refused(name: &OsStr, path: Option<&OsStr>) -> (u8, String) {
        let error = find(name, path).unwrap_err();
        (error.exit_code, error.message)
    }

    #[test]
    fn passes_over_what_cannot_run() {
        let fixture = Fixture::new();
        for name in ["tool", "dir"] {
            let expected = Path::new(&fixture.at("two")).join(name);
            assert_eq!(
                Path::new(&found(name.as_ref(), Some(&fixture.path()))),
                expected
            );
        }
    }

    #[test]
    fn says_what_runtimes_say() {
        let fixture = Fixture::new();
        let missing = "exec: \"nope\": executable file not found in $PATH".to_owned();
        assert_eq!(
            refused("nope".as_ref(), Some(&fixture.path())),
            (127, missing.clone())
        );
        assert_eq!(
            refused("nope".as_ref(), Some(OsStr::new(""))),
            (127, missing)
        );

        let tool = fixture.at("one/tool");
        let denied = format!("exec: {tool:?}: permission denied");
        assert_eq!(refused(&tool, None), (126, denied));

        let dir = fixture.at("one");
        assert_eq!(
            refused(&dir, None),
            (126, format!("exec: {dir:?}: is a directory"))
        );

        let absent = fixture.at("absent/x");
        let shown = absent.to_string_lossy();
        let message = format!("exec: {absent:?}: stat {shown}: no such file or directory");
        assert_eq!(refused(&absent, None), (127, message));

        let below_file = fixture.at("two/tool/x");
        assert_eq!(refused(&below_file, None).0, 127);
    }

    #[test]
    fn path_decides_only_for_bare_names() {
        let fixture = Fixture::new();
        let tool = fixture.at("two/tool");
        assert_eq!(found(&tool, Some(OsStr::new("/nowhere"))), tool);
        assert_eq!(
            found("sh".as_ref(), None)
                .to_string_lossy()
                .rsplit('/')
                .next(),
            Some("sh")
        );
    }
}
