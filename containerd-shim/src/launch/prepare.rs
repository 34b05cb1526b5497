//! Opens all that a spec names, and writes the plan that a clone follows.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use oci_spec::runtime::{LinuxSeccomp, Process, Spec};

use super::cgroup::{Cgroup, Hierarchies};
use super::device::{self, Shared};
use super::rootfs::{self, RootMount};
use super::subset::{self, MountPlan, Outside, Subset, What};
use crate::holder::protocol::{CloneHeader, MAX_FDS};
use crate::sys::mount::{Attributes, Context, change, copy_tree};
use crate::sys::process::open_process;
use crate::sys::{memfd, message};
use crate::zygote::gate::words;
use crate::zygote::plan::{self, Index, Plan};

/// Most descriptors of one launch: a plan names them by a byte, and some are kept beside them.
const MOST_FDS: usize = MAX_FDS - 32;

/// Where a root file system comes from.
#[derive(Clone, Copy, Debug)]
pub enum Rootfs<'a> {
    /// Mounts of a snapshotter.
    Mounts(&'a [RootMount]),
    /// A folder.
    Path(&'a Path),
}

/// Standard streams of a process.
#[derive(Debug)]
pub enum Streams {
    /// These, in order.
    Fds([OwnedFd; 3]),
    /// A new terminal.
    Terminal {
        /// Columns; 0 for the kernel's default.
        width: u16,
        /// Rows.
        height: u16,
    },
}

/// What is to be launched.
#[derive(Debug)]
pub struct Request<'a> {
    /// The spec.
    pub spec: &'a Spec,
    /// Its root.
    pub rootfs: Rootfs<'a>,
    /// Its streams.
    pub streams: Streams,
}

/// A further process of a sandbox.
#[derive(Debug)]
pub struct Exec<'a> {
    /// First process of the sandbox, on the host.
    pub pid: i32,
    /// The process.
    pub process: &'a Process,
    /// The sandbox's filter.
    pub seccomp: Option<&'a LinuxSeccomp>,
    /// The sandbox's cgroup.
    pub cgroup: Option<&'a Cgroup>,
    /// Its streams.
    pub streams: Streams,
}

/// Why nothing was prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// runc's to make.
    #[error(transparent)]
    Outside(#[from] Outside),
    /// It cannot be made; the text is for the user.
    #[error("{step}: {}", words(error))]
    Failed {
        /// What was being done.
        step: String,
        /// What came of it.
        #[source]
        error: io::Error,
    },
}

/// Names what an error belongs to.
trait During<T> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, PrepareError>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, PrepareError> {
        self.map_err(|error| PrepareError::Failed {
            step: step(),
            error,
        })
    }
}

/// Everything for one launch. Dropping it undoes what was made.
#[derive(Debug)]
pub struct Prepared {
    pub(super) header: CloneHeader,
    pub(super) fds: Vec<OwnedFd>,
    pub(super) gate: OwnedFd,
    pub(super) control: Option<OwnedFd>,
    pub(super) terminal: bool,
    pub(super) oom_score_adj: Option<i32>,
    pub(super) cgroup: Option<OwnCgroup>,
}

/// A cgroup that is removed again unless a sandbox was born into it.
#[derive(Debug)]
pub(super) struct OwnCgroup(Option<Cgroup>);

impl OwnCgroup {
    pub(super) fn keep(mut self) -> Option<Cgroup> {
        self.0.take()
    }

    /// Whether the kernel has killed in it for lack of memory.
    pub(super) fn ran_out(&self) -> bool {
        self.0.as_ref().is_some_and(|cgroup| cgroup.oom_kills() > 0)
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        if let Some(cgroup) = &self.0
            && let Err(error) = cgroup.remove()
        {
            tracing::warn!(%error, "a cgroup of a failed launch is left behind");
        }
    }
}

/// Descriptors of a plan, by their places.
#[derive(Default)]
struct Fds(Vec<OwnedFd>);

impl Fds {
    fn add(&mut self, fd: OwnedFd) -> Result<Index, Outside> {
        let place = self.0.len();
        if place >= MOST_FDS {
            return Err(Outside::new("mounts (too many)"));
        }
        self.0.push(fd);
        Index::try_from(place).map_err(|_| Outside::new("mounts (too many)"))
    }
}

