//! One container of a case on one runtime.

use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use containerd_client::services::v1::container::Runtime;
use containerd_client::services::v1::containers_client::ContainersClient;
use containerd_client::services::v1::tasks_client::TasksClient;
use containerd_client::services::v1::{
    CloseIoRequest, Container, CreateContainerRequest, CreateTaskRequest, DeleteContainerRequest,
    DeleteProcessRequest, DeleteTaskRequest, ExecProcessRequest, GetRequest, KillRequest,
    ListPidsRequest, MetricsRequest, PauseTaskRequest, ResizePtyRequest, ResumeTaskRequest,
    StartRequest, UpdateTaskRequest, WaitRequest,
};
use containerd_client::types::Mount;
use prost_types::Any;
use serde_json::Value;
use tonic::transport::Channel;
use tonic::{IntoRequest, Request, Status};

use super::Lines;
use super::host::{Events, Host, NAMESPACE};
use super::parts::{self, Part};

/// See the module. Clones are the same container.
#[derive(Clone)]
pub(crate) struct Session {
    runtime: &'static str,
    id: String,
    dir: PathBuf,
    image: PathBuf,
    cgroup: String,
    channel: Channel,
    events: Arc<Events>,
    unread: Arc<Mutex<Vec<fs::File>>>,
}

/// A client's request in the tests' namespace.
fn request<T>(message: T) -> Request<T> {
    let mut request = message.into_request();
    let metadata = request.metadata_mut();
    metadata.insert("containerd-namespace", NAMESPACE.parse().unwrap());
    request
}

impl Session {
    pub(crate) fn new(host: &Host, runtime: &'static str, case: &str) -> Self {
        let short = if runtime.contains("sandman") {
            "ours"
        } else {
            "runc"
        };
        let id = format!("{case}-{short}");
        let dir = host.path(&id);
        for name in ["upper", "work", "io", "data"] {
            fs::create_dir_all(dir.join(name)).unwrap();
        }
        Self {
            runtime,
            cgroup: format!("{}/{id}", host.cgroup()),
            dir,
            image: host.image(),
            channel: host.channel.clone(),
            events: Arc::clone(&host.events),
            unread: Arc::default(),
            id,
        }
    }

    /// Whether it is on our runtime.
    pub(crate) fn is_ours(&self) -> bool {
        self.runtime.contains("sandman")
    }

    /// Kills a process of our runtime, and waits until it is gone; runc has no such process.
    pub(crate) async fn kill_part(&self, part: Part) {
        if self.is_ours() {
            parts::kill(part).await;
        }
    }

    pub(crate) fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// A file or folder of the host for this container; `data` is there already.
    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn tasks(&self) -> TasksClient<Channel> {
        TasksClient::new(self.channel.clone())
    }

    /// A FIFO of this container and its name. Held open both ways, so nothing is lost.
    pub(crate) fn fifo(&self, name: &str) -> (String, fs::File) {
        let path = self.dir.join("io").join(name);
        if !path.exists() {
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        }
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(&path)
            .unwrap();
        (path.display().to_string(), file)
    }

    /// Names of streams. containerd's own shim takes either both outputs or none.
    fn streams(&self, io: [&str; 3], terminal: bool) -> [String; 3] {
        let mut streams = io.map(str::to_owned);
        if !terminal && !streams[1].is_empty() && streams[2].is_empty() {
            let (path, fifo) = self.fifo("unread");
            streams[2] = path;
            // It waits for a reader too.
            self.unread.lock().unwrap().push(fifo);
        }
        streams
    }

    /// Registers the container.
    pub(crate) async fn register(&self, spec: &Value) {
        let container = Container {
            id: self.id.clone(),
            runtime: Some(Runtime {
                name: self.runtime.to_owned(),
                options: None,
            }),
            spec: Some(Any {
                type_url: "types.containerd.io/opencontainers/runtime-spec/1/Spec".into(),
                value: serde_json::to_vec(spec).unwrap(),
            }),
            ..Default::default()
        };
        let call = CreateContainerRequest {
            container: Some(container),
        };
        ContainersClient::new(self.channel.clone())
            .create(request(call))
            .await
            .unwrap();
    }

    /// Creates its task on a layer above the image.
    pub(crate) async fn create(&self, io: [&str; 3], terminal: bool) -> Result<u32, String> {
        let rootfs = Mount {
            r#type: "overlay".into(),
            source: "overlay".into(),
            target: String::new(),
            options: vec![
                format!("workdir={}", self.path("work")),
                format!("upperdir={}", self.path("upper")),
                format!("lowerdir={}", self.image.display()),
            ],
        };
        let [stdin, stdout, stderr] = self.streams(io, terminal);
        let call = CreateTaskRequest {
            container_id: self.id.clone(),
            rootfs: vec![rootfs],
            stdin,
            stdout,
            stderr,
            terminal,
            ..Default::default()
        };
        let answer = self.tasks().create(request(call)).await;
        answer
            .map(|a| a.into_inner().pid)
            .map_err(|e| self.error(&e))
    }

