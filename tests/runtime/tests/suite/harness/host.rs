//! A containerd of its own, in a mount namespace of its own.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use containerd_client::services::v1::events_client::EventsClient;
use containerd_client::services::v1::{PublishRequest, SubscribeRequest};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tokio::sync::Notify;
use tonic::transport::Channel;

/// containerd's namespace of the tests.
pub(crate) const NAMESPACE: &str = "case";

/// Events by container, in order.
#[derive(Default)]
pub(crate) struct Events {
    pub(crate) by_id: Mutex<HashMap<String, Vec<String>>>,
    pub(crate) news: Notify,
}

/// See the module.
pub(crate) struct Host {
    dir: tempfile::TempDir,
    containerd: Child,
    pub(crate) channel: Channel,
    pub(crate) events: Arc<Events>,
}

/// Gives this thread, and what it starts, mounts of its own.
pub(crate) fn isolate() {
    assert!(nix::unistd::geteuid().is_root(), "these tests need root");
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
    // Shims and runc keep their state here; with it in the tests' own folders nothing meets the
    // machine's, or what a killed run has left.
    for folder in ["/run/sandman-shim", "/run/containerd"] {
        fs::create_dir_all(folder).unwrap();
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("tmpfs"), folder, Some("tmpfs"), flags, None::<&str>).unwrap();
    }
}

/// Where cargo puts binaries.
fn binaries() -> PathBuf {
    let mut dir = std::env::current_exe().unwrap();
    dir.pop();
    dir.pop();
    assert!(
        dir.join("containerd-shim-sandman-v1").exists(),
        "build sandman-containerd-shim first"
    );
    dir
}

impl Host {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("sandman-case-")
            .tempdir()
            .unwrap();
        let flags = MsFlags::MS_NOSUID;
        mount(
            Some("tmpfs"),
            dir.path(),
            Some("tmpfs"),
            flags,
            None::<&str>,
        )
        .unwrap();
        make_image(&dir.path().join("image"));
        let path = |name: &str| dir.path().join(name).display().to_string();
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.internal.v1.opt\"]\n\
             [grpc]\naddress = {:?}\n[ttrpc]\naddress = {:?}\n",
            path("root"),
            path("state"),
            path("c.sock"),
            path("c.sock.ttrpc"),
        );
        fs::write(dir.path().join("config.toml"), config).unwrap();
        let log = fs::File::create(dir.path().join("containerd.log")).unwrap();
        let search = format!(
            "{}:{}",
            binaries().display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let containerd = Command::new("containerd")
            .args(["--config", &path("config.toml")])
            .env("PATH", search)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let channel = connect(dir.path().join("c.sock")).await;
        let events = follow(channel.clone()).await;
        Self {
            dir,
            containerd,
            channel,
            events,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The root folder that containers are layered on.
    pub(crate) fn image(&self) -> PathBuf {
        self.path("image")
    }

    /// A folder of cgroups for this host.
    pub(crate) fn cgroup(&self) -> String {
        format!(
            "/{}",
            self.dir.path().file_name().unwrap().to_string_lossy()
        )
    }

    /// What cases left behind: mounts of root folders, records of tasks.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let mut left: Vec<String> = mounts
            .lines()
            .filter(|line| line.contains("/state/") && line.contains("/rootfs "))
            .map(|line| format!("mounted still: {line}"))
            .collect();
        for group in fs::read_dir("/run/sandman-shim").unwrap() {
            if let Ok(tasks) = fs::read_dir(group.unwrap().path().join("tasks")) {
                left.extend(tasks.map(|t| format!("a record is left: {:?}", t.unwrap().path())));
            }
        }
        left
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() || std::env::var_os("SANDMAN_CASE").is_some() {
            let log = fs::read_to_string(self.path("containerd.log")).unwrap_or_default();
            eprintln!("{log}");
            for group in fs::read_dir("/run/sandman-shim")
                .into_iter()
                .flatten()
                .flatten()
            {
                let log = fs::read_to_string(group.path().join("log")).unwrap_or_default();
                eprintln!("{}:\n{log}", group.path().display());
            }
        }
        drop(self.containerd.kill());
        drop(self.containerd.wait());
        let _left = nix::mount::umount2(self.dir.path(), nix::mount::MntFlags::MNT_DETACH);
        for controller in fs::read_dir("/sys/fs/cgroup")
            .into_iter()
            .flatten()
            .flatten()
        {
            drop(fs::remove_dir(controller.path().join(&self.cgroup()[1..])));
        }
    }
}

async fn connect(socket: PathBuf) -> Channel {
    let begun = Instant::now();
    loop {
        match containerd_client::connect(&socket).await {
            Ok(channel) => return channel,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(30), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn follow(channel: Channel) -> Arc<Events> {
    let events = Arc::new(Events::default());
    let sink = Arc::clone(&events);
    let mut client = EventsClient::new(channel.clone());
    tokio::spawn(async move {
        let request = SubscribeRequest {
            filters: vec!["topic~=\"^/tasks/\"".into()],
        };
        // Answers only with the first event.
        let mut stream = client.subscribe(request).await.unwrap().into_inner();
        while let Ok(Some(envelope)) = stream.message().await {
            let value = envelope.event.map(|event| event.value).unwrap_or_default();
            // Field 1 of every task event is the container's id.
            let id = first_string(&value);
            let mut by_id = sink.by_id.lock().unwrap();
            by_id.entry(id).or_default().push(envelope.topic);
            drop(by_id);
            sink.news.notify_waiters();
        }
    });
    // Until an event of our own comes back, others could be missed.
    let begun = Instant::now();
    let mut client = EventsClient::new(channel);
    while events.by_id.lock().unwrap().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "no events");
        let probe = PublishRequest {
            topic: "/tasks/probe".into(),
            event: Some(prost_types::Any {
                type_url: "containerd.events.TaskPaused".into(),
                value: b"\x0a\x05probe".to_vec(),
            }),
        };
        let mut request = tonic::Request::new(probe);
        let metadata = request.metadata_mut();
        metadata.insert("containerd-namespace", NAMESPACE.parse().unwrap());
        client.publish(request).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    events
}

/// Field 1 of a message, if it is a short string and comes first.
fn first_string(message: &[u8]) -> String {
    match message {
        [0x0a, length, rest @ ..] => {
            let end = usize::from(*length).min(rest.len());
            String::from_utf8_lossy(&rest[..end]).into_owned()
        }
        _ => String::new(),
    }
}

/// busybox and what a container expects around it.
fn make_image(root: &Path) {
    for dir in [
        "bin", "dev", "proc", "sys", "tmp", "etc", "root", "home/app", "mnt", "masked",
    ] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    let list = Command::new("/bin/busybox").arg("--list").output().unwrap();
    for applet in String::from_utf8(list.stdout).unwrap().lines() {
        if applet != "busybox" {
            symlink("busybox", root.join("bin").join(applet)).unwrap();
        }
    }
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n",
    )
    .unwrap();
    fs::write(
        root.join("etc/group"),
        "root:x:0:\napp:x:1000:\nextra:x:2000:app\n",
    )
    .unwrap();
    fs::write(root.join("masked/secret"), "secret\n").unwrap();
    fs::write(root.join("etc/plain"), "plain\n").unwrap();
}
