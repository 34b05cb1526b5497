//! The OCI runtime spec of a container, as a pure function of the image's configuration, the
//! pod's wishes and what the host prepared.

pub mod caps;
pub mod env;
pub mod mounts;
pub mod resources;
pub mod seccomp;
pub mod user;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use oci_spec::image::ImageConfiguration;
use oci_spec::runtime::{
    Capabilities, LinuxBuilder, LinuxDevice, LinuxIdMappingBuilder, LinuxNamespace,
    LinuxNamespaceBuilder, LinuxNamespaceType, LinuxSeccomp, PosixRlimitBuilder, PosixRlimitType,
    ProcessBuilder, RootBuilder, Spec, SpecBuilder,
};
use sandman_protocol::v1;

pub use self::env::HostValues;
pub use self::mounts::{AGENT_PATH, Bind};
pub use self::user::Accounts;
use crate::users::{self, UserRange};
use crate::volumes::EtcPaths;

/// Soft limit of open files: what programs written for `select` can bear. They may raise it.
const NOFILE_SOFT: u64 = 1024;
/// Hard limit of open files where the host itself has more.
const NOFILE_HARD: u64 = 1_048_576;

const MASKED_PATHS: [&str; 12] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

const READONLY_PATHS: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// Why no spec could be made.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The pod or the image asks for something impossible; the text is for the user.
    #[error("{0}")]
    Config(String),
    /// A builder of the OCI types refused; a mistake of ours.
    #[error("building the OCI spec: {0}")]
    Oci(#[from] oci_spec::OciSpecError),
}

impl SpecError {
    pub(crate) fn config(text: impl Into<String>) -> Self {
        Self::Config(text.into())
    }
}

/// What is true of every container of this host.
#[derive(Clone, Debug)]
pub struct HostLimits {
    /// Pods may be privileged.
    pub allow_privileged: bool,
    /// Processes a container may have; 0 is no limit.
    pub pids_limit: u32,
    /// Parent of all sandboxes' cgroups.
    pub cgroup_parent: PathBuf,
    /// Capabilities that can be handed out.
    pub capabilities: Capabilities,
    /// Lowest oom_score_adj that can be set; `None` when any can.
    pub oom_floor: Option<i32>,
    /// Hard limit of open files.
    pub nofile: u64,
    /// Memory of the host in bytes.
    pub memory_bytes: u64,
    /// Containers get a cgroup namespace (cgroup v2).
    pub cgroup_namespace: bool,
}

/// What the host prepared for one attempt of a container.
#[derive(Clone, Debug)]
pub struct Prepared<'a> {
    /// containerd id of the attempt.
    pub container_id: &'a str,
    /// Account files of the image.
    pub accounts: &'a Accounts,
    /// Namespaces of the pod by path.
    pub namespaces: &'a [(LinuxNamespaceType, PathBuf)],
    /// Host name that the container sees.
    pub hostname: &'a str,
    /// Devices of the host, for a privileged container.
    pub devices: Vec<LinuxDevice>,
    /// Addresses.
    pub values: HostValues,
    /// Volumes of this container.
    pub volumes: &'a [Bind],
    /// Managed files.
    pub etc: &'a EtcPaths,
    /// Shared memory of the pod, when its containers share it.
    pub shm: Option<&'a Path>,
    /// Host file for the termination message.
    pub termination_file: Option<&'a Path>,
    /// The agent's binary; `None` leaves PID 1 to the image.
    pub agent: Option<&'a Path>,
    /// The host's own seccomp profile, when the container names one.
    pub localhost_profile: Option<LinuxSeccomp>,
    /// The ids that the pod's user namespace has; `None` in the host's.
    pub users: Option<UserRange>,
}

/// `name_namespace(uid)`, as the kubelet names a pod in texts.
#[must_use]
pub fn pod_label(sandbox: &v1::SandboxSpec) -> String {
    format!("{}_{}({})", sandbox.name, sandbox.namespace, sandbox.uid)
}

/// Where the memory of a container counts, if not by itself; for our own containerd shim.
const MEMORY_ANNOTATION: &str = "sandman.dev/memory-cgroup";

/// cgroup of a sandbox, below that of its QoS class.
#[must_use]
pub fn sandbox_cgroup(parent: &Path, sandbox: &v1::SandboxSpec) -> PathBuf {
    cgroup_of_class(parent, resources::qos(sandbox), &sandbox.uid)
}

