//! The part of the OCI runtime spec that our launcher makes; pure.
//!
//! A field that is not read here would be ignored, and a sandbox would run with less confinement
//! than was asked for. So each field of the spec is either carried into [`Subset`] or, where it
//! says anything, puts the spec [`Outside`]. runc is also who explains a spec that makes no sense.

use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::{
    Capability, Linux, LinuxDeviceCgroup, LinuxNamespaceType, LinuxResources, LinuxSeccomp, Mount,
    PosixRlimitType, Process, Spec,
};

use super::capability;
use super::cgroup::MEMORY_ANNOTATION;
use super::options::{self, Options};
use super::seccomp;
use crate::sys::mount::Attributes;
use crate::zygote::plan;

/// Where the agent is found inside a sandbox that has one.
pub const AGENT: &str = "/dev/sandman/daemon";

/// A spec that goes to runc.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is outside of what the launcher makes")]
pub struct Outside {
    /// The first field that is, by its name in the spec.
    pub field: String,
}

impl Outside {
    pub(super) fn new(field: impl Into<String>) -> Self {
        Self {
            field: field.into(),
        }
    }
}

type Inside<T> = Result<T, Outside>;

/// A spec that the launcher makes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Subset {
    /// Namespaces.
    pub namespaces: Namespaces,
    /// Folder of the bundle that holds the root, if no mounts are given for it.
    pub root_path: PathBuf,
    /// The root is read-only.
    pub root_readonly: bool,
    /// In their order.
    pub mounts: Vec<MountPlan>,
    /// Paths to hide.
    pub masked: Vec<Vec<u8>>,
    /// Paths to make read-only.
    pub readonly_paths: Vec<Vec<u8>>,
    /// Host name.
    pub hostname: Option<String>,
    /// NIS domain name.
    pub domainname: Option<String>,
    /// Files below `/proc/sys`, and values.
    pub sysctls: Vec<(String, String)>,
    /// The process, but for its streams.
    pub process: plan::Process,
    /// It has a terminal.
    pub terminal: bool,
    /// For the OOM killer.
    pub oom_score_adj: Option<i32>,
    /// cgroup and limits.
    pub cgroup: Option<PathBuf>,
    /// The memory cgroup that it shares with others.
    pub memory_cgroup: Option<PathBuf>,
    /// As the spec has them; only what [`check_resources`] lets through.
    pub resources: LinuxResources,
    /// Every device may be used; otherwise none but the default ones.
    pub all_devices: bool,
    /// PID 1 is our agent, which gets a control socket.
    pub agent: bool,
}

/// Namespaces of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// `CLONE_NEW*` of those to make, but for the cgroup's.
    pub new: u64,
    /// A new cgroup namespace.
    pub cgroup: bool,
    /// Those to join, by path.
    pub join: Vec<(PathBuf, i32)>,
    /// PID namespace to join.
    pub pid: Option<PathBuf>,
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPlan {
    /// Absolute, without `.` and `..`.
    pub target: Vec<u8>,
    /// What.
    pub what: What,
    /// Options.
    pub options: Options,
}

/// What is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A host path.
    Bind {
        /// Which.
        source: PathBuf,
        /// With the mounts below it.
        recursive: bool,
    },
    /// The devices: a tmpfs with the default nodes.
    Dev,
    /// A tmpfs.
    Tmpfs,
    /// `proc`, `sysfs`, `mqueue` or `devpts`.
    Kernel(&'static str),
    /// The container's cgroups.
    Cgroup,
}

fn filled<T>(list: Option<&Vec<T>>) -> bool {
    list.is_some_and(|list| !list.is_empty())
}

fn outside_if(outside: bool, field: &str) -> Inside<()> {
    if outside {
        Err(Outside::new(field))
    } else {
        Ok(())
    }
}

