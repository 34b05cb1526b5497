//! Mounts of a container: the kernel's file systems, the managed files of `/etc`, the agent and
//! the pod's volumes. A volume mounted over one of ours replaces it.

use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::{Mount, MountBuilder};
use sandman_protocol::v1;

use super::SpecError;
use crate::volumes::EtcPaths;

/// Where the agent is found inside every container.
pub const AGENT_PATH: &str = "/dev/sandman/daemon";

/// A host path to be seen inside a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bind {
    /// Path on the host; made safe by whoever resolved it.
    pub source: PathBuf,
    /// Absolute path inside.
    pub destination: PathBuf,
    /// Mount it read-only.
    pub read_only: bool,
    /// And what is mounted below it.
    pub recursive_read_only: bool,
    /// Nothing in it can be run.
    pub no_exec: bool,
    /// Who sees mounts that are made later.
    pub propagation: v1::MountPropagation,
}

/// What goes into the mount table besides the kernel's file systems.
#[derive(Clone, Copy, Debug)]
pub struct MountPlan<'a> {
    /// Volumes of the pod.
    pub volumes: &'a [Bind],
    /// Managed files.
    pub etc: &'a EtcPaths,
    /// The pod's shared memory folder; a private one is made without it.
    pub shm: Option<&'a Path>,
    /// Host file and the path inside at which the container leaves its last words.
    pub termination: Option<(&'a Path, &'a Path)>,
    /// The agent's binary on the host.
    pub agent: Option<&'a Path>,
    /// The container asked for a read-only root: then `/etc` files are read-only too.
    pub read_only_root: bool,
    /// Kernel file systems stay writable, and volumes may hold devices.
    pub privileged: bool,
}

fn special(destination: &str, kind: &str, options: &[&str]) -> Result<Mount, SpecError> {
    Ok(MountBuilder::default()
        .destination(destination)
        .typ(kind)
        .source(kind)
        .options(options.iter().map(ToString::to_string).collect::<Vec<_>>())
        .build()?)
}

fn bind(source: &Path, destination: &Path, read_only: bool) -> Result<Mount, SpecError> {
    // nodev: no volume or image can bring a device node into a sandbox.
    let access = if read_only { "ro" } else { "rw" };
    Ok(MountBuilder::default()
        .destination(destination)
        .typ("bind")
        .source(source)
        .options(
            ["rbind", "rprivate", "nodev", access]
                .map(str::to_owned)
                .to_vec(),
        )
        .build()?)
}

fn volume_mount(volume: &Bind, destination: &Path, privileged: bool) -> Result<Mount, SpecError> {
    let mut mount = bind(&volume.source, destination, volume.read_only)?;
    let propagation = match volume.propagation {
        v1::MountPropagation::Unspecified => "rprivate",
        v1::MountPropagation::HostToContainer => "rslave",
        v1::MountPropagation::Bidirectional => "rshared",
    };
    let mut options = vec!["rbind", propagation];
    if !privileged {
        options.push("nodev");
    }
    if volume.no_exec {
        options.push("noexec");
    }
    options.push(if volume.read_only { "ro" } else { "rw" });
    if volume.recursive_read_only {
        options.push("rro");
    }
    mount.set_options(Some(options.into_iter().map(str::to_owned).collect()));
    Ok(mount)
}

/// How the container's root must pass mounts on for its volumes to do so
/// (containerd's `WithMounts`): as the widest of them.
#[must_use]
pub fn root_propagation(volumes: &[Bind]) -> Option<&'static str> {
    let any = |wish| volumes.iter().any(|volume| volume.propagation == wish);
    if any(v1::MountPropagation::Bidirectional) {
        Some("rshared")
    } else if any(v1::MountPropagation::HostToContainer) {
        Some("rslave")
    } else {
        None
    }
}

/// The mount table, parents before children.
///
/// # Errors
/// [`SpecError::Config`] names a mount path that cannot be used.
pub fn table(plan: &MountPlan<'_>) -> Result<Vec<Mount>, SpecError> {
    let sys_access = if plan.privileged { "rw" } else { "ro" };
    let mut table = vec![
        special("/proc", "proc", &["nosuid", "noexec", "nodev"])?,
        special(
            "/dev",
            "tmpfs",
            &["nosuid", "strictatime", "mode=755", "size=65536k"],
        )?,
        special(
            "/dev/pts",
            "devpts",
            &[
                "nosuid",
                "noexec",
                "newinstance",
                "ptmxmode=0666",
                "mode=0620",
                "gid=5",
            ],
        )?,
        special("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"])?,
        special("/sys", "sysfs", &["nosuid", "noexec", "nodev", sys_access])?,
        special(
            "/sys/fs/cgroup",
            "cgroup",
            &["nosuid", "noexec", "nodev", "relatime", sys_access],
        )?,
        match plan.shm {
            Some(folder) => bind(folder, Path::new("/dev/shm"), false)?,
            None => special(
                "/dev/shm",
                "tmpfs",
                &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
            )?,
        },
        bind(
            &plan.etc.hosts,
            Path::new("/etc/hosts"),
            plan.read_only_root,
        )?,
        bind(
            &plan.etc.hostname,
            Path::new("/etc/hostname"),
            plan.read_only_root,
        )?,
        bind(
            &plan.etc.resolv_conf,
            Path::new("/etc/resolv.conf"),
            plan.read_only_root,
        )?,
    ];
    if let Some((file, inside)) = plan.termination {
        table.push(bind(file, inside, false)?);
    }
    for volume in plan.volumes {
        let destination = clean(&volume.destination)?;
        if destination.starts_with("/dev/sandman") {
            return Err(SpecError::config(format!(
                "mountPath {:?} is reserved for the sandbox's agent",
                volume.destination.display()
            )));
        }
        table.retain(|mount| *mount.destination() != destination);
        table.push(volume_mount(volume, &destination, plan.privileged)?);
    }
    if let Some(agent) = plan.agent {
        let mut mount = bind(agent, Path::new(AGENT_PATH), true)?;
        mount.set_options(Some(
            ["bind", "ro", "nosuid", "nodev"]
                .map(str::to_owned)
                .to_vec(),
        ));
        table.push(mount);
    }
    // Stable: mounts of the same depth stay in the order of the pod.
    table.sort_by_key(|mount| mount.destination().components().count());
    Ok(table)
}

