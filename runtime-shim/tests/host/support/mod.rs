//! A host of its own for a test: private containerd, private namespaces, the real service, and a
//! client that plays the virtual node.
//!
//! Needs root, containerd, runc, busybox-static and erofs-utils. Mount and network namespaces are
//! the test's own, so nothing of it stays in the machine's.

pub(crate) mod client;
mod image;
mod registry;

use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sandman_certs::{FleetAuthority, Member, Role};
use sandman_protocol::transport::{FleetTls, connect};

pub(crate) use self::client::Node;

/// cgroups of the QoS classes below the host's, itself first.
const CLASSES: [&str; 3] = ["", "burstable", "besteffort"];
const FLEET: &str = "test";
const LISTEN: &str = "127.0.0.1:7443";
/// Where the service under test serves metrics.
pub(crate) const METRICS: &str = "127.0.0.1:9440";

/// The host under test.
pub(crate) struct TestHost {
    dir: tempfile::TempDir,
    containerd: Option<Child>,
    shim: Option<Child>,
    /// `host:port` of the registry that images are pulled from.
    pub(crate) registry: SocketAddr,
    cgroup: String,
}

/// Runs a test on a host of its own.
pub(crate) fn on_a_host<F: Future<Output = ()>>(test: impl FnOnce(TestHost) -> F) {
    assert!(nix::unistd::geteuid().is_root(), "this test needs root");
    // This thread's, and of every thread and process that it makes.
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
    run("ip", &["link", "set", "lo", "up"]);
    // Where a host's own connections to its pods come from.
    run("ip", &["address", "add", "10.99.0.1/32", "dev", "lo"]);
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let host = TestHost::start().await;
        test(host).await;
    });
}

fn run(program: &str, args: &[&str]) {
    let status = Command::new(program).args(args).status().unwrap();
    assert!(status.success(), "{program} {args:?}");
}

fn target_dir() -> PathBuf {
    let binary = Path::new(env!("CARGO_BIN_EXE_sandman-runtime-shim"));
    binary.parent().and_then(Path::parent).unwrap().to_owned()
}