/// Prepares launches; one for a whole shim.
#[derive(Debug)]
pub struct Launcher {
    shared: Shared,
    hierarchies: Hierarchies,
}

impl Launcher {
    /// Makes what all sandboxes share.
    ///
    /// # Errors
    /// The kernel lacks the new mount API (Linux 5.12), or cgroups are not mounted.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            shared: Shared::new()?,
            hierarchies: Hierarchies::detect()?,
        })
    }

    /// The cgroup at a spec's `cgroupsPath`.
    ///
    /// # Errors
    /// The path leads out of the hierarchies.
    pub fn cgroup(&self, path: &Path, memory: Option<&Path>) -> io::Result<Cgroup> {
        Cgroup::on(self.hierarchies.clone(), path)?.with_memory_in(memory)
    }

    /// Prepares a sandbox. Blocks for system calls, but for nothing that waits on others.
    ///
    /// # Errors
    /// [`PrepareError::Outside`] when runc has to make it.
    pub fn prepare(&self, request: Request<'_>) -> Result<Prepared, PrepareError> {
        let subset = subset::read(request.spec)?;
        self.prepare_read(subset, request.rootfs, request.streams)
    }

    /// The same for a spec that was read before.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn prepare_read(
        &self,
        subset: Subset,
        rootfs: Rootfs<'_>,
        streams_of: Streams,
    ) -> Result<Prepared, PrepareError> {
        let root = match rootfs {
            Rootfs::Mounts(mounts) => Some(rootfs::read(mounts)?),
            Rootfs::Path(_) => None,
        };
        let mut fds = Fds::default();
        let (gate, inner_gate) = message::pair().during(|| "make the gate".into())?;
        // The plan's place, until it is written.
        let null = open_null().during(|| "open /dev/null".into())?;
        fds.add(null)?;
        fds.add(inner_gate)?;

        let made = match (&root, rootfs) {
            (Some(root), _) => rootfs::make(root, subset.all_devices),
            (None, Rootfs::Path(path)) => rootfs::from_path(path, subset.all_devices),
            (None, Rootfs::Mounts(_)) => Err(io::ErrorKind::InvalidInput.into()),
        };
        let root_mount = fds.add(made.during(|| "mount the root file system".into())?)?;

        let (cgroup, header_cgroup, cgroups) = self.make_cgroup(&subset, &mut fds)?;
        let mounts = self.mounts(&subset, cgroup.as_ref(), &mut fds)?;
        let empty = self
            .shared
            .empty()
            .during(|| "mount the empty folder".into())?;
        let empty = fds.add(empty)?;

        let mut join = Vec::new();
        for (path, kind) in &subset.namespaces.join {
            let fd = open_namespace(path)?;
            join.push((fds.add(fd)?, *kind));
        }
        let pid_namespace = match &subset.namespaces.pid {
            Some(path) => Some(fds.add(open_namespace(path)?)?),
            None => None,
        };

        let Subset {
            mut process,
            terminal,
            ..
        } = subset;
        process.streams = streams(streams_of, true, &mut fds)?;
        let control = control(subset.agent, &mut process, &mut fds)?;
        let new_net = subset.namespaces.new & u64::from(libc::CLONE_NEWNET.cast_unsigned()) != 0;
        let bytes = |text: String| text.into_bytes();
        let plan = Plan {
            cgroups,
            join,
            new_cgroup_namespace: subset.namespaces.cgroup,
            loopback: new_net,
            root: Some(plan::Root {
                mount: root_mount,
                readonly: subset.root_readonly,
                mounts,
                empty,
                masked: subset.masked,
                readonly_paths: subset.readonly_paths,
            }),
            hostname: subset.hostname.map(bytes),
            domainname: subset.domainname.map(bytes),
            sysctls: subset
                .sysctls
                .into_iter()
                .map(|(k, v)| (bytes(k), bytes(v)))
                .collect(),
            process,
        };
        let header = CloneHeader {
            flags: subset.namespaces.new,
            cgroup: header_cgroup,
            pid_namespace,
        };
        let fds = seal(&plan, fds)?;
        Ok(Prepared {
            header,
            fds,
            gate,
            control,
            terminal,
            oom_score_adj: subset.oom_score_adj,
            cgroup,
        })
    }

    /// Prepares a further process in a running sandbox, by its namespaces. For sandboxes without an
    /// agent, and for one whose agent does not answer.
    ///
    /// The caller knows that `pid`, the sandbox's first process, has not been acknowledged by
    /// [`Client::forget`](crate::holder::client::Client::forget): until then the number is its own.
    ///
    /// # Errors
    /// [`PrepareError::Outside`] for a process that runc has to make; the sandbox has ended.
    pub fn prepare_exec(&self, exec: Exec<'_>) -> Result<Prepared, PrepareError> {
        let (mut process, oom_score_adj) = subset::read_process(exec.process, exec.seccomp)?;
        let mut fds = Fds::default();
        let (gate, inner_gate) = message::pair().during(|| "make the gate".into())?;
        let null = open_null().during(|| "open /dev/null".into())?;
        fds.add(null)?;
        fds.add(inner_gate)?;
        let target = open_process(exec.pid).during(|| "open the sandbox's process".into())?;
        let target = fds.add(target)?;
        let mut cgroups = Vec::new();
        if let Some(cgroup) = exec.cgroup {
            for file in cgroup.procs().during(|| "join the cgroup".into())? {
                cgroups.push(fds.add(file)?);
            }
        }
        let terminal = matches!(exec.streams, Streams::Terminal { .. });
        process.streams = streams(exec.streams, false, &mut fds)?;
        let all = libc::CLONE_NEWNS
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWCGROUP;
        let plan = Plan {
            cgroups,
            join: vec![(target, all)],
            process,
            ..Plan::default()
        };
        let header = CloneHeader {
            pid_namespace: Some(target),
            ..CloneHeader::default()
        };
        Ok(Prepared {
            header,
            fds: seal(&plan, fds)?,
            gate,
            control: None,
            terminal,
            oom_score_adj,
            cgroup: None,
        })
    }

    /// Makes the cgroup: the v2 folder to be born into, or the v1 files to join.
    #[expect(
        clippy::type_complexity,
        reason = "three results of one step, used at once"
    )]
    fn make_cgroup(
        &self,
        subset: &Subset,
        fds: &mut Fds,
    ) -> Result<(Option<OwnCgroup>, Option<Index>, Vec<Index>), PrepareError> {
        let Some(path) = &subset.cgroup else {
            return Ok((None, None, Vec::new()));
        };
        if path.to_string_lossy().contains(':') {
            return Err(Outside::new("linux.cgroupsPath (systemd's)").into());
        }
        let step = || "make the cgroup".to_owned();
        let cgroup = self.cgroup(path, subset.memory_cgroup.as_deref());
        let cgroup = cgroup.during(step)?;
        cgroup.create(&subset.resources).during(step)?;
        let made = OwnCgroup(Some(cgroup.clone()));
        if let (true, Some(folder)) = (cgroup.is_v2(), cgroup.folder("memory")) {
            let folder = File::open(folder).during(step)?;
            let index = fds.add(folder.into())?;
            return Ok((Some(made), Some(index), Vec::new()));
        }
        let mut files = Vec::new();
        for file in cgroup.procs().during(step)? {
            files.push(fds.add(file)?);
        }
        Ok((Some(made), None, files))
    }

    fn mounts(
        &self,
        subset: &Subset,
        cgroup: Option<&OwnCgroup>,
        fds: &mut Fds,
    ) -> Result<Vec<plan::Mount>, PrepareError> {
        let mut out = Vec::new();
        // Whatever the spec says: there is no device cgroup, and CAP_MKNOD is common.
        let nodev = if subset.all_devices {
            0
        } else {
            libc::MOUNT_ATTR_NODEV
        };
        for mount in &subset.mounts {
            let step = || format!("mount {:?}", String::from_utf8_lossy(&mount.target));
            match &mount.what {
                What::Bind { source, recursive } => {
                    let fd = bind(source, *recursive, mount, nodev)
                        .during(|| format!("{} from {:?}", step(), source.display()))?;
                    out.push(detached(mount.target.clone(), fds.add(fd)?));
                }
                What::Tmpfs => {
                    let fd = tmpfs(mount, nodev).during(step)?;
                    out.push(late(mount, plan::Source::Detached(fds.add(fd)?)));
                }
                What::Dev => self.dev(subset, mount, fds, &mut out)?,
                What::Kernel(kind) => {
                    let source = plan::Source::New {
                        kind: kind.as_bytes().to_vec(),
                        attributes: mount.options.attributes.set,
                        options: data(mount)
                            .map(|(key, value)| {
                                (
                                    key.as_bytes().to_vec(),
                                    value.map(|v| v.as_bytes().to_vec()),
                                )
                            })
                            .collect(),
                    };
                    out.push(plan::Mount {
                        target: mount.target.clone(),
                        source,
                        late: Attributes::default(),
                    });
                }
                What::Cgroup => {
                    let own = cgroup.and_then(|own| own.0.as_ref());
                    self.cgroup_mounts(subset, own, mount, fds, &mut out)?;
                }
            }
        }
        Ok(out)
    }

    /// `/dev`: one for all if it is read-only and nobody needs a mount point that it lacks.
    fn dev(
        &self,
        subset: &Subset,
        mount: &MountPlan,
        fds: &mut Fds,
        out: &mut Vec<plan::Mount>,
    ) -> Result<(), PrepareError> {
        let step = || "mount \"/dev\"".to_owned();
        let readonly = mount.options.attributes.set & libc::MOUNT_ATTR_RDONLY != 0;
        let furnished = subset
            .mounts
            .iter()
            .all(|other| device::shared_has(&other.target));
        if readonly && furnished && !subset.all_devices {
            let shared = self.shared.dev().during(step)?;
            out.push(detached(mount.target.clone(), fds.add(shared)?));
            return Ok(());
        }
        // Nodes are mounted from the host's, so that none made here can be opened.
        let nodev = if subset.all_devices {
            0
        } else {
            libc::MOUNT_ATTR_NODEV
        };
        let dev = tmpfs(mount, nodev).during(step)?;
        device::furnish(dev.as_fd()).during(step)?;
        out.push(late(mount, plan::Source::Detached(fds.add(dev)?)));
        for (_, path, major, minor) in device::NODES {
            let node =
                device::host_node(path, major, minor).during(|| format!("mount {path:?}"))?;
            out.push(detached(path.as_bytes().to_vec(), fds.add(node)?));
        }
        Ok(())
    }

    /// The container's view of its cgroups, as runc shows it.
    fn cgroup_mounts(
        &self,
        subset: &Subset,
        cgroup: Option<&Cgroup>,
        mount: &MountPlan,
        fds: &mut Fds,
        out: &mut Vec<plan::Mount>,
    ) -> Result<(), PrepareError> {
        let step = || format!("mount {:?}", String::from_utf8_lossy(&mount.target));
        let attributes = mount.options.attributes;
        if matches!(self.hierarchies, Hierarchies::Unified(_)) {
            if !subset.namespaces.cgroup {
                return Err(Outside::new("mounts (cgroup without a cgroup namespace)").into());
            }
            out.push(plan::Mount {
                target: mount.target.clone(),
                source: plan::Source::New {
                    kind: b"cgroup2".to_vec(),
                    attributes: attributes.set,
                    options: Vec::new(),
                },
                late: Attributes::default(),
            });
            return Ok(());
        }
        let top = Context::new(c"tmpfs").during(step)?;
        top.set(c"mode", c"0755").during(step)?;
        let top = top
            .mount(attributes.set & !libc::MOUNT_ATTR_RDONLY)
            .during(step)?;
        out.push(late(mount, plan::Source::Detached(fds.add(top)?)));
        // Only the hierarchies that the sandbox has a place in: others would show the host's.
        for (name, _) in self.hierarchies.legacy() {
            let Some(folder) = cgroup.and_then(|cgroup| cgroup.folder(name)) else {
                continue;
            };
            if !folder.is_dir() {
                continue;
            }
            let source = CString::new(folder.as_os_str().as_encoded_bytes());
            let copy = source
                .map_err(io::Error::from)
                .and_then(|source| copy_tree(&source, false));
            let copy = copy.during(step)?;
            privatise(&copy, attributes).during(step)?;
            let target = [mount.target.as_slice(), b"/", name.as_bytes()].concat();
            out.push(detached(target, fds.add(copy)?));
        }
        Ok(())
    }
}

