//! Anonymous files that cannot be changed any more.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;

use super::{check, check_fd};

const SEALS: i32 = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;

fn create(name: &CStr, flags: u32) -> io::Result<File> {
    // SAFETY: `name` is a C string for the length of the call.
    check_fd(unsafe { libc::syscall(libc::SYS_memfd_create, name.as_ptr(), flags) }).map(File::from)
}

fn seal(file: &File) -> io::Result<()> {
    // SAFETY: takes a descriptor of ours and a number.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) }.into()).map(drop)
}

/// A sealed file that holds `bytes`, positioned at its start.
///
/// # Errors
/// Out of descriptors or memory.
pub fn with_bytes(name: &CStr, bytes: &[u8]) -> io::Result<File> {
    let mut file = create(name, libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?;
    file.write_all(bytes)?;
    seal(&file)?;
    file.rewind()?;
    Ok(file)
}

/// A sealed, executable copy of `program`.
///
/// # Errors
/// It cannot be read, or memory is short.
pub fn with_program(name: &CStr, program: &mut File) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Before Linux 6.3 there is no such flag, and every memfd may be executed.
    let mut file = create(name, flags | libc::MFD_EXEC).or_else(|_| create(name, flags))?;
    io::copy(program, &mut file)?;
    seal(&file)?;
    Ok(file)
}

/// Whether nothing can change `file` any more.
#[must_use]
pub fn is_sealed(file: &File) -> bool {
    // SAFETY: takes a descriptor of ours.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals != -1 && seals & libc::F_SEAL_WRITE != 0
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn sealed_files_keep_their_bytes() {
        let mut file = with_bytes(c"test", b"plan").unwrap();
        assert!(is_sealed(&file));
        assert_eq!(
            file.write(b"x").unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "plan");
    }
}
