//! [`Runtime`] over containerd's container and task services, 1.6 to 2.x.

use std::path::Path;

use async_trait::async_trait;
use containerd_client::services::v1::container::Runtime as RuntimeName;
use containerd_client::services::v1::containers_client::ContainersClient;
use containerd_client::services::v1::tasks_client::TasksClient;
use containerd_client::services::v1::version_client::VersionClient;
use containerd_client::services::v1::{
    CloseIoRequest, Container, CreateContainerRequest, CreateTaskRequest, DeleteContainerRequest,
    DeleteProcessRequest, DeleteTaskRequest, ExecProcessRequest, GetContainerRequest, GetRequest,
    KillRequest, ListContainersRequest, ResizePtyRequest, StartRequest, UpdateTaskRequest,
    WaitRequest,
};
use containerd_client::types::v1::{Process as WireProcess, Status as WireStatus};
use oci_spec::runtime::{LinuxResources, Process, Spec};
use prost_types::Any;
use tokio::sync::broadcast;
use tonic::transport::Channel;

use super::request::{QUICK, SLOW, endless, request, time};
use super::{
    ContainerRecord, Exit, NewContainer, RootMount, Runtime, RuntimeError, RuntimeEvent, Stdio,
    TaskStatus, events, path_text,
};

const SPEC_URL: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
const PROCESS_URL: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";
const RESOURCES_URL: &str = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources";
/// A task list or a spec may be larger than gRPC's default of 4 MiB.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;

/// A connection to one containerd.
pub struct Containerd {
    channel: Channel,
    snapshotter: String,
    events: broadcast::Sender<RuntimeEvent>,
}

impl Containerd {
    /// Uses `channel` and starts following its events.
    #[must_use]
    pub fn new(channel: Channel, snapshotter: &str) -> Self {
        let events = events::follow(channel.clone());
        Self {
            channel,
            snapshotter: snapshotter.to_owned(),
            events,
        }
    }

    fn tasks(&self) -> TasksClient<Channel> {
        TasksClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    fn containers(&self) -> ContainersClient<Channel> {
        ContainersClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }
}

#[async_trait]
impl Runtime for Containerd {
    async fn version(&self) -> Result<String, RuntimeError> {
        let mut client = VersionClient::new(self.channel.clone());
        let version = client
            .version(request((), QUICK))
            .await?
            .into_inner()
            .version;
        Ok(format!("containerd://{}", version.trim_start_matches('v')))
    }