/// An absolute path without `.` and `..`; relative ones start at the root, as in the kubelet.
///
/// # Errors
/// [`SpecError::Config`] for `..` and for the root itself.
pub fn clean(path: &Path) -> Result<PathBuf, SpecError> {
    let mut out = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(part) => out.push(part),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            Component::ParentDir => {
                return Err(SpecError::config(format!(
                    "mountPath {:?} may not contain \"..\"",
                    path.display()
                )));
            }
        }
    }
    if out == Path::new("/") {
        return Err(SpecError::config(
            "mountPath may not be the root of the container",
        ));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etc() -> EtcPaths {
        EtcPaths {
            hosts: "/h/hosts".into(),
            hostname: "/h/hostname".into(),
            resolv_conf: "/h/resolv.conf".into(),
        }
    }

    fn plan<'a>(volumes: &'a [Bind], etc: &'a EtcPaths) -> MountPlan<'a> {
        MountPlan {
            volumes,
            etc,
            shm: None,
            termination: Some((Path::new("/h/term"), Path::new("/dev/termination-log"))),
            agent: Some(Path::new("/h/daemon")),
            read_only_root: false,
            privileged: false,
        }
    }

    fn volume(destination: &str) -> Bind {
        Bind {
            source: "/v".into(),
            destination: destination.into(),
            read_only: true,
            ..Bind::default()
        }
    }

    #[test]
    fn parents_come_before_children() {
        let volumes = [volume("/data/a/b"), volume("data")];
        let etc = etc();
        let table = table(&plan(&volumes, &etc)).unwrap();
        let at = |path: &str| {
            table
                .iter()
                .position(|m| m.destination() == Path::new(path))
                .expect(path)
        };
        assert!(at("/dev") < at("/dev/shm") && at("/dev") < at(AGENT_PATH));
        assert!(at("/data") < at("/data/a/b"));
        assert!(at("/sys") < at("/sys/fs/cgroup"));
    }

    #[test]
    fn volumes_replace_managed_mounts() {
        let volumes = [
            volume("/etc/hosts"),
            volume("/dev/shm"),
            volume("/dev/termination-log"),
        ];
        let etc = etc();
        let table = table(&plan(&volumes, &etc)).unwrap();
        for path in ["/etc/hosts", "/dev/shm", "/dev/termination-log"] {
            let found: Vec<_> = table
                .iter()
                .filter(|m| m.destination() == Path::new(path))
                .collect();
            assert_eq!(found.len(), 1, "{path}");
            assert_eq!(found[0].source().as_deref(), Some(Path::new("/v")));
        }
    }

    #[test]
    fn nothing_but_dev_brings_devices() {
        let volumes = [volume("/data")];
        let etc = etc();
        for mount in table(&plan(&volumes, &etc)).unwrap() {
            let options = mount.options().clone().unwrap_or_default();
            let own = matches!(mount.destination().to_str(), Some("/dev" | "/dev/pts"));
            assert!(own || options.iter().any(|o| o == "nodev"), "{mount:?}");
        }
    }

    #[test]
    fn mounts_are_passed_on_as_asked() {
        use v1::MountPropagation::{Bidirectional, HostToContainer, Unspecified};
        for (propagation, option, root) in [
            (Unspecified, "rprivate", None),
            (HostToContainer, "rslave", Some("rslave")),
            (Bidirectional, "rshared", Some("rshared")),
        ] {
            let volumes = [
                volume("/other"),
                Bind {
                    propagation,
                    recursive_read_only: true,
                    ..volume("/data")
                },
            ];
            assert_eq!(root_propagation(&volumes), root);
            let etc = etc();
            let privileged = MountPlan {
                privileged: true,
                ..plan(&volumes, &etc)
            };
            let table = table(&privileged).unwrap();
            let data = table.iter().find(|m| m.destination() == Path::new("/data"));
            let options = data.unwrap().options().clone().unwrap();
            assert_eq!(options, ["rbind", option, "ro", "rro"]);
        }
    }

    #[test]
    fn bad_paths_are_refused() {
        let etc = etc();
        for path in ["/", "/a/../b", "/dev/sandman", "/dev/sandman/daemon", ""] {
            assert!(table(&plan(&[volume(path)], &etc)).is_err(), "{path}");
        }
    }
}
