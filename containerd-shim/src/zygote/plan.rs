//! What a clone has to do to become a sandbox's process: everything is decided, nothing is left
//! to look up but what only exists inside.
//!
//! Descriptors are meant by their place among those that came along: the plan is 0, the gate 1.

use crate::sys::mount::Attributes;
use crate::sys::privileges::Instruction;
use crate::wire::{Malformed, Reader, Writer};

/// Place of the plan among the descriptors.
pub const PLAN: u8 = 0;
/// Place of the sandbox's end of the gate.
pub const GATE: u8 = 1;

/// Longest plan in bytes: a command line may be 2 MiB, and so may the environment.
pub const MAX_PLAN: u64 = 8 * 1024 * 1024;

/// A descriptor's place.
pub type Index = u8;

/// A whole plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// `cgroup.procs` files to join (cgroup v1, and a joined v2 folder).
    pub cgroups: Vec<Index>,
    /// Namespaces to join in this order, with their `CLONE_NEW*` kinds.
    pub join: Vec<(Index, i32)>,
    /// A cgroup namespace, rooted where the process is then.
    pub new_cgroup_namespace: bool,
    /// Bring `lo` up: the network namespace is new.
    pub loopback: bool,
    /// The file system to live in; absent when joining a sandbox that has one.
    pub root: Option<Root>,
    /// Host name of the UTS namespace.
    pub hostname: Option<Vec<u8>>,
    /// NIS domain name of the UTS namespace.
    pub domainname: Option<Vec<u8>>,
    /// Files below `/proc/sys` and their values.
    pub sysctls: Vec<(Vec<u8>, Vec<u8>)>,
    /// The process.
    pub process: Process,
}

/// A sandbox's tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Root {
    /// Detached mount of `/`.
    pub mount: Index,
    /// Read-only once everything is mounted.
    pub readonly: bool,
    /// In this order.
    pub mounts: Vec<Mount>,
    /// Detached mount of an empty folder, to hide folders under.
    pub empty: Index,
    /// Paths to hide.
    pub masked: Vec<Vec<u8>>,
    /// Paths to make read-only.
    pub readonly_paths: Vec<Vec<u8>>,
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Absolute path inside, without `..`.
    pub target: Vec<u8>,
    /// What.
    pub source: Source,
    /// Attributes to set once all mounts are in place, such as read-only: others may need to make
    /// their mount points in this one first.
    pub late: Attributes,
}

/// What is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A detached mount, ready to be attached.
    Detached(Index),
    /// A file system that belongs to the sandbox's own namespaces: `proc`, `sysfs`, `mqueue`,
    /// `devpts`, `cgroup2`.
    New {
        /// Its type.
        kind: Vec<u8>,
        /// `MOUNT_ATTR_*`.
        attributes: u64,
        /// Options; without a value, a flag.
        options: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    },
}

/// Where the standard streams come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Streams {
    /// These three descriptors.
    Given([Index; 3]),
    /// A new terminal, of this width and height in characters; its master goes to the shim.
    Terminal {
        /// Columns; 0 leaves the kernel's default.
        width: u16,
        /// Rows.
        height: u16,
        /// Show it as `/dev/console` too.
        console: bool,
    },
}

impl Default for Streams {
    fn default() -> Self {
        Self::Given([0; 3])
    }
}

/// Capability sets, a bit each by the kernel's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Bounding.
    pub bounding: u64,
    /// Effective.
    pub effective: u64,
    /// Permitted.
    pub permitted: u64,
    /// Inheritable.
    pub inheritable: u64,
    /// Ambient.
    pub ambient: u64,
}

/// A seccomp filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seccomp {
    /// `SECCOMP_FILTER_FLAG_*`.
    pub flags: u32,
    /// The program.
    pub program: Vec<Instruction>,
}

/// The process to become.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Program and arguments.
    pub args: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub env: Vec<Vec<u8>>,
    /// Working directory; made if missing and there is a root to make it in.
    pub cwd: Vec<u8>,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
    /// File mode mask.
    pub umask: Option<u32>,
    /// Capabilities; none means all sets empty.
    pub capabilities: Capabilities,
    /// `RLIMIT_*`, soft, hard.
    pub limits: Vec<(u32, u64, u64)>,
    /// Set no_new_privs.
    pub no_new_privileges: bool,
    /// Filter.
    pub seccomp: Option<Seccomp>,
    /// Standard streams.
    pub streams: Streams,
    /// The agent's socket, to be its descriptor 3.
    pub control: Option<Index>,
}

