//! The task API over ttrpc. Translation only.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest,
    ShutdownRequest, StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest,
    StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::protobuf::{EnumOrUnknown, MessageField};
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::shim_async::{Task as TaskApi, create_task};
use containerd_shim_protos::ttrpc;
use containerd_shim_protos::ttrpc::r#async::{Service, TtrpcContext};

use super::convert::{any, status, timestamp};
use super::error::TaskError;
use super::make::CreateTask;
use super::one::Task;
use super::{Tasks, check_id, options};
use crate::stdio::Names;

/// Name of the API from containerd 2.0 on, and before. The messages are the same.
const V3: &str = "containerd.task.v3.Task";
const V2: &str = "containerd.task.v2.Task";

/// The services to register at a server.
#[must_use]
pub(crate) fn services(tasks: &Arc<Tasks>) -> HashMap<String, Service> {
    let mut services = HashMap::new();
    for name in [V2, V3] {
        let generated = create_task(Arc::new(Api(Arc::clone(tasks))));
        services.extend(generated.into_values().map(|s| (name.to_owned(), s)));
    }
    services
}

struct Api(Arc<Tasks>);

#[async_trait]
impl TaskApi for Api {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> ttrpc::Result<CreateTaskResponse> {
        // Not in this future: a client that goes away would leave the container half made.
        let tasks = Arc::clone(&self.0);
        let task = detached(async move {
            check_id("id", &request.id)?;
            if !request.checkpoint.is_empty() {
                return Err(TaskError::Unimplemented(
                    "checkpoint: this shim does not restore checkpoints".into(),
                ));
            }
            let root = tasks.shared.dir.join("runc");
            let runc = options::parse(request.options.as_ref(), &root, &tasks.shared.namespace)?;
            let reserved = tasks.reserve(&request.id)?;
            let create = CreateTask {
                id: request.id,
                bundle: PathBuf::from(request.bundle),
                rootfs: request.rootfs,
                stdio: Names {
                    stdin: request.stdin,
                    stdout: request.stdout,
                    stderr: request.stderr,
                    terminal: request.terminal,
                },
                runc,
            };
            let task = Task::create(&tasks.shared, create).await?;
            reserved.fill(Arc::clone(&task));
            Ok(task)
        })
        .await?;
        Ok(CreateTaskResponse {
            pid: task.init.state().pid(),
            ..Default::default()
        })
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        let task = self.0.get(&request.id)?;
        let state = detached(async move {
            if request.exec_id.is_empty() {
                task.start().await
            } else {
                task.start_exec(&request.exec_id).await
            }
        })
        .await?;
        Ok(StartResponse {
            pid: state.pid(),
            ..Default::default()
        })
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        check_id("exec_id", &request.exec_id)?;
        let task = self.0.get(&request.id)?;
        let stdio = Names {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let spec = request.spec.into_option().unwrap_or_default().value;
        task.add_exec(&request.exec_id, stdio, spec)?;
        Ok(Empty::new())
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> ttrpc::Result<StateResponse> {
        let task = self.0.get(&request.id)?;
        let (state, stdio) = task.with_process(&request.exec_id, |process| {
            (process.state(), process.stdio.clone())
        })?;
        let mut response = StateResponse {
            id: request.id,
            bundle: task.bundle().to_string_lossy().into_owned(),
            pid: state.pid(),
            status: EnumOrUnknown::new(status(state.phase)),
            stdin: stdio.stdin,
            stdout: stdio.stdout,
            stderr: stdio.stderr,
            terminal: stdio.terminal,
            exec_id: request.exec_id,
            ..Default::default()
        };
        if let Some(exit) = state.exit() {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(timestamp(exit.at));
        }
        Ok(response)
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: DeleteRequest,
    ) -> ttrpc::Result<DeleteResponse> {
        let tasks = Arc::clone(&self.0);
        let (state, exit) = detached(async move {
            let task = tasks.get(&request.id)?;
            if request.exec_id.is_empty() {
                let end = task.delete().await?;
                tasks.remove(&request.id);
                Ok(end)
            } else {
                task.delete_exec(&request.exec_id).await
            }
        })
        .await?;
        Ok(DeleteResponse {
            pid: state.pid(),
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        })
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let task = self.0.get(&request.id)?;
        let (_, exit) = task.wait(&request.exec_id).await?;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        })
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        let task = self.0.get(&request.id)?;
        if request.exec_id.is_empty() {
            task.kill(request.signal, request.all).await?;
        } else {
            task.kill_exec(&request.exec_id, request.signal).await?;
        }
        Ok(Empty::new())
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let task = self.0.get(&request.id)?;
        let execs: HashMap<i32, String> = task
            .execs()
            .iter()
            .map(|(exec, process)| (process.state().pid, exec.clone()))
            .collect();
        let describe = |pid: i32| {
            let details = execs.get(&pid).map(|exec| ProcessDetails {
                exec_id: exec.clone(),
                ..Default::default()
            });
            ProcessInfo {
                pid: pid.cast_unsigned(),
                info: details
                    .map(|details| any("containerd.runc.v1.ProcessDetails", &details))
                    .into(),
                ..Default::default()
            }
        };
        Ok(PidsResponse {
            processes: task
                .backend
                .pids(task.init.state().pid)
                .await?
                .into_iter()
                .map(describe)
                .collect(),
            ..Default::default()
        })
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> ttrpc::Result<Empty> {
        self.0.get(&request.id)?.pause().await?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> ttrpc::Result<Empty> {
        self.0.get(&request.id)?.resume().await?;
        Ok(Empty::new())
    }

    async fn checkpoint(
        &self,
        _: &TtrpcContext,
        request: CheckpointTaskRequest,
    ) -> ttrpc::Result<Empty> {
        self.0.get(&request.id)?;
        Err(
            TaskError::Unimplemented("checkpoint: this shim does not write checkpoints".into())
                .into(),
        )
    }

    async fn resize_pty(
        &self,
        _: &TtrpcContext,
        request: ResizePtyRequest,
    ) -> ttrpc::Result<Empty> {
        let task = self.0.get(&request.id)?;
        let io = task.with_process(&request.exec_id, super::process::Process::io)?;
        // Not started yet: the client sends its size once more when it is.
        if let Some(io) = io {
            io.resize(request.width, request.height)?;
        }
        Ok(Empty::new())
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> ttrpc::Result<Empty> {
        let task = self.0.get(&request.id)?;
        let io = task.with_process(&request.exec_id, super::process::Process::io)?;
        if let Some(io) = io.filter(|_| request.stdin) {
            io.close_stdin();
        }
        Ok(Empty::new())
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let task = self.0.get(&request.id)?;
        let Some(resources) = request.resources.into_option() else {
            return Err(TaskError::InvalidArgument("resources: missing".into()).into());
        };
        task.update(&resources.value).await?;
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let task = self.0.get(&request.id)?;
        let state = task.init.state();
        if state.exit().is_some() {
            return Err(TaskError::NotFound("the container has ended".into()).into());
        }
        let stats = crate::stats::read(state.pid)
            .map_err(|error| TaskError::failed("reading cgroup statistics", error))?;
        Ok(StatsResponse {
            stats: MessageField::some(stats),
            ..Default::default()
        })
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        request: ConnectRequest,
    ) -> ttrpc::Result<ConnectResponse> {
        let task = self.0.get(&request.id)?;
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid: task.init.state().pid(),
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, _: ShutdownRequest) -> ttrpc::Result<Empty> {
        self.0.shutdown();
        Ok(Empty::new())
    }
}

/// Runs `work` to its end even if the client does not wait for it.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = super::error::Result<T>> + Send + 'static,
) -> super::error::Result<T> {
    tokio::spawn(work)
        .await
        .unwrap_or_else(|error| Err(TaskError::failed("the shim failed", error)))
}
