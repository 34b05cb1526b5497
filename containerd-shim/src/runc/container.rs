//! One container made by runc.

use std::ffi::OsString;
use std::path::Path;

use serde::Deserialize;

use super::{Runc, Streams};
use crate::task::error::{Result, TaskError};
use crate::task::processes::{End, Name};

/// A process that was started, and its end.
pub(crate) type Started = (i32, End);

/// A container of runc. Holds no state but its name: runc has the rest.
pub(crate) struct Container {
    runc: Runc,
    id: String,
}

impl Container {
    /// The container `id`, made before or to be made.
    pub(crate) fn new(runc: Runc, id: &str) -> Self {
        Self {
            runc,
            id: id.to_owned(),
        }
    }

    /// Makes the container from `bundle`: its first process waits for [`Self::start`].
    pub(crate) async fn create(
        &self,
        bundle: &Path,
        streams: Streams,
        console: Option<&Path>,
    ) -> Result<Started> {
        let words = "OCI runtime create failed";
        let pid_file = self.runc.dir().join("init.pid");
        let mut args = words_of(["create", "--bundle"]);
        args.extend([bundle.into(), "--pid-file".into(), (&pid_file).into()]);
        if let Some(socket) = console {
            args.extend(["--console-socket".into(), socket.into()]);
        }
        let settings = self.runc.settings();
        if settings.no_pivot_root {
            args.push("--no-pivot".into());
        }
        if settings.no_new_keyring {
            args.push("--no-new-keyring".into());
        }
        args.push((&self.id).into());
        self.runc.start(words, &self.id, args, streams).await?;
        let name = Name::Task(&self.id);
        match self.adopt(words, &name, &pid_file).await {
            Ok(started) => Ok(started),
            Err(error) => {
                drop(self.delete(true).await);
                Err(error)
            }
        }
    }

    /// Lets the first process go on to the container's command.
    pub(crate) async fn start(&self) -> Result<()> {
        let args = words_of(["start", &self.id]);
        self.runc
            .call("OCI runtime start failed", args, None)
            .await
            .map(drop)
    }

    /// Starts another process from `process`, an OCI process as JSON.
    pub(crate) async fn exec(
        &self,
        exec_id: &str,
        process: &[u8],
        streams: Streams,
        console: Option<&Path>,
    ) -> Result<Started> {
        let words = "OCI runtime exec failed";
        let file = self.runc.dir().join(format!("{exec_id}.process.json"));
        let pid_file = self.runc.dir().join(format!("{exec_id}.pid"));
        std::fs::write(&file, process).map_err(TaskError::io(words))?;
        let mut args = words_of(["exec", "--detach", "--process"]);
        args.extend([(&file).into(), "--pid-file".into(), (&pid_file).into()]);
        if let Some(socket) = console {
            args.extend(["--console-socket".into(), socket.into()]);
        }
        args.push((&self.id).into());
        let result = self.runc.start(words, &self.id, args, streams).await;
        // It holds the process's environment.
        drop(std::fs::remove_file(&file));
        let started = match result {
            Ok(()) => {
                let name = Name::Exec(&self.id, exec_id);
                self.adopt(words, &name, &pid_file).await
            }
            Err(error) => Err(error),
        };
        drop(std::fs::remove_file(&pid_file));
        started
    }

    async fn adopt(&self, words: &str, name: &Name<'_>, pid_file: &Path) -> Result<Started> {
        let text = std::fs::read_to_string(pid_file).map_err(TaskError::io(words))?;
        let pid = text
            .trim()
            .parse()
            .map_err(|error| TaskError::failed(words, format_args!("pid file: {error}")))?;
        let end = self.runc.processes()?.claim(name, pid).await;
        let end = end.map_err(|error| TaskError::failed(words, error))?;
        Ok((pid, end))
    }

    /// Sends `signal` to the first process, or to `all` of them.
    pub(crate) async fn kill(&self, signal: u32, all: bool) -> Result<()> {
        let mut args = words_of(["kill"]);
        if all {
            args.push("--all".into());
        }
        args.extend([(&self.id).into(), signal.to_string().into()]);
        self.runc
            .call("kill", args, None)
            .await
            .map(drop)
            .map_err(kill_error)
    }

    /// Freezes it.
    pub(crate) async fn pause(&self) -> Result<()> {
        let args = words_of(["pause", &self.id]);
        self.runc
            .call("OCI runtime pause failed", args, None)
            .await
            .map(drop)
    }

    /// Thaws it.
    pub(crate) async fn resume(&self) -> Result<()> {
        let args = words_of(["resume", &self.id]);
        self.runc
            .call("OCI runtime resume failed", args, None)
            .await
            .map(drop)
    }

