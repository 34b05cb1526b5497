//! Connection to containerd, and what every request carries: namespace, lease and deadline.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::RuntimeError;

/// containerd namespace of everything Sandman makes.
pub const NAMESPACE: &str = "sandman";

/// Deadline of calls that only touch containerd's own records.
pub(super) const QUICK: Duration = Duration::from_secs(20);
/// Deadline of calls that make containerd run a shim or a runtime.
pub(super) const SLOW: Duration = Duration::from_secs(120);

/// A channel to containerd's socket that connects when first used and again when lost.
///
/// # Errors
/// None in practice: the address is a constant.
pub fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let socket: PathBuf = socket.to_owned();
    let connector = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The URI only fills the :authority header; the connector ignores it.
    let endpoint = Endpoint::try_from("http://containerd.invalid")?
        .connect_timeout(Duration::from_secs(5))
        .initial_connection_window_size(8 * 1024 * 1024)
        .initial_stream_window_size(4 * 1024 * 1024);
    Ok(endpoint.connect_with_connector_lazy(connector))
}

/// A request in our namespace that gives up after `deadline`, here and in containerd.
pub(super) fn request<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = endless(message);
    request.set_timeout(deadline);
    request
}

/// A request in our namespace without a deadline, for streams and waits.
pub(super) fn endless<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert(
        "containerd-namespace",
        MetadataValue::from_static(NAMESPACE),
    );
    request
}

impl From<Status> for RuntimeError {
    fn from(status: Status) -> Self {
        let text = status.message().to_owned();
        match status.code() {
            Code::NotFound => Self::NotFound(text),
            Code::AlreadyExists => Self::AlreadyExists(text),
            Code::FailedPrecondition => Self::Precondition(text),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
                Self::Unavailable(format!("{:?}: {text}", status.code()))
            }
            // A process that is gone is reported as a failure of kill(2) by some shims.
            Code::Unknown if text.contains("process already finished") => Self::NotFound(text),
            // containerd 1.6 gives no code when the bundle of a task is there already.
            Code::Unknown if text.contains("mkdir") && text.ends_with("file exists") => {
                Self::AlreadyExists(text)
            }
            _ => Self::Failed(text),
        }
    }
}

/// A time from the wire; nonsense becomes now, because it ends up in statuses.
pub(super) fn time(stamp: Option<prost_types::Timestamp>) -> SystemTime {
    stamp
        .and_then(|stamp| stamp.try_into().ok())
        .unwrap_or_else(SystemTime::now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_decide_what_a_caller_does() {
        let error = |code, text: &str| RuntimeError::from(Status::new(code, text));
        assert!(error(Code::Unavailable, "").is_unavailable());
        assert!(error(Code::DeadlineExceeded, "").is_unavailable());
        assert!(matches!(
            error(Code::NotFound, "x"),
            RuntimeError::NotFound(_)
        ));
        assert!(matches!(
            error(Code::Unknown, "os: process already finished: unknown"),
            RuntimeError::NotFound(_)
        ));
        assert!(matches!(
            error(
                Code::Unknown,
                "failed to start shim: mkdir /run/x: file exists"
            ),
            RuntimeError::AlreadyExists(_)
        ));
        assert_eq!(
            error(Code::Unknown, "OCI runtime create failed").to_string(),
            "OCI runtime create failed"
        );
    }
}
