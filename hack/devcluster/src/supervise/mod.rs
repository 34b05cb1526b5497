//! Starts and stops the components as plain processes. There is no supervisor process and no
//! restart loop: what died stays dead until the next `up`, where tests can see it.

mod launch;
mod process;
mod record;

use std::fs::{self, File, OpenOptions};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::Signal;

pub(crate) use self::{
    launch::{Launch, run as launch},
    process::{Identity, pids, resident_bytes},
    record::Record,
};
use crate::components::{Component, Probe, ProbeContext};
use crate::layout::Layout;
use crate::net::NetNs;

/// How long a process may take to write its record after it was forked.
const LAUNCH_DEADLINE: Duration = Duration::from_secs(10);
/// Pause between two looks at something that has no event to wait for.
const TICK: Duration = Duration::from_millis(50);

/// A component that died or did not become ready: its log says why.
#[derive(Debug, thiserror::Error)]
#[error("{component}: {reason}")]
pub(crate) struct ComponentFailed {
    /// Name of the component.
    pub(crate) component: String,
    /// What was seen of it from outside.
    pub(crate) reason: String,
    /// Its output.
    pub(crate) log: PathBuf,
}

/// What `ensure` had to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It ran already, with the same configuration and binary.
    Unchanged,
    /// It was started.
    Started,
    /// It ran with another configuration or binary and was replaced.
    Replaced,
}

/// Starts, stops and looks at the components of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Supervisor {
    layout: Layout,
}

impl Supervisor {
    /// For the cluster of this layout.
    pub(crate) fn new(layout: Layout) -> Self {
        Self { layout }
    }

    /// The record of a component that runs now.
    pub(crate) fn running(&self, component: &str) -> Option<Record> {
        self.record(component)
            .filter(|record| record.identity.is_alive())
    }

    /// The record of the last process of a component, alive or not.
    pub(crate) fn record(&self, component: &str) -> Option<Record> {
        Record::read(&self.layout.record_dir(), component)
    }

    /// All records, in the order of their names.
    pub(crate) fn records(&self) -> Vec<Record> {
        Record::read_all(&self.layout.record_dir())
    }

    /// Starts the component unless it runs just as described, and waits until it is ready.
    pub(crate) async fn ensure(
        &self,
        component: &Component,
        context: &ProbeContext,
    ) -> anyhow::Result<Outcome> {
        let fingerprint = component.fingerprint(&self.layout);
        let outcome = match self.running(&component.name) {
            Some(record) if record.fingerprint == fingerprint => Outcome::Unchanged,
            Some(_) => {
                self.stop(&component.name, component.stop_grace).await?;
                Outcome::Replaced
            }
            None => Outcome::Started,
        };
        if outcome != Outcome::Unchanged {
            self.start(component, &fingerprint).await?;
        }
        self.wait_ready(component, context).await?;
        Ok(outcome)
    }

    async fn start(&self, component: &Component, fingerprint: &str) -> anyhow::Result<()> {
        for (path, content) in &component.files {
            write_private(path, content)?;
        }
        for dir in &component.dirs {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        if let Probe::Unix(socket) = &component.ready {
            // The socket of a killed process would otherwise look like that of the new one.
            let _ = fs::remove_file(socket);
        }
        let log = self.open_log(&component.name)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("launch").arg("--name").arg(&component.name);
        command.arg("--record-dir").arg(self.layout.record_dir());
        command.arg("--fingerprint").arg(fingerprint);
        if let Some(member) = component.member {
            let namespace = NetNs::named(&self.layout.netns_name(member));
            command.arg("--netns").arg(namespace.path());
        }
        command.arg("--").args(&component.argv);
        command
            .env_clear()
            .envs(inherited_env())
            .envs(component.env.iter().cloned());
        command
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = command.spawn().context("cannot start a process")?;
        self.wait_recorded(&component.name, child.id()).await
    }

    /// The process writes its own record before it becomes the component, so that there is no
    /// moment in which a component runs and nobody knows of it.
    async fn wait_recorded(&self, name: &str, pid: u32) -> anyhow::Result<()> {
        let deadline = Instant::now() + LAUNCH_DEADLINE;
        loop {
            if self
                .record(name)
                .is_some_and(|record| record.identity.pid() == pid)
            {
                return Ok(());
            }
            if Identity::of(pid).is_none() || Instant::now() > deadline {
                return Err(self.failed(name, "could not be started"));
            }
            tokio::time::sleep(TICK / 10).await;
        }
    }

    async fn wait_ready(
        &self,
        component: &Component,
        context: &ProbeContext,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + component.ready_within;
        let namespace = component
            .member
            .map(|m| NetNs::named(&self.layout.netns_name(m)));
        loop {
            if self.running(&component.name).is_none() {
                return Err(self.failed(&component.name, "ended at once"));
            }
            if component.ready.check(namespace.as_ref(), context).await {
                return Ok(());
            }
            if Instant::now() > deadline {
                let reason = format!("is not ready after {:?}", component.ready_within);
                return Err(self.failed(&component.name, &reason));
            }
            tokio::time::sleep(TICK).await;
        }
    }

    /// Ends a component: asks first, kills after the grace period. Nothing to do if it is dead.
    pub(crate) async fn stop(&self, component: &str, grace: Duration) -> anyhow::Result<()> {
        let Some(record) = self.running(component) else {
            return Ok(());
        };
        record.identity.signal(Signal::SIGTERM)?;
        if !wait_gone(&[record.identity], grace).await {
            record.identity.signal(Signal::SIGKILL)?;
            if !wait_gone(&[record.identity], Duration::from_secs(10)).await {
                bail!(
                    "{component} (pid {}) survived SIGKILL",
                    record.identity.pid()
                );
            }
        }
        Ok(())
    }

    /// An error that points at the component's log.
    pub(crate) fn failed(&self, component: &str, reason: &str) -> anyhow::Error {
        ComponentFailed {
            component: component.to_owned(),
            reason: reason.to_owned(),
            log: self.layout.log_file(component),
        }
        .into()
    }

    fn open_log(&self, component: &str) -> anyhow::Result<File> {
        fs::create_dir_all(self.layout.log_dir())?;
        let path = self.layout.log_file(component);
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))
    }
}

/// Waits until all of these processes are gone; false if time ran out first.
pub(crate) async fn wait_gone(processes: &[Identity], within: Duration) -> bool {
    let deadline = Instant::now() + within;
    while processes.iter().any(|process| process.is_alive()) {
        if Instant::now() > deadline {
            return false;
        }
        tokio::time::sleep(TICK).await;
    }
    true
}

/// The few variables a component may see: what a developer's shell happens to export must not
/// change how the cluster behaves.
fn inherited_env() -> impl Iterator<Item = (String, String)> {
    let keep = ["PATH", "HOME", "TMPDIR", "RUST_LOG"];
    std::env::vars().filter(move |(name, _)| keep.contains(&name.as_str()))
}

/// Writes a file that only its owner may read.
pub(crate) fn write_private(path: &std::path::Path, content: &str) -> anyhow::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(file.write_all(content.as_bytes())?)
}
