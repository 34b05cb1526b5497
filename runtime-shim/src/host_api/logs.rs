//! The `Logs` stream: finds the attempt that is meant and passes its bytes on.

use futures::StreamExt;
use futures::stream::BoxStream;
use sandman_protocol::v1;
use tokio::sync::watch;
use tonic::Status;

use crate::logs::{LogId, LogStore};
use crate::sandbox::view::{ContainerView, View};

/// A stream of a log's bytes.
pub(super) type LogStream = BoxStream<'static, Result<v1::LogsResponse, Status>>;

/// Opens a log.
///
/// # Errors
/// `NOT_FOUND` for an unknown container or attempt, `FAILED_PRECONDITION` for a container that
/// has not started; the texts are the kubelet's (kubelet_pods.go `validateContainerLogStatus`).
pub(super) fn open(
    store: &LogStore,
    view: &View,
    request: &v1::LogsRequest,
) -> Result<LogStream, Status> {
    let container = view.containers.get(&request.container).ok_or_else(|| {
        Status::not_found(format!(
            "container {:?} not found in pod {:?}",
            request.container, view.name
        ))
    })?;
    let (attempt, running) = attempt(view, container, request)?;
    let id = LogId {
        uid: request.uid.clone(),
        container: request.container.clone(),
        attempt,
    };
    let bytes = store.read(&id, request, running);
    let responses = bytes.map(|chunk| match chunk {
        Ok(data) => Ok(v1::LogsResponse { data }),
        Err(error) => Err(Status::internal(format!("reading the log: {error}"))),
    });
    Ok(responses.boxed())
}

fn attempt(
    view: &View,
    container: &ContainerView,
    request: &v1::LogsRequest,
) -> Result<(u32, watch::Receiver<bool>), Status> {
    let place = || format!("container {:?} in pod {:?}", request.container, view.name);
    let current = container.attempt.as_ref();
    if request.previous {
        // Between two attempts, the one that ended last is the previous one, as in the kubelet.
        let number = match current {
            Some(attempt) if !attempt.is_live() && container.waiting.is_some() => attempt.number,
            Some(attempt) if attempt.number > 0 => attempt.number - 1,
            _ => {
                return Err(Status::failed_precondition(format!(
                    "previous terminated {} not found",
                    place()
                )));
            }
        };
        return Ok((number, watch::channel(false).1));
    }
    match (current, &container.waiting) {
        (Some(attempt), _) => Ok((attempt.number, container.running.clone())),
        (None, Some(reason)) => Err(Status::failed_precondition(match reason.as_str() {
            "ErrImagePull" => format!("{} is waiting to start: image can't be pulled", place()),
            "ImagePullBackOff" => {
                format!(
                    "{} is waiting to start: trying and failing to pull image",
                    place()
                )
            }
            reason => format!("{} is waiting to start: {reason}", place()),
        })),
        (None, None) => Err(Status::failed_precondition(format!(
            "{} is not available",
            place()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::facts::{Attempt, Phase, Termination};
    use jiff::Timestamp;

    fn view() -> View {
        View {
            namespace: "ns".into(),
            name: "p".into(),
            cgroup: std::path::PathBuf::new(),
            lifecycle: v1::Lifecycle::Active,
            containers: Default::default(),
        }
    }

    fn container(number: Option<u32>, ended: bool, waiting: Option<&str>) -> ContainerView {
        let phase = if ended {
            Phase::Ended(Termination {
                exit_code: 1,
                reason: String::new(),
                message: String::new(),
                started_at: None,
                finished_at: Timestamp::UNIX_EPOCH,
                container_id: String::new(),
            })
        } else {
            Phase::Running {
                since: Timestamp::UNIX_EPOCH,
            }
        };
        let attempt = number.map(|number| Attempt {
            number,
            id: String::new(),
            image: String::new(),
            image_id: String::new(),
            spec_hash: String::new(),
            stop_signal: 15,
            replaced: false,
            health: crate::sandbox::facts::Health::default(),
            doom: None,
            size: None,
            user: None,
            phase,
        });
        ContainerView {
            attempt,
            waiting: waiting.map(str::to_owned),
            running: watch::channel(true).1,
            process: Default::default(),
            listeners: None,
            streams: Default::default(),
        }
    }

    #[test]
    fn the_attempt_that_is_meant() {
        let ask = |container: &ContainerView, previous| {
            let request = v1::LogsRequest {
                container: "c".into(),
                previous,
                ..Default::default()
            };
            attempt(&view(), container, &request)
                .map(|(number, _)| number)
                .map_err(|status| status.message().to_owned())
        };
        let first = container(Some(0), false, None);
        assert_eq!(ask(&first, false), Ok(0));
        assert!(
            ask(&first, true)
                .unwrap_err()
                .starts_with("previous terminated container")
        );
        assert_eq!(ask(&container(Some(2), false, None), true), Ok(1));
        let crashed = container(Some(2), true, Some("CrashLoopBackOff"));
        assert_eq!((ask(&crashed, false), ask(&crashed, true)), (Ok(2), Ok(2)));
        assert_eq!(
            ask(&container(None, false, Some("ErrImagePull")), false).unwrap_err(),
            r#"container "c" in pod "p" is waiting to start: image can't be pulled"#
        );
    }
}