impl Plan {
    /// The plan's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.list(&self.cgroups, |w, index| w.u8(*index));
        w.list(&self.join, |w, (index, kind)| {
            w.u8(*index);
            w.i32(*kind);
        });
        w.bool(self.new_cgroup_namespace);
        w.bool(self.loopback);
        w.option(self.root.as_ref(), |w, root| root.write(w));
        w.option(self.hostname.as_ref(), |w, name| w.bytes(name));
        w.option(self.domainname.as_ref(), |w, name| w.bytes(name));
        w.list(&self.sysctls, |w, (path, value)| {
            w.bytes(path);
            w.bytes(value);
        });
        self.process.write(&mut w);
        w.finish()
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let r = &mut reader;
        let plan = Self {
            cgroups: r.list(Reader::u8)?,
            join: r.list(|r| Ok((r.u8()?, r.i32()?)))?,
            new_cgroup_namespace: r.bool()?,
            loopback: r.bool()?,
            root: r.option(Root::read)?,
            hostname: r.option(owned)?,
            domainname: r.option(owned)?,
            sysctls: r.list(|r| Ok((owned(r)?, owned(r)?)))?,
            process: Process::read(r)?,
        };
        reader.end()?;
        Ok(plan)
    }
}

fn owned(r: &mut Reader<'_>) -> Result<Vec<u8>, Malformed> {
    r.bytes().map(<[u8]>::to_vec)
}

impl Root {
    fn write(&self, w: &mut Writer) {
        w.u8(self.mount);
        w.bool(self.readonly);
        w.list(&self.mounts, |w, mount| mount.write(w));
        w.u8(self.empty);
        w.list(&self.masked, |w, path| w.bytes(path));
        w.list(&self.readonly_paths, |w, path| w.bytes(path));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            mount: r.u8()?,
            readonly: r.bool()?,
            mounts: r.list(Mount::read)?,
            empty: r.u8()?,
            masked: r.list(owned)?,
            readonly_paths: r.list(owned)?,
        })
    }
}

impl Mount {
    fn write(&self, w: &mut Writer) {
        w.bytes(&self.target);
        match &self.source {
            Source::Detached(index) => {
                w.u8(0);
                w.u8(*index);
            }
            Source::New {
                kind,
                attributes,
                options,
            } => {
                w.u8(1);
                w.bytes(kind);
                w.u64(*attributes);
                w.list(options, |w, (key, value)| {
                    w.bytes(key);
                    w.option(value.as_ref(), |w, value| w.bytes(value));
                });
            }
        }
        w.u64(self.late.set);
        w.u64(self.late.clear);
        w.u64(self.late.propagation);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let target = owned(r)?;
        let source = match r.u8()? {
            0 => Source::Detached(r.u8()?),
            1 => Source::New {
                kind: owned(r)?,
                attributes: r.u64()?,
                options: r.list(|r| Ok((owned(r)?, r.option(owned)?)))?,
            },
            _ => return Err(Malformed("mount source")),
        };
        let late = Attributes {
            set: r.u64()?,
            clear: r.u64()?,
            propagation: r.u64()?,
        };
        Ok(Self {
            target,
            source,
            late,
        })
    }
}