fn streams(streams: Streams, console: bool, fds: &mut Fds) -> Result<plan::Streams, Outside> {
    Ok(match streams {
        Streams::Fds([stdin, stdout, stderr]) => {
            plan::Streams::Given([fds.add(stdin)?, fds.add(stdout)?, fds.add(stderr)?])
        }
        Streams::Terminal { width, height } => plan::Streams::Terminal {
            width,
            height,
            console,
        },
    })
}

/// The agent's socket: made before the sandbox exists, so that nobody has to be found later.
fn control(
    agent: bool,
    process: &mut plan::Process,
    fds: &mut Fds,
) -> Result<Option<OwnedFd>, PrepareError> {
    if !agent {
        return Ok(None);
    }
    let (ours, theirs) = message::pair().during(|| "make the control socket".into())?;
    process.control = Some(fds.add(theirs)?);
    Ok(Some(ours))
}

/// Puts the finished plan in its place.
fn seal(plan: &Plan, fds: Fds) -> Result<Vec<OwnedFd>, PrepareError> {
    let bytes = plan.encode();
    if bytes.len() as u64 >= plan::MAX_PLAN {
        return Err(Outside::new("process (too long)").into());
    }
    let file = memfd::with_bytes(c"plan", &bytes).during(|| "write the plan".into())?;
    let mut fds = fds.0;
    if let Some(place) = fds.first_mut() {
        *place = file.into();
    }
    Ok(fds)
}

