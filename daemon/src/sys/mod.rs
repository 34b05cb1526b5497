//! The system calls that std does not offer, each behind a safe function.
//!
//! The only module of this crate with `unsafe`: everything above it works on
//! owned descriptors, `CStr`s and `io::Result`s.
#![allow(unsafe_code)]

pub(crate) mod at;
pub(crate) mod events;
pub(crate) mod process;
pub(crate) mod rights;
pub(crate) mod socket;
pub(crate) mod terminal;

use std::io;

/// Turns the `-1` convention of libc into a `Result`.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// The system's text for `error`, without the number that std appends.
pub(crate) fn error_text(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rfind(" (os error ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    #[test]
    fn error_text_has_no_number() {
        let error = io::Error::from_raw_os_error(libc::ENOENT);
        assert_eq!(super::error_text(&error), "No such file or directory");
        assert_eq!(super::error_text(&io::Error::other("plain")), "plain");
    }
}