/// cgroup that a sandbox has in a class.
#[must_use]
pub fn cgroup_of_class(parent: &Path, class: resources::Qos, uid: &str) -> PathBuf {
    let mut path = parent.to_owned();
    path.extend(class.cgroup());
    path.push(format!("pod{uid}"));
    path
}

/// Builds the spec.
///
/// # Errors
/// [`SpecError::Config`], which becomes CreateContainerConfigError.
pub fn build(
    host: &HostLimits,
    sandbox: &v1::SandboxSpec,
    container: &v1::Container,
    image: &ImageConfiguration,
    prepared: &Prepared<'_>,
) -> Result<Spec, SpecError> {
    let security = container.security.clone().unwrap_or_default();
    if security.privileged && !host.allow_privileged {
        return Err(SpecError::config(
            "securityContext.privileged: this host does not allow it (allow.privileged)",
        ));
    }
    let image_config = image.config().as_ref();
    let wishes = resources::effective(sandbox, container);

    let capabilities = if security.privileged {
        host.capabilities.clone()
    } else {
        caps::resolve(
            &security.add_capabilities,
            &security.drop_capabilities,
            &host.capabilities,
        )?
    };
    let label = pod_label(sandbox);
    let wish = user::Wish {
        security: &security,
        fs_group: sandbox.fs_group,
        pod: &label,
        container: &container.name,
    };
    let image_user = image_config
        .and_then(|c| c.user().as_deref())
        .unwrap_or_default();
    let user = user::resolve(&wish, image_user, prepared.accounts)?;

    let termination = termination_mount(container, prepared)?;
    let own_env = env::resolve(&container.env, &prepared.values);
    let command = env::command_line(container, image_config, &own_env)?;
    let args = match prepared.agent {
        Some(_) => agent_args(
            command,
            termination.as_ref().map(|(_, inside)| inside.as_path()),
        ),
        None => command,
    };

    let nofile = host.nofile.min(NOFILE_HARD);
    let mut process = ProcessBuilder::default()
        .terminal(container.tty)
        .user(user)
        .args(args)
        .env(env::environment(
            image_config,
            &own_env,
            prepared.hostname,
            container.tty,
        ))
        .cwd(working_dir(container, image_config))
        .capabilities(caps::sets(&capabilities)?)
        .no_new_privileges(security.no_new_privileges)
        .rlimits(vec![
            PosixRlimitBuilder::default()
                .typ(PosixRlimitType::RlimitNofile)
                .soft(nofile.min(NOFILE_SOFT))
                .hard(nofile)
                .build()?,
        ])
        .build()?;
    let oom = resources::oom_score_adj(sandbox, container, host.memory_bytes);
    if host.oom_floor.is_none_or(|floor| oom >= floor) {
        process.set_oom_score_adj(Some(oom));
    }

    let mounts = mounts::table(&mounts::MountPlan {
        volumes: prepared.volumes,
        etc: prepared.etc,
        shm: prepared.shm,
        termination: termination
            .as_ref()
            .map(|(file, inside)| (file.as_path(), inside.as_path())),
        agent: prepared.agent,
        read_only_root: security.read_only_root,
        privileged: security.privileged,
    })?;

    let cgroup = sandbox_cgroup(&host.cgroup_parent, sandbox).join(prepared.container_id);
    let sysctls: HashMap<String, String> = sandbox
        .sysctls
        .iter()
        .map(|s| (s.name.clone(), s.value.clone()))
        .collect();
    let mut linux = LinuxBuilder::default()
        .cgroups_path(cgroup)
        .resources(resources::limits(
            &wishes,
            host.pids_limit,
            security.privileged,
        )?)
        .namespaces(namespaces(host, sandbox, prepared)?)
        .sysctl(sysctls)
        .build()?;
    if let Some(range) = prepared.users {
        // Runtimes want to be told, although the namespace is there.
        let mapping = LinuxIdMappingBuilder::default()
            .container_id(0_u32)
            .host_id(range.first)
            .size(users::LENGTH)
            .build()?;
        linux
            .set_uid_mappings(Some(vec![mapping]))
            .set_gid_mappings(Some(vec![mapping]));
    }
    let masked = !security.privileged && !security.unmasked_proc;
    let paths = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    linux
        .set_masked_paths(masked.then(|| paths(&MASKED_PATHS)))
        .set_readonly_paths(masked.then(|| paths(&READONLY_PATHS)))
        .set_seccomp(seccomp_profile(&security, &capabilities, prepared)?)
        .set_rootfs_propagation(mounts::root_propagation(prepared.volumes).map(str::to_owned));
    if !prepared.devices.is_empty() {
        linux.set_devices(Some(prepared.devices.clone()));
    }

    let mut spec = SpecBuilder::default()
        .version("1.0.2")
        .root(
            RootBuilder::default()
                .path("rootfs")
                .readonly(security.read_only_root)
                .build()?,
        )
        .process(process)
        .mounts(mounts)
        .linux(linux)
        .build()?;
    // The hostname is set once in the pod's UTS namespace.
    spec.set_hostname(None);
    if let Some(memory) = resources::shared_memory(&host.cgroup_parent, sandbox) {
        let annotation = (MEMORY_ANNOTATION.to_owned(), memory.display().to_string());
        spec.set_annotations(Some(HashMap::from([annotation])));
    }
    Ok(spec)
}

