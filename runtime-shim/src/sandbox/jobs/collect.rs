//! The end of a container: why it ended, its last words, and the release of its task.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use sandman_protocol::v1;
use serde::Deserialize;
use tracing::warn;

use super::{Host, remove_fifos};
use crate::logs::{ContainerLog, LogId};
use crate::sandbox::facts::{START_ERROR_EXIT_CODE, Termination};
use crate::sandbox::oom;

/// Longest termination message (`MaxContainerTerminationMessageLength` of the kubelet).
const MAX_MESSAGE: usize = 4096;
const RETRY: Duration = Duration::from_secs(2);
/// Exit code of a process that was killed.
const SIGKILLED: i32 = 128 + libc::SIGKILL;

/// An attempt that has ended.
#[derive(Clone, Debug)]
pub struct Last {
    /// Pod UID, container and attempt.
    pub log: LogId,
    /// containerd id.
    pub container_id: String,
    /// cgroup of its sandbox.
    pub cgroup: PathBuf,
    /// When its process started.
    pub since: Timestamp,
    /// Exit code.
    pub code: i32,
    /// When it ended.
    pub at: Timestamp,
    /// Nobody saw the end.
    pub lost: bool,
    /// What to do without a termination message.
    pub policy: v1::TerminationMessagePolicy,
}

/// Collects an end. Does not give up: the exit is on record, only the words are missing.
pub async fn collect(host: &Host, last: &Last, log: Option<ContainerLog>) -> Termination {
    let cgroup = last.cgroup.join(&last.container_id);
    // Asked first: the runtime removes the cgroup with the task.
    let out_of_memory =
        oom::killed(&cgroup).unwrap_or_else(|| last.code == SIGKILLED && host.shared_kills.take());
    while let Err(error) = host.runtime.delete_task(&last.container_id).await {
        if !error.is_unavailable() {
            // A task that cannot be deleted now is deleted with its container.
            warn!(container_id = last.container_id, %error, "cannot delete the task");
            break;
        }
        host.metrics.runtime_error();
        tokio::time::sleep(RETRY).await;
    }
    if let Some(log) = log {
        log.finish().await;
    }
    remove_fifos(&host.fifo_dir.join(&last.container_id));

    let written = host
        .volumes
        .read_termination_file(
            &last.log.uid,
            &last.log.container,
            last.log.attempt,
            MAX_MESSAGE,
        )
        .await
        .unwrap_or_default();
    let written = String::from_utf8_lossy(&written).into_owned();
    let mut end = judge(last, out_of_memory, &written);
    let fall_back = last.policy == v1::TerminationMessagePolicy::FallbackToLogsOnError;
    if end.message.is_empty() && end.exit_code != 0 && fall_back {
        end.message = host.logs.tail_for_message(&last.log).await;
    }
    end
}

/// The verdict on an end, with the container's own words.
fn judge(last: &Last, out_of_memory: bool, written: &str) -> Termination {
    let mut end = Termination {
        exit_code: last.code,
        reason: String::new(),
        message: written.to_owned(),
        started_at: Some(last.since),
        finished_at: last.at,
        container_id: last.container_id.clone(),
    };
    if last.lost {
        end.reason = "ContainerStatusUnknown".to_owned();
        end.message = "The container could not be located when the pod was terminated".to_owned();
    } else if let Some(message) = start_error(last.code, written) {
        end.exit_code = START_ERROR_EXIT_CODE;
        end.reason = "StartError".to_owned();
        end.message = format!(
            "failed to start container {:?}: {message}",
            last.container_id
        );
    } else if out_of_memory && last.code != 0 {
        end.reason = "OOMKilled".to_owned();
    } else {
        end.reason = if last.code == 0 { "Completed" } else { "Error" }.to_owned();
    }
    end
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    start_error: StartError,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StartError {
    exit_code: i32,
    message: String,
}

/// The agent's word that the command never ran. It must agree with the exit code, so that a
/// container cannot pass a real exit off as this by chance.
fn start_error(code: i32, written: &str) -> Option<String> {
    let report: Report = serde_json::from_str(written.trim_end()).ok()?;
    (report.start_error.exit_code == code).then_some(report.start_error.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(code: i32, lost: bool) -> Last {
        Last {
            log: LogId {
                uid: "u".into(),
                container: "c".into(),
                attempt: 0,
            },
            container_id: "u-c-0".into(),
            cgroup: PathBuf::new(),
            since: Timestamp::UNIX_EPOCH,
            code,
            at: Timestamp::UNIX_EPOCH,
            lost,
            policy: v1::TerminationMessagePolicy::File,
        }
    }

    #[test]
    fn reasons_are_the_kubelets() {
        for (code, lost, oom, reason) in [
            (0, false, false, "Completed"),
            (3, false, false, "Error"),
            (137, false, true, "OOMKilled"),
            (0, false, true, "Completed"),
            (137, true, false, "ContainerStatusUnknown"),
        ] {
            assert_eq!(judge(&last(code, lost), oom, "").reason, reason);
        }
        assert_eq!(judge(&last(3, false), false, "words").message, "words");
    }

    #[test]
    fn the_agents_word_counts_when_the_exit_agrees() {
        let written = "{\"startError\":{\"exitCode\":127,\"message\":\"exec: no\"}}\n";
        let end = judge(&last(127, false), false, written);
        assert_eq!((end.exit_code, end.reason.as_str()), (128, "StartError"));
        assert!(end.message.ends_with("exec: no"), "{}", end.message);
        assert_eq!(judge(&last(1, false), false, written).reason, "Error");
        assert_eq!(judge(&last(127, false), false, "{}").reason, "Error");
    }
}
