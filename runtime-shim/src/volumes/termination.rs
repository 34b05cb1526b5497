//! The file in which a container may leave its last words. The container can
//! make it as large as it likes; only its end is read.

use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Makes the file, empty and open to every user of the container.
pub(super) fn create(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
}

/// The last `limit` bytes; none if there is no file.
pub(super) fn read_end(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    let open = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path);
    let mut file = match open {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let start = file.metadata()?.len().saturating_sub(limit as u64);
    file.seek(SeekFrom::Start(start))?;
    let mut end = Vec::new();
    file.take(limit as u64).read_to_end(&mut end)?;
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("main/0");
        assert_eq!(read_end(&path, 8).unwrap(), b"");
        create(&path).unwrap();
        create(&path).unwrap();
        assert_eq!(read_end(&path, 8).unwrap(), b"");
        fs::write(&path, "0123456789").unwrap();
        assert_eq!(read_end(&path, 4).unwrap(), b"6789");
        assert_eq!(read_end(&path, 4096).unwrap(), b"0123456789");
        // A sparse giant costs nothing.
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert_eq!(read_end(&path, 4).unwrap(), [0; 4]);
    }
}
