//! The one error type of this crate. Every text names the file or field at fault and, where there is one, the way out.

use std::path::PathBuf;

/// Why a certificate could not be made, read, verified or renewed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb: `read`, `create`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file that would be created is there already.
    #[error(
        "{} exists and is not overwritten; choose another directory, remove it, or re-issue it with `sandman-certs renew`",
        path.display()
    )]
    Exists {
        /// The file in the way.
        path: PathBuf,
    },
    /// A name, address or number given by the caller is not acceptable.
    #[error("{field} {value:?}: {reason}")]
    Invalid {
        /// The field as the caller knows it: `--name`, `nodes`.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file does not hold what its place promises.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// An existing PKI directory is not the one that was asked for.
    #[error("{} is not the PKI asked for: {reason}; remove the directory to have it made again", dir.display())]
    Mismatch {
        /// The PKI's directory.
        dir: PathBuf,
        /// The first difference found.
        reason: String,
    },
    /// The certificate library refused; the request was not encodable.
    #[error("cannot make the certificate of {subject:?}: {source}")]
    Generate {
        /// Common name asked for.
        subject: String,
        /// The library's reason.
        source: rcgen::Error,
    },
    /// The operating system gave no random bytes.
    #[error("the system's random number generator failed")]
    Random,
}

impl Error {
    /// An [`Error::Content`] about `path`.
    pub(crate) fn content(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::Content {
            path: path.into(),
            reason: reason.into(),
        }
    }

    /// Adapts an I/O error; for `map_err`.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;