fn open_null() -> io::Result<OwnedFd> {
    File::open("/dev/null").map(OwnedFd::from)
}

fn open_namespace(path: &PathBuf) -> Result<OwnedFd, PrepareError> {
    File::open(path)
        .map(OwnedFd::from)
        .during(|| format!("open the namespace {:?}", path.display()))
}

fn detached(target: Vec<u8>, index: Index) -> plan::Mount {
    plan::Mount {
        target,
        source: plan::Source::Detached(index),
        late: Attributes::default(),
    }
}

/// A new tmpfs becomes read-only last: others need mount points in it.
fn late(mount: &MountPlan, source: plan::Source) -> plan::Mount {
    let late = Attributes {
        set: mount.options.attributes.set & libc::MOUNT_ATTR_RDONLY,
        ..Attributes::default()
    };
    plan::Mount {
        target: mount.target.clone(),
        source,
        late,
    }
}

fn data(mount: &MountPlan) -> impl Iterator<Item = (&str, Option<&str>)> {
    mount
        .options
        .data
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_deref()))
}

fn tmpfs(mount: &MountPlan, more: u64) -> io::Result<OwnedFd> {
    let context = Context::new(c"tmpfs")?;
    context.set(c"source", c"tmpfs")?;
    for (key, value) in data(mount) {
        let key = CString::new(key)?;
        match value {
            Some(value) => context.set(&key, &CString::new(value)?)?,
            None => context.flag(&key)?,
        }
    }
    context.mount((mount.options.attributes.set & !libc::MOUNT_ATTR_RDONLY) | more)
}

