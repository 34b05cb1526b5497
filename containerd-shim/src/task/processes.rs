//! Processes of tasks, all of them children of the holder.
//!
//! What is started here outlives this shim, and its end is kept by the holder until [`Processes::forget`]:
//! the next shim finds it under the same [`Name`].

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{mpsc, oneshot};

use super::error::{Result, TaskError};
use crate::holder::client::{Client, Exited, HolderError, Taken};
use crate::holder::protocol::{Code, Entry, Key, Slot};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    /// Exit code, or 128 + signal.
    pub(crate) status: u32,
    /// When it was reaped.
    pub(crate) at: SystemTime,
}

impl Exit {
    /// What is reported of a process whose status nobody has seen.
    pub(crate) fn unknown() -> Self {
        Self {
            status: 137,
            at: SystemTime::now(),
        }
    }
}

/// The end of a process; closed without one if the holder is lost, and its status with it.
pub(crate) type End = oneshot::Receiver<Exit>;

/// What a process is called at the holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Name<'a> {
    /// The first process of a task.
    Task(&'a str),
    /// An exec of a task.
    Exec(&'a str, &'a str),
    /// runc, at work on a task.
    Tool(&'a str, u64),
    /// A logging program of a task.
    Logger(&'a str, u64),
}

impl Name<'_> {
    /// Ids have neither slashes nor spaces and 76 bytes at most, so a key is unique and fits.
    pub(crate) fn key(&self) -> Result<Key> {
        let text = match self {
            Self::Task(id) => format!("task/{id}"),
            Self::Exec(id, exec) => format!("exec/{id}/{exec}"),
            Self::Tool(id, number) => format!("tool/{id}/{}/{number}", std::process::id()),
            Self::Logger(id, number) => format!("logger/{id}/{}/{number}", std::process::id()),
        };
        Key::new(text).ok_or_else(|| TaskError::InvalidArgument("id: too long".into()))
    }
}

impl Name<'_> {
    /// The task and exec that `key` is of, if it is an exec's.
    pub(crate) fn exec_of(key: &Key) -> Option<(&str, &str)> {
        let text = std::str::from_utf8(key.as_bytes()).ok()?;
        text.strip_prefix("exec/")?.split_once('/')
    }
}

/// See the module.
pub(crate) struct Processes {
    client: Client,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    waiting: HashMap<Key, oneshot::Sender<Exit>>,
    /// Told before anybody asked, or by an earlier shim's holder.
    early: HashMap<Key, Exit>,
    lost: bool,
}

impl Processes {
    /// Connects to the holder at `socket` and follows its exits. `lost` is called when the holder
    /// is gone, or serves another shim.
    pub(crate) async fn connect(
        socket: &Path,
        lost: fn(),
    ) -> std::result::Result<Arc<Self>, HolderError> {
        let (client, exits) = Client::connect(socket).await?;
        let processes = Arc::new(Self {
            client,
            table: Mutex::default(),
        });
        tokio::spawn(follow(Arc::downgrade(&processes), exits, lost));
        Ok(processes)
    }