fn agent_args(command: Vec<String>, report: Option<&Path>) -> Vec<String> {
    let mut args = vec![AGENT_PATH.to_owned(), "init".to_owned()];
    if let Some(report) = report {
        args.push("--report".to_owned());
        args.push(report.to_string_lossy().into_owned());
    }
    args.push("--".to_owned());
    args.extend(command);
    args
}

/// The termination message file and its path inside, unless a volume lies over that path.
fn termination_mount(
    container: &v1::Container,
    prepared: &Prepared<'_>,
) -> Result<Option<(PathBuf, PathBuf)>, SpecError> {
    let Some(file) = prepared.termination_file else {
        return Ok(None);
    };
    if container.termination_message_path.is_empty() {
        return Ok(None);
    }
    let inside = mounts::clean(Path::new(&container.termination_message_path))?;
    let covered = prepared
        .volumes
        .iter()
        .any(|volume| inside.starts_with(&volume.destination));
    Ok((!covered).then(|| (file.to_owned(), inside)))
}

fn working_dir(container: &v1::Container, image: Option<&oci_spec::image::Config>) -> PathBuf {
    let from_image = || {
        image
            .and_then(|c| c.working_dir().clone())
            .unwrap_or_default()
    };
    let wish = if container.working_dir.is_empty() {
        from_image()
    } else {
        container.working_dir.clone()
    };
    // A relative or empty one starts at the root, as in Docker.
    Path::new("/").join(wish)
}

/// A kind that is not listed is the host's.
fn namespaces(
    host: &HostLimits,
    sandbox: &v1::SandboxSpec,
    prepared: &Prepared<'_>,
) -> Result<Vec<LinuxNamespace>, SpecError> {
    let mut kinds = vec![
        LinuxNamespaceType::Pid,
        LinuxNamespaceType::Mount,
        LinuxNamespaceType::Network,
        LinuxNamespaceType::Uts,
        LinuxNamespaceType::Ipc,
    ];
    kinds.retain(|kind| match kind {
        LinuxNamespaceType::Pid => !sandbox.host_pid,
        LinuxNamespaceType::Ipc => !sandbox.host_ipc,
        _ => true,
    });
    if host.cgroup_namespace {
        kinds.push(LinuxNamespaceType::Cgroup);
    }
    if prepared.users.is_some() {
        kinds.push(LinuxNamespaceType::User);
    }
    let mut namespaces = Vec::with_capacity(kinds.len());
    for kind in kinds {
        let mut builder = LinuxNamespaceBuilder::default().typ(kind);
        if let Some((_, path)) = prepared
            .namespaces
            .iter()
            .find(|(shared, _)| *shared == kind)
        {
            builder = builder.path(path);
        }
        namespaces.push(builder.build()?);
    }
    Ok(namespaces)
}

fn seccomp_profile(
    security: &v1::SecurityContext,
    capabilities: &Capabilities,
    prepared: &Prepared<'_>,
) -> Result<Option<LinuxSeccomp>, SpecError> {
    use v1::seccomp::Kind;
    let wish = security.seccomp.clone().unwrap_or_default();
    match wish.kind() {
        _ if security.privileged => Ok(None),
        Kind::Unconfined => Ok(None),
        // A sandbox without an opinion is confined; Kubernetes leaves that to the node.
        Kind::Unspecified | Kind::RuntimeDefault => {
            Ok(Some(seccomp::runtime_default(capabilities)?))
        }
        Kind::Localhost => match &prepared.localhost_profile {
            Some(profile) => Ok(Some(profile.clone())),
            None => Err(SpecError::config(format!(
                "securityContext.seccompProfile.localhostProfile: no profile {:?} on this host",
                wish.profile
            ))),
        },
    }
}

#[cfg(test)]
mod tests;