impl TestHost {
    async fn start() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("sandman-shim-")
            .tempdir()
            .unwrap();
        let registry = registry::serve(image::TestImage::busybox()).await;
        let name = dir
            .path()
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let mut host = Self {
            containerd: None,
            shim: None,
            registry,
            cgroup: format!("/{name}"),
            dir,
        };
        host.prepare();
        host.start_containerd();
        host.start_shim();
        host
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn prepare(&self) {
        for name in ["state", "data", "agent", "containerd"] {
            std::fs::create_dir_all(self.path(name)).unwrap();
        }
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(
            Some("tmpfs"),
            &self.path("state"),
            Some("tmpfs"),
            flags,
            None::<&str>,
        )
        .unwrap();

        let agent = target_dir().join("x86_64-unknown-linux-gnu/release/sandman-daemon");
        assert!(
            agent.exists(),
            "build sandman-daemon first: {} is missing",
            agent.display()
        );
        std::fs::copy(&agent, self.path("agent/daemon")).unwrap();
        let image = self.path("daemon.erofs");
        let output = Command::new("mkfs.erofs")
            .arg(&image)
            .arg(self.path("agent"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");

        let fleet = FleetAuthority::create(&self.path("fleet"), FLEET, 30).unwrap();
        let member = |role, name: &str| Member {
            role,
            name: name.into(),
            dns: vec![],
            ips: vec!["127.0.0.1".parse().unwrap()],
        };
        fleet
            .issue(&member(Role::Host, "host-0"), 30, &self.path("host-tls"))
            .unwrap();
        fleet
            .issue(&member(Role::Vnode, "vnode"), 30, &self.path("vnode-tls"))
            .unwrap();
        std::fs::write(self.path("shim.toml"), self.config()).unwrap();
    }

    fn config(&self) -> String {
        let dir = self.dir.path().display();
        format!(
            r#"
host_name = "host-0"
fleet = "{FLEET}"
fleet_tls = "{dir}/host-tls"
listen = "{LISTEN}"
host_ip = "127.0.0.1"
pod_cidr = "10.64.0.0/24"
containerd_socket = "{dir}/containerd/containerd.sock"
state_dir = "{dir}/state"
data_dir = "{dir}/data"
daemon_image = "{dir}/daemon.erofs"
cgroup_parent = "{cgroup}"
metrics_listen = "{METRICS}"
default_runtime = "sandman"
log_max_bytes = 65536
[runtimes.sandman]
type = "io.containerd.runc.v2"
[registries."{registry}"]
plain_http = true
# A machine that builds is often fuller than a host may be.
[eviction]
disk_available_percent = 1
image_available_percent = 1
"#,
            cgroup = self.cgroup,
            registry = self.registry,
        )
    }

    /// Starts containerd.
    pub(crate) fn start_containerd(&mut self) {
        self.start_containerd_with(None);
    }

    /// Starts containerd with this limit of open files.
    pub(crate) fn start_containerd_with(&mut self, nofile: Option<u32>) {
        let dir = self.path("containerd");
        let text = format!(
            r#"
version = 2
root = "{0}/root"
state = "{0}/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri",
  "io.containerd.monitor.v1.cgroups",
  "io.containerd.monitor.task.v1.cgroups",
]
[grpc]
address = "{0}/containerd.sock"
[plugins."io.containerd.gc.v1.scheduler"]
mutation_threshold = 0
"#,
            dir.display()
        );
        std::fs::write(dir.join("config.toml"), text).unwrap();
        // A limit is set by a shell, which then becomes containerd.
        let limit = nofile.map_or_else(String::new, |nofile| format!("ulimit -n {nofile} && "));
        let child = Command::new("sh")
            .args(["-c", &format!("{limit}exec containerd \"$@\""), "sh"])
            .arg("--config")
            .arg(dir.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(self.log("containerd.log"))
            .stderr(self.log("containerd.log"))
            .spawn()
            .unwrap();
        self.containerd = Some(child);
    }

    /// Waits until containerd takes connections; it has no event for that.
    pub(crate) fn wait_for_containerd(&self) {
        let socket = self.path("containerd/containerd.sock");
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            assert!(Instant::now() < deadline, "{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts the service under test.
    pub(crate) fn start_shim(&mut self) {
        let child = Command::new(env!("CARGO_BIN_EXE_sandman-runtime-shim"))
            .arg("--config")
            .arg(self.path("shim.toml"))
            .env("RUST_LOG", "info,sandman_runtime_shim=debug")
            .stdin(Stdio::null())
            .stderr(self.log("shim.log"))
            .spawn()
            .unwrap();
        self.shim = Some(child);
    }

    fn log(&self, name: &str) -> Stdio {
        let path = self.path(name);
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .unwrap()
            .into()
    }

    /// Kills the service as a crash would.
    pub(crate) fn kill_shim(&mut self) {
        end(self.shim.take());
    }

    /// Kills containerd as a crash would.
    pub(crate) fn kill_containerd(&mut self) {
        end(self.containerd.take());
    }

    /// A virtual node that is connected to the service, once that serves.
    pub(crate) async fn node(&self) -> Node {
        let tls = FleetTls::load(&self.path("vnode-tls"), FLEET).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match connect(&tls, "host-0", LISTEN.parse().unwrap()).await {
                Ok(channel) => return Node::new(channel, self.registry).await,
                Err(error) if Instant::now() > deadline => panic!("{error}: {}", self.logs()),
                // Refused until the service listens; there is nothing to watch before that.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// What the processes have logged.
    pub(crate) fn logs(&self) -> String {
        ["containerd.log", "shim.log"]
            .map(|name| std::fs::read_to_string(self.path(name)).unwrap_or_default())
            .join("\n--- service ---\n")
    }

    /// Processes of this host's sandboxes: shims and what they run.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let needle = self.dir.path().to_string_lossy().into_owned();
        let own = [self.shim.as_ref(), self.containerd.as_ref()];
        let own: Vec<u32> = own.into_iter().flatten().map(Child::id).collect();
        processes(&needle)
            .into_iter()
            .filter(|(pid, _)| !own.contains(&pid.unsigned_abs()))
            .map(|(_, command)| command)
            .collect()
    }

    /// cgroups of pods that exist below this host's parent, in each class.
    pub(crate) fn cgroups(&self) -> Vec<PathBuf> {
        let hierarchies = std::fs::read_dir("/sys/fs/cgroup").unwrap();
        let parents = hierarchies
            .flatten()
            .map(|entry| entry.path().join(&self.cgroup[1..]));
        let classes = parents.flat_map(|parent| CLASSES.map(|class| parent.join(class)));
        let groups = classes.filter_map(|class| std::fs::read_dir(class).ok());
        groups
            .flat_map(|groups| groups.flatten().map(|group| group.path()))
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("pod") && path.is_dir()
            })
            .collect()
    }
}

fn processes(needle: &str) -> Vec<(i32, String)> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        command.contains(needle).then_some((pid, command))
    })
    .collect()
}

/// Takes away what is mounted below a folder in this thread's namespace.
fn unmount_below(dir: &Path) {
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let mut below: Vec<&str> = points
        .filter(|point| Path::new(point).starts_with(dir))
        .collect();
    below.reverse();
    for point in below {
        let _ = umount2(point, MntFlags::MNT_DETACH);
    }
}

fn end(child: Option<Child>) {
    if let Some(mut child) = child {
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = self.logs();
            let tail = logs
                .char_indices()
                .rev()
                .nth(20_000)
                .map_or(0, |(index, _)| index);
            eprintln!("{}", &logs[tail..]);
        }
        self.kill_shim();
        self.kill_containerd();
        // Shims of containers that a failed test left: their children die with their PID 1.
        for (pid, _) in processes(&self.dir.path().to_string_lossy()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        // They end at their own pace, and hold their folders until then.
        let deadline = Instant::now() + Duration::from_secs(5);
        while !processes(&self.dir.path().to_string_lossy()).is_empty() && Instant::now() < deadline
        {
            std::thread::yield_now();
        }
        for pod in self.cgroups() {
            if let Ok(pids) = std::fs::read_to_string(pod.join("cgroup.procs")) {
                for pid in pids.lines().filter_map(|line| line.parse().ok()) {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
            }
            let _ = std::fs::remove_dir(pod);
        }
        unmount_below(self.dir.path());
        for hierarchy in std::fs::read_dir("/sys/fs/cgroup")
            .into_iter()
            .flatten()
            .flatten()
        {
            let parent = hierarchy.path().join(&self.cgroup[1..]);
            for class in CLASSES.into_iter().rev() {
                let _ = std::fs::remove_dir(parent.join(class));
            }
        }
    }
}
