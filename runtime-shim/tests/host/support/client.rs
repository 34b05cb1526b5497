//! Plays the virtual node: applies sandboxes, follows the watch, runs execs.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use sandman_protocol::v1;
use sandman_protocol::v1::host_client::HostClient;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use v1::container_report::State;
use v1::exec_request::Message as In;
use v1::exec_response::Message as Out;
use v1::watch_response::Item;

pub(crate) const TERM: u64 = 1;
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Seen {
    reports: HashMap<String, v1::SandboxReport>,
    history: Vec<v1::SandboxReport>,
    events: Vec<v1::SandboxEvent>,
    synced: bool,
    inventory: Option<v1::Inventory>,
}

/// A connected virtual node.
pub(crate) struct Node {
    pub(crate) client: HostClient<Channel>,
    pub(crate) registry: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    changed: watch::Receiver<u64>,
}

/// What came of an exec.
#[derive(Debug, Default)]
pub(crate) struct ExecOutput {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) code: Option<i32>,
    pub(crate) failed: Option<v1::ExecFailed>,
}

/// An exec that runs.
pub(crate) struct RunningExec {
    pub(crate) input: mpsc::Sender<v1::ExecRequest>,
    pub(crate) output: tonic::Streaming<v1::ExecResponse>,
}

impl Node {
    pub(crate) async fn new(channel: Channel, registry: SocketAddr) -> Self {
        let mut client = HostClient::new(channel).max_decoding_message_size(64 << 20);
        let request = v1::WatchRequest { term: TERM };
        let mut stream = client.watch(request).await.unwrap().into_inner();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (sender, changed) = watch::channel(0);
        let record = seen.clone();
        tokio::spawn(async move {
            while let Ok(Some(response)) = stream.message().await {
                let mut seen = record.lock().unwrap();
                match response.item {
                    Some(Item::Report(report)) => {
                        seen.history.push(report.clone());
                        seen.reports.insert(report.uid.clone(), report);
                    }
                    Some(Item::Event(event)) => seen.events.push(event),
                    Some(Item::Synced(_)) => seen.synced = true,
                    Some(Item::Inventory(inventory)) => seen.inventory = Some(inventory),
                    None => {}
                }
                drop(seen);
                sender.send_modify(|count| *count += 1);
            }
        });
        let node = Self {
            client,
            registry,
            seen,
            changed,
        };
        node.wait("the watch to be in sync", |seen| seen.synced.then_some(()))
            .await;
        node
    }

    async fn wait<T>(&self, what: &str, look: impl Fn(&Seen) -> Option<T>) -> T {
        let mut changed = self.changed.clone();
        let waiting = async {
            loop {
                if let Some(found) = look(&self.seen.lock().unwrap()) {
                    return found;
                }
                assert!(changed.changed().await.is_ok(), "the watch ended");
            }
        };
        match timeout(DEADLINE, waiting).await {
            Ok(found) => found,
            Err(_) => {
                let seen = self.seen.lock().unwrap();
                panic!(
                    "no {what} in time; reports {:#?}; events {:#?}",
                    seen.reports, seen.events
                )
            }
        }
    }

    /// A pod with one container that runs a shell script.
    pub(crate) fn pod(&self, name: &str, script: &str) -> v1::SandboxSpec {
        v1::SandboxSpec {
            schema: 1,
            uid: uuid::Uuid::new_v4().to_string(),
            namespace: "default".into(),
            name: name.into(),
            generation: 1,
            restart_policy: v1::RestartPolicy::Never as i32,
            termination_grace_period: Some(prost_types::Duration {
                seconds: 30,
                nanos: 0,
            }),
            hostname: name.into(),
            network: v1::NetworkMode::Pod as i32,
            containers: vec![self.container("main", script)],
            ..Default::default()
        }
    }

    pub(crate) fn container(&self, name: &str, script: &str) -> v1::Container {
        v1::Container {
            name: name.into(),
            image: format!("{}/test/busybox:1", self.registry),
            pull_policy: v1::PullPolicy::IfNotPresent as i32,
            command: vec!["sh".into(), "-c".into(), script.into()],
            termination_message_path: "/dev/termination-log".into(),
            ..Default::default()
        }
    }

    pub(crate) async fn apply(&self, spec: &v1::SandboxSpec) {
        self.try_apply(TERM, spec).await.unwrap();
    }

    pub(crate) async fn try_apply(
        &self,
        term: u64,
        spec: &v1::SandboxSpec,
    ) -> Result<v1::ApplyResponse, tonic::Status> {
        let request = v1::ApplyRequest {
            term,
            spec: Some(spec.clone()),
        };
        self.client
            .clone()
            .apply(request)
            .await
            .map(tonic::Response::into_inner)
    }

    pub(crate) async fn remove(&self, uid: &str, seconds: i64) {
        let request = v1::RemoveRequest {
            term: TERM,
            uid: uid.into(),
            grace_period: Some(prost_types::Duration { seconds, nanos: 0 }),
            reason: "test".into(),
        };
        self.client.clone().remove(request).await.unwrap();
    }

