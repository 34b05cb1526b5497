//! A dedicated host: its own containerd, in its own namespace and folders, and runtime-shim beside
//! it. Everything that a real host has but the kernel.

use std::path::{Path, PathBuf};

use super::vnode::FLEET;
use super::{Component, Plan, Probe, REGISTRY_PORT, toml_path, toml_string};
use crate::components::registry::PRIVATE_PORT;
use crate::net::{Member, endpoint};

/// What pods may reach of the hosts: all of it that tests ask for, and no folder besides.
pub(super) const HOST_ACCESS: &str = r#"[allow]
host_network = true
host_pid = true
host_ipc = true
privileged = true
host_ports = true
host_path = ["/tmp", "/etc/hosts"]
"#;
/// Port of the host API.
pub(crate) const HOST_API_PORT: u16 = 7443;
/// Metrics of runtime-shim, on loopback of the host's namespace.
const METRICS_PORT: u16 = 9440;
/// Sandboxes a host: containerd holds three descriptors of each, and may have as few as 20,000. Its
/// pod network has room for three times as many.
pub(super) const PODS: u32 = 5000;
/// Part of the memory that hosts offer; the control plane runs beside them.
const MEMORY_PERCENT: u64 = 80;

/// Where the tools of a host are: runc, tar and the like.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Plugins of containerd that a host does not use. The CRI one would bring a second runtime API,
/// and the monitor (by its names in 1.x and 2.x) reads each container's cgroup for metrics that
/// nobody scrapes; the others write outside of our folders or probe for what is not there.
const DISABLED_PLUGINS: &str = r#"[
  "io.containerd.grpc.v1.cri",
  "io.containerd.monitor.v1.cgroups",
  "io.containerd.monitor.task.v1.cgroups",
  "io.containerd.internal.v1.opt",
  "io.containerd.nri.v1.nri",
  "io.containerd.internal.v1.tracing",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]"#;

/// The default collects after each hundred changes, under a lock and in time that grows with the
/// number of containers. So: only what was deleted is a reason, at most 2 % of the time.
const GARBAGE_COLLECTION: &str = r#"[plugins."io.containerd.gc.v1.scheduler"]
mutation_threshold = 0
pause_threshold = 0.02
"#;