    /// Whether it is frozen; what cannot be asked is not.
    pub(crate) async fn paused(&self) -> bool {
        #[derive(Deserialize)]
        struct State {
            status: String,
        }
        let args = words_of(["state", &self.id]);
        let output = self.runc.call("OCI runtime state failed", args, None);
        output
            .await
            .ok()
            .and_then(|output| serde_json::from_slice::<State>(&output).ok())
            .is_some_and(|state| state.status == "paused")
    }

    /// Sets `resources`, OCI LinuxResources as JSON.
    pub(crate) async fn update(&self, resources: &[u8]) -> Result<()> {
        let args = words_of(["update", "--resources", "-", &self.id]);
        self.runc
            .call("OCI runtime update failed", args, Some(resources))
            .await
            .map(drop)
    }

    /// Its processes, as the host numbers them.
    pub(crate) async fn pids(&self) -> Result<Vec<i32>> {
        let args = words_of(["ps", "--format", "json", &self.id]);
        let output = self.runc.call("OCI runtime ps failed", args, None).await?;
        // `null` if there are none.
        serde_json::from_slice::<Option<Vec<i32>>>(&output)
            .map(Option::unwrap_or_default)
            .map_err(|error| TaskError::failed("OCI runtime ps failed", error))
    }

    /// Removes what runc keeps of it. With `force`, one that runs is killed.
    ///
    /// # Errors
    /// None if runc does not know the container.
    pub(crate) async fn delete(&self, force: bool) -> Result<()> {
        let mut args = words_of(["delete"]);
        if force {
            args.push("--force".into());
        }
        args.push((&self.id).into());
        match self
            .runc
            .call("OCI runtime delete failed", args, None)
            .await
        {
            Err(TaskError::Failed(message)) if message.contains("does not exist") => Ok(()),
            other => other.map(drop),
        }
    }
}

fn words_of<const N: usize>(words: [&str; N]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// What runc says when there is nothing to kill any more, by version.
fn kill_error(error: TaskError) -> TaskError {
    const GONE: [&str; 5] = [
        "os: process already finished",
        "container not running",
        "no such process",
        "process not found",
        "does not exist",
    ];
    match error {
        TaskError::Failed(message) => {
            let lower = message.to_lowercase();
            if GONE.iter().any(|phrase| lower.contains(phrase)) {
                TaskError::NotFound("process already finished".into())
            } else {
                TaskError::Failed(message)
            }
        }
        other => other,
    }
}

/// The parts of an OCI spec that decide what to do with the container.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct SpecView {
    #[serde(default)]
    linux: LinuxView,
}

#[derive(Debug, Default, Deserialize)]
struct LinuxView {
    #[serde(default)]
    namespaces: Vec<NamespaceView>,
}

#[derive(Debug, Deserialize)]
struct NamespaceView {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    path: String,
}

impl SpecView {
    /// Reads a bundle's `config.json`.
    ///
    /// # Errors
    /// It is no OCI spec.
    pub(crate) fn parse(config: &[u8]) -> Result<Self> {
        serde_json::from_slice(config).map_err(|error| {
            TaskError::InvalidArgument(format!("config.json: not an OCI spec: {error}"))
        })
    }

    /// Whether processes can outlive the container's first one: it is not PID 1 of a namespace
    /// made for it.
    pub(crate) fn shares_pid_namespace(&self) -> bool {
        !self
            .linux
            .namespaces
            .iter()
            .any(|namespace| namespace.kind == "pid" && namespace.path.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::{SpecView, TaskError, kill_error};

    #[test]
    fn killing_what_is_gone_is_not_found() {
        let gone = kill_error(TaskError::Failed("kill: container not running".into()));
        assert_eq!(gone, TaskError::NotFound("process already finished".into()));
        let other = TaskError::Failed("kill: permission denied".into());
        assert_eq!(kill_error(other.clone()), other);
    }

    #[test]
    fn pid_namespaces() {
        let cases = [
            (r#"{}"#, true),
            (r#"{"linux":{"namespaces":[{"type":"mount"}]}}"#, true),
            (r#"{"linux":{"namespaces":[{"type":"pid"}]}}"#, false),
            (
                r#"{"linux":{"namespaces":[{"type":"pid","path":"/proc/1/ns/pid"}]}}"#,
                true,
            ),
        ];
        for (spec, shared) in cases {
            let view: SpecView = serde_json::from_str(spec).unwrap();
            assert_eq!(view.shares_pid_namespace(), shared, "{spec}");
        }
    }
}
