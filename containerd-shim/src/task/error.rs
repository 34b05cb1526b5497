//! Why a request was refused, in the codes that containerd passes on to its clients.

use std::fmt;
use std::io;

use containerd_shim_protos::ttrpc;

/// A refused or failed request.
///
/// The words are those of containerd's own shim where it has some: users search for them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TaskError {
    /// There is no such task or process, or it has ended.
    #[error("{0}")]
    NotFound(String),
    /// The name is taken.
    #[error("{0}")]
    AlreadyExists(String),
    /// Not in this state.
    #[error("{0}")]
    FailedPrecondition(String),
    /// The request itself is wrong; names the field.
    #[error("{0}")]
    InvalidArgument(String),
    /// Nobody can do this here.
    #[error("{0}")]
    Unimplemented(String),
    /// It was tried and failed.
    #[error("{0}")]
    Failed(String),
}

/// What every operation of a task returns.
pub(crate) type Result<T, E = TaskError> = std::result::Result<T, E>;

impl TaskError {
    /// `what` failed because of `error`.
    pub(crate) fn failed(what: impl fmt::Display, error: impl fmt::Display) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }

    /// For `map_err`: an I/O error while doing `what`.
    pub(crate) fn io<D: fmt::Display>(what: D) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::failed(what, error)
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        let code = match &error {
            TaskError::NotFound(_) => ttrpc::Code::NOT_FOUND,
            TaskError::AlreadyExists(_) => ttrpc::Code::ALREADY_EXISTS,
            TaskError::FailedPrecondition(_) => ttrpc::Code::FAILED_PRECONDITION,
            TaskError::InvalidArgument(_) => ttrpc::Code::INVALID_ARGUMENT,
            TaskError::Unimplemented(_) => ttrpc::Code::UNIMPLEMENTED,
            TaskError::Failed(_) => ttrpc::Code::UNKNOWN,
        };
        ttrpc::Error::RpcStatus(ttrpc::get_status(code, error.to_string()))
    }
}
