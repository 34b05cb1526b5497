//! Files that are either absent, old or new, never half written. Nothing here overwrites without being told to.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Mode of private keys and of files that embed one.
pub(crate) const SECRET: u32 = 0o600;
/// Mode of certificates and public keys.
pub(crate) const PUBLIC: u32 = 0o644;

/// No file of ours comes near this; a larger one is not what its name says.
const MAX_BYTES: u64 = 1 << 20;

/// Creates a file that must not exist yet. The content is complete and durable when the name appears.
pub(crate) fn create(path: &Path, content: &str, mode: u32) -> Result<()> {
    let staged = stage(path, content, mode)?;
    // link(2), unlike rename(2), fails when the name is taken.
    let linked = std::fs::hard_link(&staged, path);
    let removed = std::fs::remove_file(&staged);
    linked.map_err(|source| match source.kind() {
        ErrorKind::AlreadyExists => Error::Exists {
            path: path.to_owned(),
        },
        _ => Error::Io {
            action: "create",
            path: path.to_owned(),
            source,
        },
    })?;
    removed.map_err(Error::io("remove", &staged))?;
    sync_directory(path)
}

/// Replaces a file in one step: readers see the old content or the new.
pub(crate) fn replace(path: &Path, content: &str, mode: u32) -> Result<()> {
    let staged = stage(path, content, mode)?;
    commit(&staged, path)
}

/// Writes the file that will become `path`, durably, under a name beside it.
/// A file left there by an interrupted run is discarded: it was never in use.
pub(crate) fn stage(path: &Path, content: &str, mode: u32) -> Result<PathBuf> {
    let staged = staged_path(path);
    discard(&staged)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&staged)
        .map_err(Error::io("create", &staged))?;
    file.write_all(content.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(Error::io("write", &staged))?;
    Ok(staged)
}

/// Removes a file that was never in use, if it is there.
pub(crate) fn discard(staged: &Path) -> Result<()> {
    match std::fs::remove_file(staged) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io("remove", staged)(e)),
        _ => Ok(()),
    }
}

/// Moves a staged file to its place, over what is there.
pub(crate) fn commit(staged: &Path, path: &Path) -> Result<()> {
    std::fs::rename(staged, path).map_err(Error::io("replace", path))?;
    sync_directory(path)
}

/// Name under which the successor of `path` is staged.
pub(crate) fn staged_path(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".next");
    path.with_file_name(name)
}

/// Reads a text file of sane size.
pub(crate) fn read(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    let mut text = String::new();
    file.take(MAX_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(Error::io("read", path))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::content(
            path,
            format!("is larger than {MAX_BYTES} bytes"),
        ));
    }
    Ok(text)
}

/// Creates a directory and its parents.
pub(crate) fn create_directory(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(Error::io("create directory", path))
}

/// Fails with the first of `paths` that exists, before anything is written.
pub(crate) fn check_absent<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    for path in paths {
        match std::fs::symlink_metadata(path) {
            Ok(_) => {
                return Err(Error::Exists {
                    path: path.to_owned(),
                });
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io("look at", path)(e)),
        }
    }
    Ok(())
}

/// Makes the last rename or link in the directory of `path` durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(directory)
        .and_then(|d| d.sync_all())
        .map_err(Error::io("sync", directory))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn create_refuses_to_overwrite_and_leaves_nothing_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.key");
        create(&path, "one", SECRET).unwrap();
        let error = create(&path, "two", SECRET).unwrap_err();
        assert!(
            matches!(&error, Error::Exists { path: p } if *p == path),
            "{error}"
        );
        assert_eq!(read(&path).unwrap(), "one");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, SECRET);
    }

    #[test]
    fn a_file_staged_by_an_interrupted_run_is_discarded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.crt");
        std::fs::write(staged_path(&path), "half").unwrap();
        replace(&path, "whole", PUBLIC).unwrap();
        assert_eq!(read(&path).unwrap(), "whole");
        assert!(!staged_path(&path).exists());
    }

    #[test]
    fn oversized_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("big");
        std::fs::write(&path, vec![b'x'; MAX_BYTES as usize + 1]).unwrap();
        assert!(matches!(read(&path), Err(Error::Content { .. })));
    }
}