fn bind(source: &Path, recursive: bool, mount: &MountPlan, nodev: u64) -> io::Result<OwnedFd> {
    let nodev = if device::is_default_node(source)? {
        0
    } else {
        nodev
    };
    let source = CString::new(source.as_os_str().as_encoded_bytes())?;
    let copy = copy_tree(&source, recursive)?;
    // Without a word, changes on the host show inside and not the other way (runc's rslave root).
    let (propagation, all) = mount.options.propagation.unwrap_or((libc::MS_SLAVE, true));
    if propagation != libc::MS_SHARED {
        let first = Attributes {
            propagation: libc::MS_SLAVE,
            ..Attributes::default()
        };
        change(copy.as_fd(), first, true)?;
        let wanted = Attributes {
            propagation,
            ..Attributes::default()
        };
        change(copy.as_fd(), wanted, all)?;
    }
    change(copy.as_fd(), mount.options.recursive, true)?;
    // Never makes writable what the host has read-only.
    let own = mount.options.attributes;
    let own = Attributes {
        clear: own.clear & !libc::MOUNT_ATTR_RDONLY,
        ..own
    };
    change(copy.as_fd(), own, false)?;
    let nodev = Attributes {
        set: nodev,
        ..Attributes::default()
    };
    change(copy.as_fd(), nodev, true)?;
    Ok(copy)
}

fn privatise(mount: &OwnedFd, attributes: Attributes) -> io::Result<()> {
    let attributes = Attributes {
        propagation: libc::MS_PRIVATE,
        ..attributes
    };
    change(mount.as_fd(), attributes, false)
}