/// Reads a spec.
///
/// # Errors
/// [`Outside`], with the first field that the launcher does not make.
pub fn read(spec: &Spec) -> Inside<Subset> {
    let process = spec
        .process()
        .as_ref()
        .ok_or_else(|| Outside::new("process"))?;
    let root = spec.root().as_ref().ok_or_else(|| Outside::new("root"))?;
    let linux = spec.linux().as_ref().ok_or_else(|| Outside::new("linux"))?;
    if let Some(hooks) = spec.hooks() {
        let any = filled(hooks.create_runtime().as_ref())
            || filled(hooks.create_container().as_ref())
            || filled(hooks.start_container().as_ref())
            || filled(hooks.poststart().as_ref())
            || filled(hooks.poststop().as_ref());
        let value = serde_json::to_value(hooks).unwrap_or_default();
        let prestart = value.get("prestart").and_then(|list| list.as_array());
        outside_if(
            any || prestart.is_some_and(|list| !list.is_empty()),
            "hooks",
        )?;
    }
    outside_if(spec.vm().is_some(), "vm")?;
    check_linux(linux)?;

    let namespaces = namespaces(linux)?;
    let makes = |kind: i32| namespaces.new & u64::from(kind.cast_unsigned()) != 0;
    let joins = |kind: i32| namespaces.join.iter().any(|(_, joined)| *joined == kind);
    let has = |kind: i32| makes(kind) || joins(kind);
    let named = spec.hostname().is_some() || spec.domainname().is_some();
    outside_if(named && !has(libc::CLONE_NEWUTS), "hostname")?;

    let terminal = process.terminal().unwrap_or_default();
    let (process_plan, oom_score_adj) = read_process(process, linux.seccomp().as_ref())?;
    let (all_devices, resources) = check_resources(linux)?;
    let mounts = mounts(spec.mounts().as_deref().unwrap_or_default())?;
    check_mounts(&mounts, terminal)?;
    let mounted = |what: &What| mounts.iter().any(|mount| mount.what == *what);

    let sysctls = sysctls(linux, &has)?;
    let needs_proc = !sysctls.is_empty() || spec.domainname().is_some();
    outside_if(
        needs_proc && !mounted(&What::Kernel("proc")),
        "linux.sysctl",
    )?;

    // Kept from devices by nodev mounts. Who may mount anew needs a device cgroup, runc's.
    let admin = process_plan.capabilities.bounding & capability::bit(Capability::SysAdmin) != 0;
    outside_if(
        admin && !all_devices,
        "linux.resources.devices (with CAP_SYS_ADMIN)",
    )?;

    let agent_mounted = mounts.iter().any(|mount| mount.target == AGENT.as_bytes());
    let agent = agent_mounted
        && process_plan
            .args
            .first()
            .is_some_and(|program| program == AGENT.as_bytes());
    let paths = |list: &Option<Vec<String>>| -> Inside<Vec<Vec<u8>>> {
        let clean = |path: &String| absolute(Path::new(path), "linux.maskedPaths");
        list.iter().flatten().map(clean).collect()
    };
    Ok(Subset {
        root_path: root.path().clone(),
        root_readonly: root.readonly().unwrap_or_default(),
        mounts,
        masked: paths(linux.masked_paths())?,
        readonly_paths: paths(linux.readonly_paths())?,
        hostname: spec.hostname().clone().filter(|name| !name.is_empty()),
        domainname: spec.domainname().clone().filter(|name| !name.is_empty()),
        sysctls,
        process: process_plan,
        terminal,
        oom_score_adj,
        cgroup: linux.cgroups_path().clone(),
        memory_cgroup: memory_cgroup(spec, &resources),
        resources,
        all_devices,
        agent,
        namespaces,
    })
}

/// Shared only by those who have no limit of their own to keep.
fn memory_cgroup(spec: &Spec, resources: &LinuxResources) -> Option<PathBuf> {
    let said = |value: Option<i64>| value.is_some_and(|value| value != 0);
    let limited = resources.memory().is_some_and(|memory| {
        said(memory.limit()) || said(memory.swap()) || said(memory.reservation())
    });
    let named = spec.annotations().as_ref()?.get(MEMORY_ANNOTATION)?;
    (!limited).then(|| PathBuf::from(named))
}