    pub(crate) async fn remove_and_wait(&self, uid: &str) -> v1::SandboxReport {
        self.remove(uid, 2).await;
        self.wait_report(uid, "removal", |report| {
            report.lifecycle() == v1::Lifecycle::Removed
        })
        .await
    }

    pub(crate) async fn wait_report(
        &self,
        uid: &str,
        what: &str,
        accept: impl Fn(&v1::SandboxReport) -> bool,
    ) -> v1::SandboxReport {
        self.wait(what, |seen| {
            seen.reports.get(uid).filter(|r| accept(r)).cloned()
        })
        .await
    }

    pub(crate) async fn wait_running(&self, uid: &str) -> v1::SandboxReport {
        self.wait_report(uid, "running containers", |report| {
            !report.containers.is_empty()
                && report
                    .containers
                    .iter()
                    .all(|c| matches!(c.state, Some(State::Running(_))))
        })
        .await
    }

    pub(crate) async fn wait_finished(&self, uid: &str) -> v1::SandboxReport {
        self.wait_report(uid, "a finished sandbox", |report| {
            report.lifecycle() == v1::Lifecycle::Finished
        })
        .await
    }

    pub(crate) async fn wait_event(&self, uid: &str, reason: &str) -> v1::SandboxEvent {
        self.wait(&format!("event {reason}"), |seen| {
            seen.events
                .iter()
                .find(|e| e.uid == uid && e.reason == reason)
                .cloned()
        })
        .await
    }

    pub(crate) async fn wait_inventory(&self) -> v1::Inventory {
        self.wait("an inventory", |seen| seen.inventory.clone())
            .await
    }

    /// All reports of a sandbox so far, in order.
    pub(crate) fn history(&self, uid: &str) -> Vec<v1::SandboxReport> {
        let seen = self.seen.lock().unwrap();
        seen.history
            .iter()
            .filter(|report| report.uid == uid)
            .cloned()
            .collect()
    }

    pub(crate) async fn start_exec(&self, start: v1::ExecStart) -> RunningExec {
        let (input, requests) = mpsc::channel(4);
        input
            .send(v1::ExecRequest {
                message: Some(In::Start(start)),
            })
            .await
            .unwrap();
        let output = self
            .client
            .clone()
            .exec(ReceiverStream::new(requests))
            .await
            .unwrap()
            .into_inner();
        RunningExec { input, output }
    }

    pub(crate) async fn exec(&self, uid: &str, command: &[&str]) -> ExecOutput {
        self.exec_with(uid, command, None).await
    }

    pub(crate) async fn exec_with(
        &self,
        uid: &str,
        command: &[&str],
        stdin: Option<Bytes>,
    ) -> ExecOutput {
        let start = v1::ExecStart {
            uid: uid.into(),
            container: "main".into(),
            command: command.iter().map(ToString::to_string).collect(),
            stdin: stdin.is_some(),
            stdout: true,
            stderr: true,
            ..Default::default()
        };
        let mut exec = self.start_exec(start).await;
        let input = exec.input.clone();
        let feeding = tokio::spawn(async move {
            let Some(mut data) = stdin else { return };
            while !data.is_empty() {
                let chunk = data.split_to(data.len().min(32 * 1024));
                if input
                    .send(v1::ExecRequest {
                        message: Some(In::Stdin(chunk)),
                    })
                    .await
                    .is_err()
                {
                    return;
                }
            }
            let close = In::CloseStdin(v1::CloseStdin {});
            let _ = input
                .send(v1::ExecRequest {
                    message: Some(close),
                })
                .await;
        });
        let output = exec.collect().await;
        feeding.abort();
        output
    }

    pub(crate) async fn logs(&self, request: v1::LogsRequest) -> Result<String, tonic::Status> {
        let mut stream = self.client.clone().logs(request).await?.into_inner();
        let mut text = vec![];
        while let Some(chunk) = stream.message().await? {
            text.extend_from_slice(&chunk.data);
        }
        Ok(String::from_utf8(text).unwrap())
    }
}

impl RunningExec {
    /// Reads to the end.
    pub(crate) async fn collect(&mut self) -> ExecOutput {
        let mut out = ExecOutput::default();
        let reading = async {
            while let Some(response) = self.output.message().await.unwrap() {
                assert!(
                    out.code.is_none() && out.failed.is_none(),
                    "a message after the last"
                );
                match response.message {
                    Some(Out::Started(_)) | None => {}
                    Some(Out::Stdout(data)) => out.stdout.extend_from_slice(&data),
                    Some(Out::Stderr(data)) => out.stderr.extend_from_slice(&data),
                    Some(Out::Exited(exit)) => out.code = Some(exit.exit_code),
                    Some(Out::Failed(failure)) => out.failed = Some(failure),
                }
            }
        };
        timeout(DEADLINE, reading)
            .await
            .expect("the exec ends in time");
        out
    }
}

impl ExecOutput {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}
