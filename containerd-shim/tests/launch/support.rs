//! A holder of its own for a test, a root file system of busybox, and specs to change.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sandman_containerd_shim::holder::SOCKET;
use sandman_containerd_shim::holder::client::{Client, Exited};
use sandman_containerd_shim::holder::protocol::Key;
use sandman_containerd_shim::launch::{
    CreateError, Created, Launcher, PrepareError, Request, Rootfs, Streams,
};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

/// Generous: the machine may be busy. Nothing is measured by it.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A holder, a client of it, and what is needed to make sandboxes.
pub(crate) struct Host {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) holder: Child,
    pub(crate) client: Client,
    pub(crate) exits: UnboundedReceiver<Exited>,
    pub(crate) launcher: Launcher,
    pub(crate) cgroup: PathBuf,
}

/// How a program ended, and what it wrote.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ran {
    pub(crate) code: u32,
    pub(crate) output: String,
}

pub(crate) async fn connect(dir: &Path) -> (Client, UnboundedReceiver<Exited>) {
    let deadline = tokio::time::Instant::now() + DEADLINE;
    loop {
        match Client::connect(&dir.join("h").join(SOCKET)).await {
            Ok(connected) => return connected,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn start_holder(dir: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_sandman-holder"))
        .arg("--foreground")
        .arg(dir.join("h"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

impl Host {
    pub(crate) async fn start() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test needs root");
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        make_rootfs(&dir.path().join("rootfs"));
        let holder = start_holder(dir.path());
        let (client, exits) = connect(dir.path()).await;
        let name = dir
            .path()
            .file_name()
            .unwrap()
            .to_string_lossy()
            .replace('.', "");
        let cgroup = PathBuf::from(format!("/sandman-test-{name}"));
        let launcher = Launcher::new().unwrap();
        Self {
            dir,
            holder,
            client,
            exits,
            launcher,
            cgroup,
        }
    }

    pub(crate) fn rootfs(&self) -> PathBuf {
        self.dir.path().join("rootfs")
    }

    /// A spec as containerd makes them, that runs `script`.
    pub(crate) fn spec(&self, script: &str) -> Value {
        let mount = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
        json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["sh", "-c", script],
                "env": ["PATH=/bin", "HOME=/"],
                "cwd": "/",
            },
            "root": {"path": "rootfs"},
            "mounts": [
                mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
                mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
                mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
                mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=64k"]),
                mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
                mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
                mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
            ],
            "linux": {
                "resources": {"devices": [{"allow": false, "access": "rwm"}]},
                "namespaces": [
                    {"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "ipc"},
                    {"type": "network"},
                ],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/acpi", "/sys/firmware", "/proc/scsi", "/nowhere"],
                "readonlyPaths": ["/proc/bus", "/proc/sys", "/nowhere"],
            },
        })
    }

    pub(crate) fn prepare(
        &self,
        spec: Value,
        streams: Streams,
    ) -> Result<sandman_containerd_shim::launch::Prepared, PrepareError> {
        let spec = serde_json::from_value(spec).unwrap();
        let rootfs = self.rootfs();
        self.launcher.prepare(Request {
            spec: &spec,
            rootfs: Rootfs::Path(&rootfs),
            streams,
        })
    }

    pub(crate) async fn create(
        &self,
        key: &Key,
        spec: Value,
        out: &File,
    ) -> Result<Created, CreateError> {
        let streams = Streams::Fds([null(), copy(out), copy(out)]);
        let prepared = self.prepare(spec, streams).unwrap();
        within(prepared.create(&self.client, key, &[])).await
    }

    pub(crate) async fn exit_of(&mut self, key: &Key) -> Exited {
        loop {
            let exited = within(self.exits.recv())
                .await
                .expect("the holder is there");
            if exited.key == *key {
                return exited;
            }
        }
    }

    /// Runs a spec to its end and forgets it.
    pub(crate) async fn run(&mut self, spec: Value) -> Result<Ran, String> {
        let key = key("run");
        let mut out = tempfile::tempfile_in(self.dir.path()).unwrap();
        let result = match self.create(&key, spec, &out).await {
            Ok(created) => {
                let started = within(created.gate.start()).await;
                let exited = self.exit_of(&key).await;
                if let Some(cgroup) = &created.cgroup {
                    cgroup.remove().unwrap();
                }
                started.map(|()| exited.exit.code)
            }
            Err(error) => {
                self.exit_of(&key).await;
                Err(error)
            }
        };
        within(self.client.forget(&key)).await.unwrap();
        let code = result.map_err(|error| error.to_string())?;
        let mut output = String::new();
        use std::io::Seek;
        out.rewind().unwrap();
        out.read_to_string(&mut output).unwrap();
        Ok(Ran { code, output })
    }

    /// Runs a shell script with the usual spec; it must end with 0.
    pub(crate) async fn script(&mut self, script: &str) -> String {
        self.output(self.spec(script)).await
    }

    pub(crate) async fn output(&mut self, spec: Value) -> String {
        let ran = self.run(spec).await.unwrap();
        assert_eq!(ran.code, 0, "{}", ran.output);
        ran.output
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Its sandboxes and the zygote end with it.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(DEADLINE, future)
        .await
        .expect("in time")
}

pub(crate) fn null() -> OwnedFd {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .unwrap()
        .into()
}

pub(crate) fn copy(file: &File) -> OwnedFd {
    file.as_fd().try_clone_to_owned().unwrap()
}

fn make_rootfs(root: &Path) {
    for folder in ["bin", "etc", "tmp", "proc", "dev", "sys"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    let applets = Command::new("/bin/busybox").arg("--list").output().unwrap();
    for applet in String::from_utf8(applets.stdout).unwrap().lines() {
        if applet != "busybox" {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
        }
    }
    // What an image may contain to lead a runtime astray.
    std::os::unix::fs::symlink("/proc/self/fd/5", root.join("magic")).unwrap();
    std::os::unix::fs::symlink("../../../../etc", root.join("up")).unwrap();
    fs::write(root.join("etc/script"), "#!/bin/sh\necho script $0 $1\n").unwrap();
    fs::write(root.join("etc/plain"), "plain\n").unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(root.join("etc/script"), fs::Permissions::from_mode(0o755)).unwrap();
}

/// Whether a process exists and is no zombie.
pub(crate) fn is_alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .starts_with(" Z")
    })
}

/// Waits for the end of processes that are not our children.
pub(crate) async fn gone(pids: &[i32]) {
    for pid in pids {
        let deadline = tokio::time::Instant::now() + DEADLINE;
        while is_alive(*pid) {
            assert!(tokio::time::Instant::now() < deadline, "{pid} still runs");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Children of a process.
pub(crate) fn children(pid: u32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

/// The zygote among a holder's children.
pub(crate) fn zygote(holder: u32) -> i32 {
    let is_zygote = |pid: &i32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"zygote\0"))
    };
    children(holder)
        .into_iter()
        .find(is_zygote)
        .expect("a zygote")
}
