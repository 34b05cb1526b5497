//! The files of one attempt's log. The current one keeps its name; a rotated
//! one gets the next sequence number, so no file is ever renamed twice and a
//! reader always knows which comes next.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// Where the files are.
#[derive(Clone, Debug)]
pub(super) struct Files {
    folder: PathBuf,
    attempt: u32,
}

/// Identity of an open file, whatever it is called by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }
}

impl Files {
    pub(super) fn new(folder: PathBuf, attempt: u32) -> Self {
        Self { folder, attempt }
    }

    pub(super) fn create_folder(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)
    }

    pub(super) fn current(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.attempt))
    }

    fn rotated(&self, sequence: u64) -> PathBuf {
        self.folder.join(format!("{}.log.{sequence}", self.attempt))
    }

    /// Sequence numbers of the rotated files, oldest first.
    fn sequences(&self) -> io::Result<Vec<u64>> {
        let mut sequences = Vec::new();
        for entry in self.entries()? {
            if let (attempt, Some(sequence)) = entry
                && attempt == self.attempt
            {
                sequences.push(sequence);
            }
        }
        sequences.sort_unstable();
        Ok(sequences)
    }

    /// Attempt and sequence number of every log file of the container.
    fn entries(&self) -> io::Result<Vec<(u32, Option<u64>)>> {
        let folder = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut entries = Vec::new();
        for entry in folder {
            let name = entry?.file_name();
            let Some((attempt, rest)) = name.to_str().and_then(|name| name.split_once(".log"))
            else {
                continue;
            };
            let Ok(attempt) = attempt.parse() else {
                continue;
            };
            match rest.strip_prefix('.').map(str::parse) {
                None if rest.is_empty() => entries.push((attempt, None)),
                Some(Ok(sequence)) => entries.push((attempt, Some(sequence))),
                _ => {}
            }
        }
        Ok(entries)
    }

    /// Puts the current file aside and drops the oldest beyond `keep` rotated ones.
    pub(super) fn rotate(&self, keep: usize) -> io::Result<()> {
        let sequences = self.sequences()?;
        let next = sequences.last().map_or(1, |last| last + 1);
        match fs::rename(self.current(), self.rotated(next)) {
            // Somebody tidied up: a new current file is all it takes.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        let excess = (sequences.len() + 1).saturating_sub(keep);
        for sequence in sequences.iter().take(excess) {
            remove_file(self.rotated(*sequence))?;
        }
        Ok(())
    }

    /// Opens every file there is, oldest first.
    pub(super) fn open_all(&self) -> io::Result<Vec<File>> {
        loop {
            let before = self.sequences()?;
            let mut open = Vec::with_capacity(before.len() + 1);
            for sequence in &before {
                open.extend(open_if_there(self.rotated(*sequence))?);
            }
            open.extend(open_if_there(self.current())?);
            // A rotation in between may have moved a file past this loop.
            if self.sequences()? == before {
                return Ok(open);
            }
        }
    }

    /// Opens the file that follows `file`. `None` while `file` is the current
    /// one. If `file` was dropped by rotation, the oldest one follows.
    pub(super) fn open_after(&self, file: FileId) -> io::Result<Option<File>> {
        let open = self.open_all()?;
        let mut position = None;
        for (index, candidate) in open.iter().enumerate() {
            if FileId::of(candidate)? == file {
                position = Some(index + 1);
            }
        }
        Ok(open.into_iter().nth(position.unwrap_or(0)))
    }

    pub(super) fn remove_attempts_before(&self, oldest: u32) -> io::Result<()> {
        for (attempt, sequence) in self.entries()? {
            if attempt < oldest {
                let files = Self {
                    folder: self.folder.clone(),
                    attempt,
                };
                remove_file(
                    sequence.map_or_else(|| files.current(), |number| files.rotated(number)),
                )?;
            }
        }
        Ok(())
    }
}

fn open_if_there(path: PathBuf) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn remove_file(path: PathBuf) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Pod UIDs and container names become file names.
pub(super) fn check_name(name: &str) -> io::Result<()> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if !name.is_empty() && name.len() <= 253 && !name.starts_with('.') && name.bytes().all(fits) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{name:?} is no name of a log"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(file: File) -> String {
        io::read_to_string(file).unwrap()
    }

    #[test]
    fn rotation_keeps_order_and_count() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path().join("c"), 2);
        files.create_folder().unwrap();
        for content in ["a", "b", "c", "d"] {
            fs::write(files.current(), content).unwrap();
            files.rotate(2).unwrap();
        }
        fs::write(files.current(), "e").unwrap();
        // Of another attempt.
        fs::write(folder.path().join("c/1.log"), "old").unwrap();
        fs::write(folder.path().join("c/1.log.1"), "older").unwrap();
        let all: Vec<_> = files.open_all().unwrap().into_iter().map(text).collect();
        assert_eq!(all, ["c", "d", "e"]);

        files.remove_attempts_before(2).unwrap();
        assert_eq!(files.entries().unwrap().len(), 3);
    }

    #[test]
    fn finds_what_follows_a_file_by_identity() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path().to_owned(), 0);
        fs::write(files.current(), "a").unwrap();
        let first = File::open(files.current()).unwrap();
        let id = FileId::of(&first).unwrap();
        assert!(files.open_after(id).unwrap().is_none());
        files.rotate(1).unwrap();
        assert!(files.open_after(id).unwrap().is_none());
        fs::write(files.current(), "b").unwrap();
        assert_eq!(text(files.open_after(id).unwrap().unwrap()), "b");
        files.rotate(1).unwrap();
        fs::write(files.current(), "c").unwrap();
        // "a" is gone by now: the oldest that is left follows.
        assert_eq!(text(files.open_after(id).unwrap().unwrap()), "b");
    }

    #[test]
    fn names_stay_inside_their_folder() {
        for name in ["", ".", "..", "a/b", ".hidden", "a\0"] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        check_name("0a1b-2c.d_e").unwrap();
    }
}
