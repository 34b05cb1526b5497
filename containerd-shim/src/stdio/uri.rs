//! Where containerd's client wants a stream: nowhere, a FIFO, a file or a logging program.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::task::error::{Result, TaskError};

/// A stream's other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// Nobody: `/dev/null`.
    None,
    /// A FIFO that the client made, or a file that is there already.
    Path(PathBuf),
    /// A file to append to, made if need be.
    File(PathBuf),
    /// A program that reads both outputs, as `binary:///path?key=value`.
    Binary(Logger),
}

/// A logging program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Logger {
    /// Its file.
    pub(crate) program: PathBuf,
    /// `key value` for each part of the query, in order.
    pub(crate) args: Vec<OsString>,
}

impl Target {
    /// Reads the value of `field`, "stdout" for example.
    ///
    /// # Errors
    /// Names the field if the scheme is unknown or the path relative.
    pub(crate) fn parse(field: &str, value: &str) -> Result<Self> {
        if value.is_empty() {
            return Ok(Self::None);
        }
        let wrong = |why: &str| TaskError::InvalidArgument(format!("{field} {value:?}: {why}"));
        let absolute = |path: &str| match decode(path) {
            Some(path) if path.starts_with('/') && !path.contains('\0') => Ok(PathBuf::from(path)),
            _ => Err(wrong("the path must be absolute")),
        };
        match value.split_once("://") {
            None if value.starts_with('/') => Ok(Self::Path(value.into())),
            None => Err(wrong("the path must be absolute")),
            Some(("fifo", path)) => Ok(Self::Path(absolute(path)?)),
            Some(("file", path)) if field != "stdin" => Ok(Self::File(absolute(path)?)),
            Some(("binary", rest)) if field != "stdin" => {
                let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
                let mut args = Vec::new();
                for pair in query.split('&').filter(|pair| !pair.is_empty()) {
                    let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                    for word in [key, value] {
                        let word = decode(word).ok_or_else(|| wrong("a wrong % escape"))?;
                        if !word.is_empty() {
                            args.push(word.into());
                        }
                    }
                }
                Ok(Self::Binary(Logger {
                    program: absolute(path)?,
                    args,
                }))
            }
            Some(_) => Err(wrong(
                "unknown scheme; use a FIFO's path, file:// or binary:// (outputs only)",
            )),
        }
    }
}

/// Undoes `%XX`; `None` if it is wrong or not UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first == b'%' {
            let [high, low, tail @ ..] = rest else {
                return None;
            };
            let digit = |byte: &u8| char::from(*byte).to_digit(16);
            bytes.push(u8::try_from(digit(high)? * 16 + digit(low)?).ok()?);
            rest = tail;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::{Logger, Target};

    #[test]
    fn schemes() {
        let cases = [
            ("", Target::None),
            ("/run/f", Target::Path("/run/f".into())),
            ("fifo:///run/f", Target::Path("/run/f".into())),
            ("file:///log/a%20b", Target::File("/log/a b".into())),
            (
                "binary:///bin/log?id=a%26b&flag",
                Target::Binary(Logger {
                    program: "/bin/log".into(),
                    args: vec!["id".into(), "a&b".into(), "flag".into()],
                }),
            ),
        ];
        for (value, expected) in cases {
            assert_eq!(Target::parse("stdout", value).unwrap(), expected, "{value}");
        }
    }

    #[test]
    fn refusals_name_the_field() {
        for value in [
            "relative",
            "npipe:////x",
            "file://x",
            "fifo:///%zz",
            "file:///%",
        ] {
            let error = Target::parse("stderr", value).unwrap_err().to_string();
            assert!(error.starts_with("stderr "), "{error}");
        }
        for value in ["file:///x", "binary:///x"] {
            assert!(Target::parse("stdin", value).is_err());
        }
    }
}