fn check_linux(linux: &Linux) -> Inside<()> {
    let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    outside_if(filled(linux.uid_mappings().as_ref()), "linux.uidMappings")?;
    outside_if(filled(linux.gid_mappings().as_ref()), "linux.gidMappings")?;
    outside_if(filled(linux.devices().as_ref()), "linux.devices")?;
    outside_if(said(linux.mount_label()), "linux.mountLabel")?;
    outside_if(linux.intel_rdt().is_some(), "linux.intelRdt")?;
    outside_if(linux.memory_policy().is_some(), "linux.memoryPolicy")?;
    outside_if(linux.personality().is_some(), "linux.personality")?;
    let any = |empty: Option<bool>| empty == Some(false);
    let offsets = linux
        .time_offsets()
        .as_ref()
        .map(std::collections::HashMap::is_empty);
    outside_if(any(offsets), "linux.timeOffsets")?;
    let devices = linux
        .net_devices()
        .as_ref()
        .map(std::collections::HashMap::is_empty);
    outside_if(any(devices), "linux.netDevices")?;
    // A root without a master: nothing propagates into it in any case.
    let propagation = linux.rootfs_propagation().as_deref().unwrap_or_default();
    outside_if(
        !["", "private", "rprivate", "slave", "rslave"].contains(&propagation),
        "linux.rootfsPropagation",
    )
}

fn namespaces(linux: &Linux) -> Inside<Namespaces> {
    let mut out = Namespaces::default();
    let mut seen = Vec::new();
    for namespace in linux.namespaces().iter().flatten() {
        let kind = namespace.typ();
        outside_if(seen.contains(&kind), "linux.namespaces (one twice)")?;
        seen.push(kind);
        let path = namespace
            .path()
            .clone()
            .filter(|path| !path.as_os_str().is_empty());
        let flag = match kind {
            LinuxNamespaceType::Network => libc::CLONE_NEWNET,
            LinuxNamespaceType::Ipc => libc::CLONE_NEWIPC,
            LinuxNamespaceType::Uts => libc::CLONE_NEWUTS,
            LinuxNamespaceType::Pid => libc::CLONE_NEWPID,
            LinuxNamespaceType::Cgroup => libc::CLONE_NEWCGROUP,
            LinuxNamespaceType::Mount if path.is_none() => libc::CLONE_NEWNS,
            LinuxNamespaceType::Mount => return Err(Outside::new("linux.namespaces.mount.path")),
            LinuxNamespaceType::User => return Err(Outside::new("linux.namespaces.user")),
            LinuxNamespaceType::Time => return Err(Outside::new("linux.namespaces.time")),
        };
        match (kind, path) {
            (LinuxNamespaceType::Pid, Some(path)) => out.pid = Some(path),
            (LinuxNamespaceType::Cgroup, None) => out.cgroup = true,
            (_, Some(path)) => out.join.push((path, flag)),
            (_, None) => out.new |= u64::from(flag.cast_unsigned()),
        }
    }
    // Without a namespace of its own, nothing ends a sandbox's processes with the holder.
    outside_if(
        !seen.contains(&LinuxNamespaceType::Pid),
        "linux.namespaces (no pid)",
    )?;
    outside_if(
        !seen.contains(&LinuxNamespaceType::Mount),
        "linux.namespaces (no mount)",
    )?;
    Ok(out)
}

/// Sysctls that belong to a namespace; others are the host's, and runc says so.
fn sysctls(linux: &Linux, has: &dyn Fn(i32) -> bool) -> Inside<Vec<(String, String)>> {
    let ipc = [
        "msgmax",
        "msgmnb",
        "msgmni",
        "sem",
        "shmall",
        "shmmax",
        "shmmni",
        "shm_rmid_forced",
    ];
    let mut out = Vec::new();
    for (key, value) in linux.sysctl().iter().flatten() {
        // Both separators are in use; a name with both keeps its dots (interfaces).
        let path = if key.contains('/') {
            key.clone()
        } else {
            key.replace('.', "/")
        };
        let inside = match path.split_once('/') {
            Some(("net", _)) => has(libc::CLONE_NEWNET),
            Some(("fs", rest)) => rest.starts_with("mqueue/") && has(libc::CLONE_NEWIPC),
            Some(("kernel", name)) => ipc.contains(&name) && has(libc::CLONE_NEWIPC),
            _ => false,
        };
        let plain = Path::new(&path)
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        outside_if(!inside || !plain, &format!("linux.sysctl {key:?}"))?;
        out.push((path, value.clone()));
    }
    out.sort();
    Ok(out)
}