impl Process {
    fn write(&self, w: &mut Writer) {
        w.list(&self.args, |w, word| w.bytes(word));
        w.list(&self.env, |w, variable| w.bytes(variable));
        w.bytes(&self.cwd);
        w.u32(self.uid);
        w.u32(self.gid);
        w.list(&self.groups, |w, group| w.u32(*group));
        w.option(self.umask.as_ref(), |w, mask| w.u32(*mask));
        let caps = &self.capabilities;
        for set in [
            caps.bounding,
            caps.effective,
            caps.permitted,
            caps.inheritable,
            caps.ambient,
        ] {
            w.u64(set);
        }
        w.list(&self.limits, |w, (resource, soft, hard)| {
            w.u32(*resource);
            w.u64(*soft);
            w.u64(*hard);
        });
        w.bool(self.no_new_privileges);
        w.option(self.seccomp.as_ref(), |w, seccomp| {
            w.u32(seccomp.flags);
            w.list(&seccomp.program, |w, instruction| {
                w.u32(instruction.code.into());
                w.u8(instruction.jt);
                w.u8(instruction.jf);
                w.u32(instruction.k);
            });
        });
        match &self.streams {
            Streams::Given(indices) => {
                w.u8(0);
                for index in indices {
                    w.u8(*index);
                }
            }
            Streams::Terminal {
                width,
                height,
                console,
            } => {
                w.u8(1);
                w.u32((*width).into());
                w.u32((*height).into());
                w.bool(*console);
            }
        }
        w.option(self.control.as_ref(), |w, index| w.u8(*index));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            args: r.list(owned)?,
            env: r.list(owned)?,
            cwd: owned(r)?,
            uid: r.u32()?,
            gid: r.u32()?,
            groups: r.list(Reader::u32)?,
            umask: r.option(Reader::u32)?,
            capabilities: Capabilities {
                bounding: r.u64()?,
                effective: r.u64()?,
                permitted: r.u64()?,
                inheritable: r.u64()?,
                ambient: r.u64()?,
            },
            limits: r.list(|r| Ok((r.u32()?, r.u64()?, r.u64()?)))?,
            no_new_privileges: r.bool()?,
            seccomp: r.option(|r| {
                Ok(Seccomp {
                    flags: r.u32()?,
                    program: r.list(|r| {
                        Ok(Instruction {
                            code: short(r)?,
                            jt: r.u8()?,
                            jf: r.u8()?,
                            k: r.u32()?,
                        })
                    })?,
                })
            })?,
            streams: match r.u8()? {
                0 => Streams::Given([r.u8()?, r.u8()?, r.u8()?]),
                1 => Streams::Terminal {
                    width: short(r)?,
                    height: short(r)?,
                    console: r.bool()?,
                },
                _ => return Err(Malformed("streams")),
            },
            control: r.option(Reader::u8)?,
        })
    }
}

fn short(r: &mut Reader<'_>) -> Result<u16, Malformed> {
    u16::try_from(r.u32()?).map_err(|_| Malformed("u16"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_survive_the_wire() {
        let full = Plan {
            cgroups: vec![2, 3],
            join: vec![(4, libc::CLONE_NEWNET)],
            new_cgroup_namespace: true,
            loopback: true,
            root: Some(Root {
                mount: 5,
                readonly: true,
                mounts: vec![
                    Mount {
                        target: b"/data".to_vec(),
                        source: Source::Detached(6),
                        late: Attributes {
                            set: 1,
                            clear: 2,
                            propagation: 3,
                        },
                    },
                    Mount {
                        target: b"/proc".to_vec(),
                        source: Source::New {
                            kind: b"proc".to_vec(),
                            attributes: 14,
                            options: vec![
                                (b"newinstance".to_vec(), None),
                                (b"gid".to_vec(), Some(b"5".to_vec())),
                            ],
                        },
                        late: Attributes::default(),
                    },
                ],
                empty: 7,
                masked: vec![b"/proc/kcore".to_vec()],
                readonly_paths: vec![b"/proc/sys".to_vec()],
            }),
            hostname: Some(b"h".to_vec()),
            domainname: Some(b"d".to_vec()),
            sysctls: vec![(b"net/core/somaxconn".to_vec(), b"9".to_vec())],
            process: Process {
                args: vec![b"sh".to_vec()],
                env: vec![b"A=b".to_vec()],
                cwd: b"/".to_vec(),
                uid: 1,
                gid: 2,
                groups: vec![3, 4],
                umask: Some(0o27),
                capabilities: Capabilities {
                    bounding: 1,
                    effective: 2,
                    permitted: 3,
                    inheritable: 4,
                    ambient: 5,
                },
                limits: vec![(7, 1024, u64::MAX)],
                no_new_privileges: true,
                seccomp: Some(Seccomp {
                    flags: 2,
                    program: vec![Instruction {
                        code: 0x15,
                        jt: 1,
                        jf: 2,
                        k: 3,
                    }],
                }),
                streams: Streams::Terminal {
                    width: 80,
                    height: 25,
                    console: true,
                },
                control: Some(9),
            },
        };
        let small = Plan::default();
        for plan in [full, small] {
            let bytes = plan.encode();
            assert_eq!(Plan::decode(&bytes), Ok(plan));
            // Cut anywhere, it is refused.
            for end in 0..bytes.len() {
                assert!(Plan::decode(&bytes[..end]).is_err(), "{end}");
            }
        }
    }
}