    pub(crate) async fn start(&self, exec: &str) -> Result<u32, String> {
        let call = StartRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
        };
        let answer = self.tasks().start(request(call)).await;
        answer
            .map(|a| a.into_inner().pid)
            .map_err(|e| self.error(&e))
    }

    pub(crate) async fn wait(&self, exec: &str) -> Result<u32, String> {
        let call = WaitRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
        };
        let answer = self.tasks().wait(request(call)).await;
        answer
            .map(|a| a.into_inner().exit_status)
            .map_err(|e| self.error(&e))
    }

    pub(crate) async fn kill(&self, exec: &str, signal: u32, all: bool) -> Result<(), String> {
        let call = KillRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
            signal,
            all,
        };
        let answer = self.tasks().kill(request(call)).await;
        answer.map(drop).map_err(|e| self.error(&e))
    }

    pub(crate) async fn delete(&self) -> Result<u32, String> {
        let call = DeleteTaskRequest {
            container_id: self.id.clone(),
        };
        let answer = self.tasks().delete(request(call)).await;
        answer
            .map(|a| a.into_inner().exit_status)
            .map_err(|e| self.error(&e))
    }

    pub(crate) async fn delete_exec(&self, exec: &str) -> Result<u32, String> {
        let call = DeleteProcessRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
        };
        let answer = self.tasks().delete_process(request(call)).await;
        answer
            .map(|a| a.into_inner().exit_status)
            .map_err(|e| self.error(&e))
    }

    pub(crate) async fn pause(&self) -> Result<(), String> {
        let call = PauseTaskRequest {
            container_id: self.id.clone(),
        };
        let answer = self.tasks().pause(request(call)).await;
        answer.map(drop).map_err(|e| self.error(&e))
    }

    pub(crate) async fn resume(&self) -> Result<(), String> {
        let call = ResumeTaskRequest {
            container_id: self.id.clone(),
        };
        let answer = self.tasks().resume(request(call)).await;
        answer.map(drop).map_err(|e| self.error(&e))
    }

    pub(crate) async fn update(&self, resources: &Value) -> Result<(), String> {
        let call = UpdateTaskRequest {
            container_id: self.id.clone(),
            resources: Some(Any {
                type_url: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources".into(),
                value: serde_json::to_vec(resources).unwrap(),
            }),
            ..Default::default()
        };
        let answer = self.tasks().update(request(call)).await;
        answer.map(drop).map_err(|e| self.error(&e))
    }

    pub(crate) async fn resize(&self, exec: &str, width: u32, height: u32) -> Result<(), String> {
        let call = ResizePtyRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
            width,
            height,
        };
        let answer = self.tasks().resize_pty(request(call)).await;
        answer.map(drop).map_err(|e| self.error(&e))
    }

    pub(crate) async fn close_stdin(&self, exec: &str) -> Result<(), String> {
        let call = CloseIoRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
            stdin: true,
        };
        let answer = self.tasks().close_io(request(call)).await;
        answer.map(drop).map_err(|e| self.error(&e))
    }

    /// Type of its metrics, and how many bytes they have.
    pub(crate) async fn metrics(&self) -> Result<(String, usize), String> {
        let call = MetricsRequest {
            filters: vec![format!("id=={}", self.id)],
        };
        let answer = self.tasks().metrics(request(call)).await;
        let mut metrics = answer.map_err(|e| self.error(&e))?.into_inner().metrics;
        let data = metrics
            .pop()
            .and_then(|metric| metric.data)
            .unwrap_or_default();
        Ok((data.type_url, data.value.len()))
    }

    /// Number of its processes, and of those that are known execs.
    pub(crate) async fn pids(&self) -> Result<(usize, usize), String> {
        let call = ListPidsRequest {
            container_id: self.id.clone(),
        };
        let answer = self.tasks().list_pids(request(call)).await;
        let processes = answer.map_err(|e| self.error(&e))?.into_inner().processes;
        let execs = processes
            .iter()
            .filter(|process| process.info.is_some())
            .count();
        Ok((processes.len(), execs))
    }

    /// State and exit status as containerd tells them.
    pub(crate) async fn state(&self, exec: &str) -> String {
        let call = GetRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
        };
        match self.tasks().get(request(call)).await {
            Ok(answer) => {
                let process = answer.into_inner().process.unwrap_or_default();
                format!(
                    "state {:?} pid {} exit {} terminal {}",
                    process.status(),
                    if process.pid == 0 { "none" } else { "some" },
                    process.exit_status,
                    process.terminal
                )
            }
            Err(error) => self.error(&error),
        }
    }

    /// Adds an exec of `process`, an OCI process.
    pub(crate) async fn exec(
        &self,
        exec: &str,
        process: &Value,
        io: [&str; 3],
        terminal: bool,
    ) -> Result<(), String> {
        let [stdin, stdout, stderr] = self.streams(io, terminal);
        let call = ExecProcessRequest {
            container_id: self.id.clone(),
            exec_id: exec.into(),
            stdin,
            stdout,
            stderr,
            terminal,
            spec: Some(Any {
                type_url: "types.containerd.io/opencontainers/runtime-spec/1/Process".into(),
                value: serde_json::to_vec(process).unwrap(),
            }),
        };
        let answer = self.tasks().exec(request(call)).await;
        answer.map(drop).map_err(|e| self.error(&e))
    }

    /// Runs `spec` to its end.
    pub(crate) async fn run_to_end(&self, spec: Value) -> Lines {
        let terminal = spec["process"]["terminal"] == true;
        self.register(&spec).await;
        let (stdout, out) = self.fifo("stdout");
        let (stderr, err) = self.fifo("stderr");
        let stderr = if terminal { "" } else { &stderr };
        let mut lines = Lines::new();
        match self.create(["", &stdout, stderr], terminal).await {
            Err(error) => lines.push(format!("create: {error}")),
            Ok(_) => {
                match self.start("").await {
                    Ok(_) => lines.push(format!("exit {:?}", self.wait("").await)),
                    Err(error) => lines.push(format!("start: {error}")),
                }
                lines.push(format!("deleted {:?}", self.delete().await));
                lines.push(format!("events {}", self.events_to_delete().await));
            }
        }
        lines.push(self.text("stdout", out));
        lines.push(self.text("stderr", err));
        lines
    }

    /// Everything in a FIFO by now.
    pub(crate) fn text(&self, name: &str, mut fifo: fs::File) -> String {
        let mut bytes = Vec::new();
        // Ends with "would block": this process holds the writing end too.
        drop(fifo.read_to_end(&mut bytes));
        format!(
            "{name}:\n{}",
            self.neutral(&String::from_utf8_lossy(&bytes))
        )
    }

    /// Topics of this container's events, up to its deletion.
    pub(crate) async fn events_to_delete(&self) -> String {
        self.events_until("/tasks/delete").await
    }

    pub(crate) async fn events_until(&self, topic: &str) -> String {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(15);
        loop {
            let news = self.events.news.notified();
            let topics: Vec<String> = self
                .events
                .by_id
                .lock()
                .unwrap()
                .get(&self.id)
                .into_iter()
                .flatten()
                .cloned()
                .collect();
            if topics.iter().any(|seen| seen == topic) {
                return topics.join(" ");
            }
            if tokio::time::timeout_at(deadline, news).await.is_err() {
                return format!("{} (no {topic} in time)", topics.join(" "));
            }
        }
    }

    /// Waits until `fifo` has shown `text`; returns all that was read.
    pub(crate) async fn until(&self, fifo: &mut fs::File, text: &str) -> String {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        let mut seen = String::new();
        while !seen.contains(text) {
            if tokio::time::Instant::now() > deadline {
                return format!("{seen} (no {text:?} in time)");
            }
            let mut buffer = [0; 4096];
            match fifo.read(&mut buffer) {
                Ok(count) => seen.push_str(&String::from_utf8_lossy(&buffer[..count])),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
        self.neutral(&seen)
    }

    /// Removes whatever the case has left.
    pub(crate) async fn clean(&self) {
        drop(self.kill("", 9, true).await);
        drop(tokio::time::timeout(Duration::from_secs(10), self.wait("")).await);
        drop(self.delete().await);
        let call = DeleteContainerRequest {
            id: self.id.clone(),
        };
        drop(
            ContainersClient::new(self.channel.clone())
                .delete(request(call))
                .await,
        );
    }

    fn error(&self, status: &Status) -> String {
        format!("{:?}: {}", status.code(), self.neutral(status.message()))
    }

    /// Without what is different by design: names of this container and its folder, and the name
    /// of the program that failed.
    fn neutral(&self, text: &str) -> String {
        text.replace(&self.id, "ID")
            .replace("failed: runc create failed: ", "failed: ")
    }
}