/// A process of a spec or of an exec, but for its streams; and its OOM score.
///
/// # Errors
/// [`Outside`].
pub fn read_process(
    process: &Process,
    profile: Option<&LinuxSeccomp>,
) -> Inside<(plan::Process, Option<i32>)> {
    let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    outside_if(said(process.apparmor_profile()), "process.apparmorProfile")?;
    outside_if(said(process.selinux_label()), "process.selinuxLabel")?;
    outside_if(process.io_priority().is_some(), "process.ioPriority")?;
    outside_if(process.scheduler().is_some(), "process.scheduler")?;
    outside_if(
        process.exec_cpu_affinity().is_some(),
        "process.execCPUAffinity",
    )?;
    let args = process.args().as_deref().unwrap_or_default();
    outside_if(args.is_empty(), "process.args")?;
    let no_nul = |words: &[String]| words.iter().all(|word| !word.contains('\0'));
    outside_if(!no_nul(args), "process.args")?;
    let env = process.env().as_deref().unwrap_or_default();
    outside_if(!no_nul(env), "process.env")?;

    let user = process.user();
    let mut limits = Vec::new();
    for limit in process.rlimits().iter().flatten() {
        limits.push((resource(limit.typ()), limit.soft(), limit.hard()));
    }
    // The kernel sorts them; runc drops what is there twice.
    let mut groups = user.additional_gids().clone().unwrap_or_default();
    groups.sort_unstable();
    groups.dedup();
    let seccomp = profile
        .map(seccomp::compile)
        .transpose()
        .map_err(Outside::new)?;
    let bytes = |words: &[String]| words.iter().map(|word| word.as_bytes().to_vec()).collect();
    let plan = plan::Process {
        args: bytes(args),
        env: bytes(env),
        cwd: absolute(process.cwd(), "process.cwd")?,
        uid: user.uid(),
        gid: user.gid(),
        groups,
        umask: user.umask(),
        capabilities: capability::sets(process.capabilities().as_ref()),
        limits,
        no_new_privileges: process.no_new_privileges().unwrap_or_default(),
        seccomp,
        streams: plan::Streams::default(),
        control: None,
    };
    Ok((plan, process.oom_score_adj()))
}

fn resource(kind: PosixRlimitType) -> u32 {
    match kind {
        PosixRlimitType::RlimitCpu => libc::RLIMIT_CPU,
        PosixRlimitType::RlimitFsize => libc::RLIMIT_FSIZE,
        PosixRlimitType::RlimitData => libc::RLIMIT_DATA,
        PosixRlimitType::RlimitStack => libc::RLIMIT_STACK,
        PosixRlimitType::RlimitCore => libc::RLIMIT_CORE,
        PosixRlimitType::RlimitRss => libc::RLIMIT_RSS,
        PosixRlimitType::RlimitNproc => libc::RLIMIT_NPROC,
        PosixRlimitType::RlimitNofile => libc::RLIMIT_NOFILE,
        PosixRlimitType::RlimitMemlock => libc::RLIMIT_MEMLOCK,
        PosixRlimitType::RlimitAs => libc::RLIMIT_AS,
        PosixRlimitType::RlimitLocks => libc::RLIMIT_LOCKS,
        PosixRlimitType::RlimitSigpending => libc::RLIMIT_SIGPENDING,
        PosixRlimitType::RlimitMsgqueue => libc::RLIMIT_MSGQUEUE,
        PosixRlimitType::RlimitNice => libc::RLIMIT_NICE,
        PosixRlimitType::RlimitRtprio => libc::RLIMIT_RTPRIO,
        PosixRlimitType::RlimitRttime => libc::RLIMIT_RTTIME,
    }
}