impl Plan<'_> {
    pub(super) fn containerd(&self, host: Member) -> Component {
        let name = component_name("containerd", host);
        let root = self.layout.data_dir(&host.to_string()).join("containerd");
        let state = self.layout.host_run_dir(host).join("containerd");
        let socket = self.layout.containerd_socket(host);
        let ttrpc = socket.with_extension("sock.ttrpc");
        let content = format!(
            "version = 2\n\
             root = {}\n\
             state = {}\n\
             disabled_plugins = {DISABLED_PLUGINS}\n\
             [grpc]\n\
             address = {}\n\
             [ttrpc]\n\
             address = {}\n\
             {GARBAGE_COLLECTION}",
            toml_path(&root),
            toml_path(&state),
            toml_path(&socket),
            toml_path(&ttrpc),
        );
        let config = self.config(&format!("{name}.toml"));
        let programs = self.settings.artifacts.containerd_dir();
        let argv = vec![
            programs.join("containerd").display().to_string(),
            "--config".to_owned(),
            config.display().to_string(),
        ];
        let mut component = Component::new(name, Some(host), argv);
        component.files.push((config, content));
        // It finds its shims there: ours, then its own.
        component.env.push((
            "PATH".to_owned(),
            format!(
                "{}:{}:{DEFAULT_PATH}",
                self.layout.bin_dir().display(),
                programs.display()
            ),
        ));
        // Our shim gets it from containerd, and keeps its own state there.
        let shims = self.layout.shim_dir(host);
        component.env.push((
            "SANDMAN_SHIM_STATE_DIR".to_owned(),
            shims.display().to_string(),
        ));
        component.dirs.extend([root, state, shims]);
        component.ready = Probe::Unix(socket);
        component
    }

    /// Outlives runtime-shim, and asks before an incomplete layer is read.
    pub(super) fn layer_keeper(&self, host: Member) -> anyhow::Result<Component> {
        let root = self.layers_dir(host);
        let socket = self.keeper_socket(host);
        let argv = vec![
            self.settings
                .artifacts
                .binary("sandman-layer-keeper")?
                .display()
                .to_string(),
            "--root".to_owned(),
            root.display().to_string(),
            "--socket".to_owned(),
            socket.display().to_string(),
        ];
        let mut component = Component::new(component_name("keeper", host), Some(host), argv);
        component.dirs.push(root);
        component.dirs.extend(socket.parent().map(Path::to_owned));
        component.ready = Probe::Unix(socket);
        Ok(component)
    }

    fn layers_dir(&self, host: Member) -> PathBuf {
        self.layout.data_dir(&host.to_string()).join("layers")
    }

    fn keeper_socket(&self, host: Member) -> PathBuf {
        self.layout.host_run_dir(host).join("keeper/socket")
    }

    pub(super) fn runtime_shim(&self, host: Member) -> anyhow::Result<Component> {
        let name = component_name("runtime-shim", host);
        let api = endpoint(host, HOST_API_PORT);
        let state = self.layout.host_run_dir(host).join("shim");
        let data = self.layout.data_dir(&host.to_string()).join("shim");
        let tls = self.layout.fleet_dir().join(host.to_string());
        let daemon = self
            .settings
            .artifacts
            .daemon_image
            .clone()
            .unwrap_or_default();
        let others: Vec<String> = Member::hosts(self.settings.hosts)
            .filter(|&other| other != host)
            .filter_map(Member::pod_cidr)
            .map(toml_string)
            .collect();
        let registry = endpoint(Member::Registry, REGISTRY_PORT);
        let private = endpoint(Member::Registry, PRIVATE_PORT);
        let content = format!(
            r#"host_name = {host_name}
fleet = {fleet}
fleet_tls = {tls}
listen = "{api}"
host_ip = "{ip}"
pod_cidr = "{cidr}"
cluster_cidrs = [{others}]
containerd_socket = {socket}
state_dir = {state}
data_dir = {data}
daemon_image = {daemon}
cgroup_parent = {cgroup}
metrics_listen = "127.0.0.1:{METRICS_PORT}"
default_runtime = {runtime}

[layers]
{keys}
folder = {layers}
keeper_socket = {keeper}

{HOST_ACCESS}
[eviction]
disk_available_percent = 1
disk_inodes_free_percent = 1
image_available_percent = 1
image_inodes_free_percent = 1
pressure_transition_seconds = 10

[capacity]
memory_bytes = {memory}
pods = {PODS}

[runtimes.sandman]
type = "io.containerd.sandman.v1"

[runtimes.runc]
type = "io.containerd.runc.v2"

[registries."{registry}"]
plain_http = true

[registries."{private}"]
plain_http = true
"#,
            keys = self.settings.layers.keys(),
            layers = toml_path(&self.layers_dir(host)),
            keeper = toml_path(&self.keeper_socket(host)),
            host_name = toml_string(host),
            fleet = toml_string(FLEET),
            tls = toml_path(&tls),
            ip = api.ip(),
            cidr = host.pod_cidr().unwrap_or_default(),
            others = others.join(", "),
            socket = toml_path(&self.layout.containerd_socket(host)),
            state = toml_path(&state),
            data = toml_path(&data),
            daemon = toml_path(&daemon),
            cgroup = toml_string(format!("{}/{host}", self.layout.cgroup_parent())),
            memory = memory_share(self.settings.hosts),
            runtime = toml_string(self.settings.runtime.handler()),
        );
        let config = self.config(&format!("{name}.toml"));
        let argv = vec![
            self.settings
                .artifacts
                .binary("sandman-runtime-shim")?
                .display()
                .to_string(),
            "--config".to_owned(),
            config.display().to_string(),
        ];
        let mut component = Component::new(name, Some(host), argv);
        component.files.push((config, content));
        component.dirs.extend([state, data]);
        component.inputs.extend([daemon, tls.join("tls.crt")]);
        component.ready = Probe::Tcp(api.into());
        Ok(component)
    }
}

/// `containerd-0` is what runs on `host-0`.
fn component_name(what: &str, host: Member) -> String {
    format!("{what}-{}", host.to_string().trim_start_matches("host-"))
}

/// Memory that one host offers. Hosts share one machine: together they offer no more than it has.
pub(super) fn memory_share(hosts: u8) -> u64 {
    let total = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("MemTotal:"))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        })
        .map_or(4 << 30, |kib| kib << 10);
    // Whole MiB read well in `kubectl describe node`.
    let share = total / 100 * MEMORY_PERCENT / u64::from(hosts.max(1));
    share & !((1 << 20) - 1)
}