    /// The connection to the holder.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Runs a program with the descriptors `fds` as its 0, 1, 2 and so on.
    pub(crate) async fn spawn(
        &self,
        name: &Name<'_>,
        program: &Path,
        args: &[OsString],
        env: Vec<(OsString, OsString)>,
        fds: &[OwnedFd],
    ) -> Result<(i32, End)> {
        let key = name.key()?;
        let program = find(program)?;
        let mut argv = vec![program.into_os_string().into_vec()];
        argv.extend(args.iter().map(|arg| arg.as_bytes().to_vec()));
        let env = env
            .into_iter()
            .map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat())
            .collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // Before it can end.
        let end = self.expect(&key);
        match self
            .client()
            .spawn(&key, argv, env, Path::new("/"), &fds)
            .await
        {
            Ok(pid) => Ok((pid, end)),
            Err(error) => {
                self.lock().waiting.remove(&key);
                Err(holder_error(error))
            }
        }
    }

    /// Gives the orphan `pid` a name.
    pub(crate) async fn claim(&self, name: &Name<'_>, pid: i32) -> Result<End> {
        let key = name.key()?;
        let end = self.expect(&key);
        match self.client().claim(&key, pid).await {
            Ok(()) => Ok(end),
            Err(error) => {
                self.lock().waiting.remove(&key);
                Err(holder_error(error))
            }
        }
    }

    /// The end of a process that has its name already.
    pub(crate) fn expect(&self, key: &Key) -> End {
        let (sender, end) = oneshot::channel();
        let mut table = self.lock();
        if let Some(exit) = table.early.remove(key) {
            let _gone = sender.send(exit);
        } else if !table.lost {
            table.waiting.insert(key.clone(), sender);
        }
        end
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// `NotFound` once it has ended: no stranger with its number can be hit.
    pub(crate) async fn signal(&self, name: &Name<'_>, signal: i32) -> Result<()> {
        let key = name.key()?;
        self.client()
            .signal(&key, signal)
            .await
            .map_err(|error| match error {
                HolderError::Refused {
                    code: Code::NotFound,
                    ..
                } => TaskError::NotFound("process already finished".into()),
                other => holder_error(other),
            })
    }

    /// Whether it has not ended: at this moment its process id is its own.
    pub(crate) async fn runs(&self, name: &Name<'_>) -> Result<bool> {
        match self.signal(name, 0).await {
            Ok(()) => Ok(true),
            Err(TaskError::NotFound(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Leaves a note with the process's name, before there is a process, for the next shim.
    pub(crate) async fn note(&self, name: &Name<'_>, note: Vec<u8>) -> Result<()> {
        let key = name.key()?;
        self.client().note(&key, note).await.map_err(holder_error)
    }

    /// Leaves a copy of a descriptor with the process's name, for the next shim.
    pub(crate) async fn keep(&self, name: &Name<'_>, slot: Slot, fd: impl AsFd) -> Result<()> {
        let key = name.key()?;
        self.client()
            .keep(&key, slot, fd.as_fd())
            .await
            .map_err(holder_error)
    }

    /// Closes a descriptor that was left.
    pub(crate) async fn drop_slot(&self, key: &Key, slot: Slot) {
        // Gone with its key, or with the holder.
        drop(self.client().drop_slot(key, slot).await);
    }

    /// What an earlier shim left with a name.
    pub(crate) async fn take(&self, name: &Name<'_>) -> Result<Option<Taken>> {
        self.client().take(&name.key()?).await.map_err(holder_error)
    }

    /// Everything with a name.
    pub(crate) async fn list(&self) -> Result<Vec<Entry>> {
        self.client().list().await.map_err(holder_error)
    }

    /// Its end is known and recorded, or of no interest.
    pub(crate) async fn forget(&self, name: &Name<'_>) {
        match name.key() {
            Ok(key) => self.forget_key(&key).await,
            Err(error) => tracing::warn!(%error, "forgetting a process"),
        }
    }

    pub(crate) async fn forget_key(&self, key: &Key) {
        {
            let mut table = self.lock();
            table.waiting.remove(key);
            table.early.remove(key);
        }
        if let Err(error) = self.client().forget(key).await {
            tracing::warn!(%error, "forgetting a process");
        }
    }

    /// Forgets a process now, or at its end if that is still to come. Who waits for it hears no
    /// more of it.
    pub(crate) async fn forget_when_ended(self: &Arc<Self>, name: &Name<'_>) {
        let Ok(key) = name.key() else { return };
        let end = self.expect(&key);
        match self.client().forget(&key).await {
            Ok(()) => {
                self.lock().waiting.remove(&key);
            }
            Err(_) => self.forget_after(key, end),
        }
    }

    /// Kills a process if it runs, waits up to `limit` for its end, and forgets it.
    pub(crate) async fn end(self: &Arc<Self>, name: &Name<'_>, limit: Duration) {
        let Ok(key) = name.key() else { return };
        self.end_key(&key, limit).await;
    }

    async fn end_key(self: &Arc<Self>, key: &Key, limit: Duration) {
        let end = self.expect(key);
        if self.client().signal(key, nix::libc::SIGKILL).await.is_ok() {
            // In time or not: the kernel has it.
            drop(tokio::time::timeout(limit, end).await);
        }
        self.forget_key(key).await;
    }

    /// Does so with all execs of the task `id`.
    pub(crate) async fn end_execs(self: &Arc<Self>, id: &str, limit: Duration) {
        for entry in self.list().await.unwrap_or_default() {
            if Name::exec_of(&entry.key).is_some_and(|(task, _)| task == id) {
                self.end_key(&entry.key, limit).await;
            }
        }
    }

    /// Forgets runc calls and loggers of an earlier shim, once they end.
    pub(crate) fn tidy(self: &Arc<Self>, entries: &[Entry]) {
        for entry in entries {
            if entry.key.as_bytes().starts_with(b"tool/")
                || entry.key.as_bytes().starts_with(b"logger/")
            {
                let end = self.expect(&entry.key);
                self.forget_after(entry.key.clone(), end);
            }
        }
    }

    /// Forgets a process by itself at its `end`.
    pub(crate) fn forget_after(self: &Arc<Self>, key: Key, end: End) {
        let processes = Arc::clone(self);
        tokio::spawn(async move {
            if end.await.is_ok() {
                processes.forget_key(&key).await;
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn follow(
    processes: std::sync::Weak<Processes>,
    mut exits: mpsc::UnboundedReceiver<Exited>,
    lost: fn(),
) {
    while let Some(exited) = exits.recv().await {
        let Some(processes) = processes.upgrade() else {
            return;
        };
        let exit = Exit {
            status: exited.exit.code,
            at: UNIX_EPOCH
                .checked_add(Duration::from_nanos(exited.exit.at_ns))
                .unwrap_or_else(SystemTime::now),
        };
        let mut table = processes.lock();
        match table.waiting.remove(&exited.key) {
            Some(waiter) => {
                let _gone = waiter.send(exit);
            }
            None => {
                table.early.insert(exited.key, exit);
            }
        }
    }
    if let Some(processes) = processes.upgrade() {
        lost();
        let mut table = processes.lock();
        table.lost = true;
        // Closes the channels, which tells who waits.
        table.waiting.clear();
    }
}

pub(crate) fn holder_error(error: HolderError) -> TaskError {
    TaskError::failed("holder", error)
}

/// The absolute path of `program`, looked up in PATH if it has no slash.
fn find(program: &Path) -> Result<PathBuf> {
    if program.as_os_str().as_bytes().contains(&b'/') {
        return std::path::absolute(program).map_err(TaskError::io(program.display()));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    find_in(program.as_os_str(), &path).ok_or_else(|| {
        TaskError::Failed(format!(
            "exec: {:?}: executable file not found in $PATH",
            program.display().to_string()
        ))
    })
}

fn find_in(program: &OsStr, path: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(program))
        .find(|candidate| executable(candidate).unwrap_or(false))
}

fn executable(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = path.metadata()?;
    Ok(metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::{Name, find_in};

    #[test]
    fn names_are_apart() {
        let keys: std::collections::HashSet<_> = [
            Name::Task("a"),
            Name::Exec("a", "a"),
            Name::Tool("a", 1),
            Name::Tool("a", 2),
            Name::Logger("a", 1),
        ]
        .map(|name| name.key().unwrap())
        .into();
        assert_eq!(keys.len(), 5);
        let long = "x".repeat(76);
        let key = Name::Exec("abc", "abcd").key().unwrap();
        assert_eq!(Name::exec_of(&key), Some(("abc", "abcd")));
        assert_eq!(Name::exec_of(&Name::Task("a").key().unwrap()), None);
        Name::Exec(&long, &long).key().unwrap();
        Name::Logger(&long, u64::MAX).key().unwrap();
    }

    #[test]
    fn programs_are_found_in_absolute_folders() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tool"), "").unwrap();
        let path = dir.path().as_os_str().to_owned();
        assert_eq!(find_in("tool".as_ref(), &path), None, "not executable");
        assert!(find_in("sh".as_ref(), "rel:/bin:/usr/bin".as_ref()).is_some());
    }
}