    async fn create(&self, container: &NewContainer) -> Result<(), RuntimeError> {
        let record = Container {
            id: container.id.clone(),
            labels: container.labels.clone(),
            image: container.image.clone(),
            runtime: Some(RuntimeName {
                name: container.runtime.clone(),
                options: None,
            }),
            spec: Some(any_json(SPEC_URL, &container.spec)?),
            snapshotter: match container.snapshot {
                Some(_) => self.snapshotter.clone(),
                None => String::new(),
            },
            snapshot_key: container.snapshot.clone().unwrap_or_default(),
            ..Default::default()
        };
        let call = CreateContainerRequest {
            container: Some(record),
        };
        match self
            .containers()
            .create(request(call, QUICK))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(_) | Err(RuntimeError::AlreadyExists(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn create_task(
        &self,
        id: &str,
        rootfs: Vec<RootMount>,
        stdio: &Stdio,
    ) -> Result<(), RuntimeError> {
        let call = CreateTaskRequest {
            container_id: id.to_owned(),
            rootfs,
            stdin: path_text(stdio.stdin.as_deref()),
            stdout: path_text(stdio.stdout.as_deref()),
            stderr: path_text(stdio.stderr.as_deref()),
            terminal: stdio.terminal,
            ..Default::default()
        };
        self.tasks().create(request(call, SLOW)).await?;
        Ok(())
    }

    async fn start(&self, id: &str) -> Result<(), RuntimeError> {
        let call = StartRequest {
            container_id: id.to_owned(),
            exec_id: String::new(),
        };
        self.tasks().start(request(call, SLOW)).await?;
        Ok(())
    }

    async fn state(&self, id: &str) -> Result<Option<TaskStatus>, RuntimeError> {
        let call = GetRequest {
            container_id: id.to_owned(),
            exec_id: String::new(),
        };
        match self
            .tasks()
            .get(request(call, QUICK))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(answer) => Ok(Some(
                answer
                    .into_inner()
                    .process
                    .map_or(TaskStatus::Unknown, |p| status(&p)),
            )),
            Err(RuntimeError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn update(&self, id: &str, resources: &LinuxResources) -> Result<(), RuntimeError> {
        let call = UpdateTaskRequest {
            container_id: id.to_owned(),
            resources: Some(any_json(RESOURCES_URL, resources)?),
            ..Default::default()
        };
        self.tasks().update(request(call, SLOW)).await?;
        Ok(())
    }

    async fn pid(&self, id: &str) -> Result<Option<u32>, RuntimeError> {
        let call = GetRequest {
            container_id: id.to_owned(),
            exec_id: String::new(),
        };
        match self
            .tasks()
            .get(request(call, QUICK))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(answer) => Ok(answer
                .into_inner()
                .process
                .filter(|process| !matches!(status(process), TaskStatus::Stopped(_)))
                .map(|process| process.pid)
                .filter(|pid| *pid > 0)),
            Err(RuntimeError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self) -> Result<Vec<ContainerRecord>, RuntimeError> {
        // Streamed: thousands of containers, each with its spec, do not fit one message.
        let call = ListContainersRequest { filters: vec![] };
        let mut stream = self
            .containers()
            .list_stream(request(call, SLOW))
            .await?
            .into_inner();
        let mut records = vec![];
        while let Some(message) = stream.message().await? {
            if let Some(container) = message.container {
                records.push(ContainerRecord {
                    id: container.id,
                    labels: container.labels,
                    created_at: container.created_at.and_then(|t| t.try_into().ok()),
                });
            }
        }
        Ok(records)
    }

    async fn spec(&self, id: &str) -> Result<Spec, RuntimeError> {
        let call = GetContainerRequest { id: id.to_owned() };
        let answer = self
            .containers()
            .get(request(call, QUICK))
            .await?
            .into_inner();
        let spec = answer
            .container
            .and_then(|container| container.spec)
            .ok_or_else(|| RuntimeError::Failed(format!("container {id} has no spec")))?;
        serde_json::from_slice(&spec.value)
            .map_err(|error| RuntimeError::Failed(format!("spec of container {id}: {error}")))
    }

    async fn kill(&self, id: &str, exec: Option<&str>, signal: u32) -> Result<(), RuntimeError> {
        let call = KillRequest {
            container_id: id.to_owned(),
            exec_id: exec.unwrap_or_default().to_owned(),
            signal,
            all: false,
        };
        match self
            .tasks()
            .kill(request(call, QUICK))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(_) | Err(RuntimeError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn delete_task(&self, id: &str) -> Result<Option<Exit>, RuntimeError> {
        let call = DeleteTaskRequest {
            container_id: id.to_owned(),
        };
        match self
            .tasks()
            .delete(request(call, SLOW))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(answer) => {
                let answer = answer.into_inner();
                Ok(Some(Exit {
                    code: code(answer.exit_status),
                    at: time(answer.exited_at),
                }))
            }
            Err(RuntimeError::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn delete(&self, id: &str) -> Result<(), RuntimeError> {
        let call = DeleteContainerRequest { id: id.to_owned() };
        match self
            .containers()
            .delete(request(call, QUICK))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(_) | Err(RuntimeError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn exec(
        &self,
        id: &str,
        exec: &str,
        process: &Process,
        stdio: &Stdio,
    ) -> Result<(), RuntimeError> {
        let call = ExecProcessRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
            stdin: path_text(stdio.stdin.as_deref()),
            stdout: output_text(stdio.stdout.as_deref(), stdio),
            stderr: output_text(stdio.stderr.as_deref(), stdio),
            terminal: stdio.terminal,
            spec: Some(any_json(PROCESS_URL, process)?),
        };
        self.tasks().exec(request(call, SLOW)).await?;
        Ok(())
    }

    async fn start_exec(&self, id: &str, exec: &str) -> Result<u32, RuntimeError> {
        let call = StartRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
        };
        match self.tasks().start(request(call, SLOW)).await {
            Ok(answer) => Ok(answer.into_inner().pid),
            Err(status) => {
                // The shim keeps a failed exec's record, and its FIFOs open, until told.
                let _ = self.delete_exec(id, exec).await;
                Err(status.into())
            }
        }
    }

    async fn wait_exec(&self, id: &str, exec: &str) -> Result<Exit, RuntimeError> {
        let call = WaitRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
        };
        let answer = self.tasks().wait(endless(call)).await?.into_inner();
        Ok(Exit {
            code: code(answer.exit_status),
            at: time(answer.exited_at),
        })
    }

    async fn delete_exec(&self, id: &str, exec: &str) -> Result<(), RuntimeError> {
        let call = DeleteProcessRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
        };
        match self
            .tasks()
            .delete_process(request(call, QUICK))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(_) | Err(RuntimeError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn resize(
        &self,
        id: &str,
        exec: &str,
        width: u32,
        height: u32,
    ) -> Result<(), RuntimeError> {
        let call = ResizePtyRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
            width,
            height,
        };
        self.tasks().resize_pty(request(call, QUICK)).await?;
        Ok(())
    }

    async fn close_stdin(&self, id: &str, exec: &str) -> Result<(), RuntimeError> {
        let call = CloseIoRequest {
            container_id: id.to_owned(),
            exec_id: exec.to_owned(),
            stdin: true,
        };
        match self
            .tasks()
            .close_io(request(call, QUICK))
            .await
            .map_err(RuntimeError::from)
        {
            Ok(_) | Err(RuntimeError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn events(&self) -> broadcast::Receiver<RuntimeEvent> {
        self.events.subscribe()
    }
}

fn any_json<T: serde::Serialize>(type_url: &str, value: &T) -> Result<Any, RuntimeError> {
    let value = serde_json::to_vec(value)
        .map_err(|error| RuntimeError::Failed(format!("encoding {type_url}: {error}")))?;
    Ok(Any {
        type_url: type_url.to_owned(),
        value,
    })
}

fn code(status: u32) -> i32 {
    i32::try_from(status).unwrap_or(i32::MAX)
}

fn status(process: &WireProcess) -> TaskStatus {
    match process.status() {
        WireStatus::Created => TaskStatus::Created,
        WireStatus::Running | WireStatus::Paused | WireStatus::Pausing => TaskStatus::Running,
        WireStatus::Stopped => TaskStatus::Stopped(Exit {
            code: code(process.exit_status),
            at: time(process.exited_at),
        }),
        WireStatus::Unknown => TaskStatus::Unknown,
    }
}

/// An output of an exec, which may be one that nobody reads: containerd's runc shim opens both as
/// soon as the process has any stream, and fails on an empty name (its `copyPipes`).
fn output_text(path: Option<&Path>, stdio: &Stdio) -> String {
    let any = stdio.stdin.is_some() || stdio.stdout.is_some() || stdio.stderr.is_some();
    match path {
        None if any && !stdio.terminal => "/dev/null".to_owned(),
        _ => path_text(path),
    }
}