/// An absolute path without `.` and `..`, which lead no further up than `/`.
fn absolute(path: &Path, field: &str) -> Inside<Vec<u8>> {
    outside_if(
        !path.is_absolute(),
        &format!("{field} {:?}", path.display()),
    )?;
    let mut out = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(part) => out.push(part),
            Component::ParentDir => {
                out.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    let bytes = out.as_os_str().as_encoded_bytes();
    outside_if(bytes.contains(&0), field)?;
    Ok(bytes.to_vec())
}

fn mounts(list: &[Mount]) -> Inside<Vec<MountPlan>> {
    list.iter().map(mount).collect()
}

fn mount(mount: &Mount) -> Inside<MountPlan> {
    let place = mount.destination().display();
    let field = |what: &str| Outside::new(format!("mounts {place:?} {what}"));
    if filled(mount.uid_mappings().as_ref()) || filled(mount.gid_mappings().as_ref()) {
        return Err(field("uidMappings"));
    }
    let target = absolute(mount.destination(), "mounts.destination")?;
    if target == b"/" {
        return Err(field("destination"));
    }
    let options = options::parse(mount.options().as_deref().unwrap_or_default())
        .map_err(|word| field(&format!("option {word:?}")))?;
    let kind = mount.typ().as_deref().unwrap_or_default();
    let what = match (options.bind, kind) {
        (Some(recursive), _) => bind(mount, recursive, &options).ok_or_else(|| field("bind"))?,
        (None, "bind") => bind(mount, false, &options).ok_or_else(|| field("bind"))?,
        (None, "tmpfs") if target == b"/dev" => What::Dev,
        (None, "tmpfs") => What::Tmpfs,
        (None, "proc") => What::Kernel("proc"),
        (None, "sysfs") => What::Kernel("sysfs"),
        (None, "mqueue") => What::Kernel("mqueue"),
        (None, "devpts") => What::Kernel("devpts"),
        (None, "cgroup") => What::Cgroup,
        (None, _) => return Err(field(&format!("type {kind:?}"))),
    };
    let takes_data = matches!(what, What::Dev | What::Tmpfs | What::Kernel("devpts"));
    if let (Some((key, _)), false) = (options.data.first(), takes_data) {
        return Err(field(&format!("option {key:?}")));
    }
    let known = [
        "mode",
        "size",
        "uid",
        "gid",
        "nr_inodes",
        "nr_blocks",
        "newinstance",
        "ptmxmode",
    ];
    if let Some((key, _)) = options
        .data
        .iter()
        .find(|(key, _)| !known.contains(&key.as_str()))
    {
        return Err(field(&format!("option {key:?}")));
    }
    let own = !matches!(what, What::Bind { .. });
    // New file systems have nothing below them and nothing to propagate with.
    if own && (options.recursive != Attributes::default() || options.propagation.is_some()) {
        return Err(field("propagation"));
    }
    Ok(MountPlan {
        target,
        what,
        options,
    })
}

fn bind(mount: &Mount, recursive: bool, options: &Options) -> Option<What> {
    let source = mount
        .source()
        .clone()
        .filter(|source| source.is_absolute())?;
    options
        .data
        .is_empty()
        .then_some(What::Bind { source, recursive })
}

fn check_mounts(mounts: &[MountPlan], terminal: bool) -> Inside<()> {
    let at = |target: &[u8]| mounts.iter().find(|mount| mount.target == target);
    outside_if(
        at(b"/dev").is_none_or(|mount| mount.what != What::Dev),
        "mounts (no tmpfs at /dev)",
    )?;
    let pts = at(b"/dev/pts").is_some_and(|mount| mount.what == What::Kernel("devpts"));
    outside_if(terminal && !pts, "mounts (no devpts at /dev/pts)")?;
    // Where the kernel's own files are expected, nothing else may stand, and nowhere else.
    for mount in mounts {
        let expected = match mount.what {
            What::Kernel("proc") => mount.target == b"/proc",
            What::Kernel("sysfs") => mount.target == b"/sys",
            _ => mount.target != b"/proc" && !mount.target.starts_with(b"/proc/"),
        };
        let place = String::from_utf8_lossy(&mount.target);
        outside_if(!expected, &format!("mounts {place:?} destination"))?;
    }
    Ok(())
}

/// Resources, and whether all devices are allowed.
///
/// # Errors
/// [`Outside`].
fn check_resources(linux: &Linux) -> Inside<(bool, LinuxResources)> {
    let Some(resources) = linux.resources() else {
        return Ok((false, LinuxResources::default()));
    };
    let all_devices = devices(resources.devices().as_deref().unwrap_or_default())?;
    supported(resources)?;
    Ok((all_devices, resources.clone()))
}

/// Whether the launcher's cgroups can carry these limits.
///
/// # Errors
/// [`Outside`].
pub fn supported(resources: &LinuxResources) -> Inside<()> {
    let zero = |value: Option<i64>| value.is_none_or(|value| value <= 0);
    if let Some(memory) = resources.memory() {
        outside_if(!zero(memory.kernel()), "linux.resources.memory.kernel")?;
        outside_if(
            !zero(memory.kernel_tcp()),
            "linux.resources.memory.kernelTCP",
        )?;
        outside_if(
            memory.swappiness().is_some(),
            "linux.resources.memory.swappiness",
        )?;
        outside_if(
            memory.disable_oom_killer() == Some(true),
            "linux.resources.memory.disableOOMKiller",
        )?;
    }
    if let Some(cpu) = resources.cpu() {
        let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        outside_if(said(cpu.cpus()), "linux.resources.cpu.cpus")?;
        outside_if(said(cpu.mems()), "linux.resources.cpu.mems")?;
        outside_if(
            !zero(cpu.realtime_runtime()),
            "linux.resources.cpu.realtimeRuntime",
        )?;
        outside_if(
            cpu.realtime_period().is_some_and(|period| period > 0),
            "linux.resources.cpu.realtimePeriod",
        )?;
        outside_if(!zero(cpu.idle()), "linux.resources.cpu.idle")?;
        outside_if(
            cpu.burst().is_some_and(|burst| burst > 0),
            "linux.resources.cpu.burst",
        )?;
    }
    if let Some(io) = resources.block_io() {
        let value = serde_json::to_value(io).unwrap_or_default();
        let empty = |value: &serde_json::Value| match value {
            serde_json::Value::Array(list) => list.is_empty(),
            other => other.is_null(),
        };
        let any = value
            .as_object()
            .is_some_and(|fields| !fields.values().all(empty));
        outside_if(any, "linux.resources.blockIO")?;
    }
    // A limit of zero is what everybody has whose host has no huge pages.
    let huge = resources
        .hugepage_limits()
        .iter()
        .flatten()
        .any(|limit| limit.limit() != 0);
    outside_if(huge, "linux.resources.hugepageLimits")?;
    if let Some(network) = resources.network() {
        let any = network.class_id().is_some_and(|class| class != 0)
            || filled(network.priorities().as_ref());
        outside_if(any, "linux.resources.network")?;
    }
    let rdma = resources
        .rdma()
        .as_ref()
        .is_some_and(|rdma| !rdma.is_empty());
    outside_if(rdma, "linux.resources.rdma")?;
    let unified = resources
        .unified()
        .as_ref()
        .is_some_and(|unified| !unified.is_empty());
    outside_if(unified, "linux.resources.unified")
}

/// Whether rules allow every device; those that allow only the default ones are ours by nodev.
fn devices(rules: &[LinuxDeviceCgroup]) -> Inside<bool> {
    use oci_spec::runtime::LinuxDeviceType as Type;
    // major, minor (none is any): what every container gets, as containerd and runc have it.
    let default = |major, minor| {
        matches!(
            (major, minor),
            (Some(1), Some(3 | 5 | 7 | 8 | 9)) | (Some(5), Some(0..=2)) | (Some(136), None)
        )
    };
    let mut all = false;
    for rule in rules {
        let any = |number: Option<i64>| number.filter(|number| *number >= 0);
        let (major, minor) = (any(rule.major()), any(rule.minor()));
        let every_kind = matches!(rule.typ(), None | Some(Type::A));
        let access = rule.access().as_deref().unwrap_or("rwm");
        match (rule.allow(), every_kind, major, minor) {
            (allow, true, None, None) if access == "rwm" => all = allow,
            // Making nodes, of any kind, is harmless where none can be opened.
            (true, _, None, None) if access == "m" => {}
            (true, false, major, minor) if rule.typ() == Some(Type::C) => {
                outside_if(!default(major, minor), "linux.resources.devices")?;
            }
            _ => return Err(Outside::new("linux.resources.devices")),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
