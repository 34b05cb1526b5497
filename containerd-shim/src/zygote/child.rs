//! The clone: follows its plan from an empty tree to the sandbox's program.
//!
//! Order matters throughout. cgroups come first, so that everything is accounted for; mounts are
//! made with all rights, then the user is changed, then the program is looked up as that user;
//! the filter comes last, because what we do after it, it must allow.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::gate::{self, Failure, Said};
use super::plan::{self, Index, Plan, Process, Streams};
use super::{identity, lookup, mounts};
use crate::sys::{privileges, process};

/// Exit code of a clone that could not become its program; the gate has said why.
const EXIT_FAILED: i32 = 255;

/// A step's result.
pub(super) type Step<T> = Result<T, Failure>;

/// Names the step that a system call belongs to.
pub(super) trait Context<T> {
    /// `step` is what was being done.
    fn step(self, step: impl FnOnce() -> String) -> Step<T>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn step(self, step: impl FnOnce() -> String) -> Step<T> {
        self.map_err(|error| {
            let error: io::Error = error.into();
            match error.raw_os_error() {
                Some(errno) => Failure {
                    step: step(),
                    errno,
                    detail: String::new(),
                },
                None => Failure {
                    step: step(),
                    errno: 0,
                    detail: error.to_string(),
                },
            }
        })
    }
}

/// The descriptor in a place of the plan.
pub(super) fn pick(fds: &[OwnedFd], index: Index) -> io::Result<BorrowedFd<'_>> {
    fds.get(usize::from(index))
        .map(AsFd::as_fd)
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
}

/// Follows the plan among `fds`; returns never.
pub(super) fn run(fds: Vec<OwnedFd>) -> ! {
    let Ok(gate) = pick(&fds, plan::GATE) else {
        process::exit(EXIT_FAILED)
    };
    if let Err(failure) = follow(&fds, gate) {
        // If nobody listens any more, nobody needs to know.
        let _ = gate::say(gate, &Said::Failed(failure), None);
    }
    process::exit(EXIT_FAILED)
}

fn read_plan(fds: &[OwnedFd]) -> io::Result<Plan> {
    let file = File::from(pick(fds, plan::PLAN)?.try_clone_to_owned()?);
    let mut bytes = Vec::new();
    file.take(plan::MAX_PLAN).read_to_end(&mut bytes)?;
    Plan::decode(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn follow(fds: &[OwnedFd], gate: BorrowedFd<'_>) -> Step<()> {
    let plan = read_plan(fds).step(|| "read the plan".into())?;
    for index in &plan.cgroups {
        let join = || nix::unistd::write(pick(fds, *index)?, b"0").map_err(io::Error::from);
        join().step(|| "join the cgroup".into())?;
    }
    for (index, kind) in &plan.join {
        let join = || process::join(pick(fds, *index)?, *kind);
        join().step(|| format!("join {}", namespace(*kind)))?;
    }
    if plan.new_cgroup_namespace {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWCGROUP)
            .step(|| "make a cgroup namespace".into())?;
    }
    if plan.loopback {
        process::loopback_up().step(|| "bring up the loopback interface".into())?;
    }
    nix::unistd::setsid().step(|| "make a session".into())?;
    privileges::own_keyring().step(|| "make a session keyring".into())?;
    // Modes are given in full where they matter.
    nix::sys::stat::umask(nix::sys::stat::Mode::empty());

    let made = match &plan.root {
        Some(root) => Some(mounts::assemble(root, fds)?),
        None => None,
    };
    let (streams, master) = streams(&plan.process, fds)?;
    name(&plan)?;
    if let Some(made) = made {
        sysctls(&plan)?;
        mounts::make_folder(&plan.process.cwd).step(|| cwd_step(&plan.process))?;
        mounts::finish(made)?;
    }
    let streams = reopen_null(streams)?;
    own_streams(&plan.process, &streams);
    let umask = plan.process.umask.unwrap_or(0o22);
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(umask));

    // Of the container's own file, while it can be read.
    let env = lookup::with_home(&plan.process);

    // A folder may be closed to root (an NFS export) or to the user.
    let entered = change_folder(&plan.process);
    let rights = identity::become_user(&plan.process)?;
    if entered.is_err() {
        change_folder(&plan.process).step(|| cwd_step(&plan.process))?;
    }
    inside().step(|| cwd_step(&plan.process))?;
    let program = lookup::find(&plan.process)?;
    let args = strings(&plan.process.args).step(|| "process.args".into())?;
    let env = strings(&env).step(|| "process.env".into())?;
    place(&plan.process, fds, &streams)?;
    process::reset_signals().step(|| "reset signals".into())?;

    gate::say(gate, &Said::Ready, master.as_ref().map(AsRawFd::as_raw_fd))
        .step(|| "say that all is ready".into())?;
    drop(master);
    if !gate::wait(gate).step(|| "wait for the word to start".into())? {
        process::exit(EXIT_FAILED);
    }
    identity::confine(&plan.process, rights)?;
    match process::exec_path(&program, &args, &env) {
        Err(error) => Err(lookup::exec_failure(&plan.process, &error)),
    }
}

fn namespace(kind: i32) -> String {
    let names = [
        (libc::CLONE_NEWUSER, "user"),
        (libc::CLONE_NEWNET, "network"),
        (libc::CLONE_NEWIPC, "ipc"),
        (libc::CLONE_NEWUTS, "uts"),
        (libc::CLONE_NEWNS, "mount"),
        (libc::CLONE_NEWCGROUP, "cgroup"),
    ];
    let names: Vec<_> = names
        .iter()
        .filter(|(flag, _)| kind & flag != 0)
        .map(|(_, name)| *name)
        .collect();
    format!("the {} namespace", names.join(", "))
}

fn name(plan: &Plan) -> Step<()> {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    if let Some(name) = &plan.hostname {
        nix::unistd::sethostname(OsStr::from_bytes(name)).step(|| "set the hostname".into())?;
    }
    if let Some(name) = &plan.domainname {
        mounts::write_proc(b"sys/kernel/domainname", name).step(|| "set the domainname".into())?;
    }
    Ok(())
}

fn sysctls(plan: &Plan) -> Step<()> {
    for (path, value) in &plan.sysctls {
        let path_in_proc = [b"sys/", path.as_slice()].concat();
        mounts::write_proc(&path_in_proc, value)
            .step(|| format!("set sysctl {:?}", String::from_utf8_lossy(path)))?;
    }
    Ok(())
}

/// The three streams, and the terminal's master if there is one.
fn streams(process: &Process, fds: &[OwnedFd]) -> Step<([OwnedFd; 3], Option<OwnedFd>)> {
    let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
    match &process.streams {
        Streams::Given(indices) => {
            let take = |index: Index| copy(pick(fds, index)?);
            let given =
                || io::Result::Ok([take(indices[0])?, take(indices[1])?, take(indices[2])?]);
            Ok((given().step(|| "open the streams".into())?, None))
        }
        Streams::Terminal {
            width,
            height,
            console,
        } => {
            let open = || -> io::Result<_> {
                let master = mounts::open_terminal()?;
                let slave = process::terminal_peer(master.as_fd())?;
                if *width > 0 && *height > 0 {
                    process::set_terminal_size(slave.as_fd(), *width, *height)?;
                }
                process::take_terminal(slave.as_fd())?;
                if *console {
                    mounts::show_console(slave.as_fd())?;
                }
                Ok((master, slave))
            };
            let (master, slave) = open().step(|| "open a terminal".into())?;
            let copies = || {
                io::Result::Ok([
                    copy(slave.as_fd())?,
                    copy(slave.as_fd())?,
                    copy(slave.as_fd())?,
                ])
            };
            Ok((copies().step(|| "open a terminal".into())?, Some(master)))
        }
    }
}

/// Puts the sandbox's own null device in place of the host's, whose owner and mode whoever holds it
/// open can change; as runc's reOpenDevNull.
fn reopen_null(streams: [OwnedFd; 3]) -> Step<[OwnedFd; 3]> {
    let reopen = |stream: OwnedFd| -> io::Result<OwnedFd> {
        if !is_null(&stream)? {
            return Ok(stream);
        }
        // Inside, it may have become anything.
        let flags = OFlag::O_RDWR
            | OFlag::O_CLOEXEC
            | OFlag::O_NOFOLLOW
            | OFlag::O_NONBLOCK
            | OFlag::O_NOCTTY;
        let own = nix::fcntl::open(c"/dev/null", flags, Mode::empty())?;
        if is_null(&own)? {
            Ok(own)
        } else {
            Err(io::Error::other("it is not the null device"))
        }
    };
    let [a, b, c] = streams;
    let all = || Ok([reopen(a)?, reopen(b)?, reopen(c)?]);
    let all: io::Result<_> = all();
    all.step(|| "open /dev/null".into())
}

fn is_null(stream: &OwnedFd) -> io::Result<bool> {
    let meta = nix::sys::stat::fstat(stream)?;
    let device = meta.st_mode & libc::S_IFMT == libc::S_IFCHR;
    Ok(device && meta.st_rdev == libc::makedev(1, 3))
}

/// Gives the streams to the user, who may open `/dev/stdout` again. Not possible for all kinds of
/// files, and then not needed; as runc's fixStdioPermissions.
fn own_streams(process: &Process, streams: &[OwnedFd; 3]) {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    for stream in streams {
        let Ok(meta) = stream
            .try_clone()
            .map(File::from)
            .and_then(|file| file.metadata())
        else {
            continue;
        };
        let null = meta.file_type().is_char_device() && meta.rdev() == libc::makedev(1, 3);
        if meta.uid() == process.uid || null {
            continue;
        }
        let uid = nix::unistd::Uid::from_raw(process.uid);
        let _ = nix::unistd::fchown(stream, Some(uid), None);
    }
}

/// Puts streams and control socket at their numbers and leaves nothing else open for the program.
fn place(process: &Process, fds: &[OwnedFd], streams: &[OwnedFd; 3]) -> Step<()> {
    let place = || -> io::Result<()> {
        // The socket to the holder is number 3, and everything of ours came after it: none of
        // these is overwritten before its turn.
        for (number, stream) in (0..).zip(streams) {
            // SAFETY: nothing in this process owns 0, 1 or 2.
            #[expect(unsafe_code, reason = "see above")]
            unsafe {
                process::place(stream.as_fd(), number)?;
            }
        }
        process::close_on_exec_from(3)?;
        if let Some(index) = process.control {
            // SAFETY: number 3 is owned by the zygote's frame, which is never returned to here.
            #[expect(unsafe_code, reason = "see above")]
            unsafe {
                process::place(pick(fds, index)?, 3)?;
            }
        }
        Ok(())
    };
    place().step(|| "place the streams".into())
}

fn cwd_step(process: &Process) -> String {
    format!(
        "chdir to cwd ({:?}) set in config.json failed",
        String::from_utf8_lossy(&process.cwd)
    )
}

fn change_folder(process: &Process) -> io::Result<()> {
    let path = CString::new(process.cwd.as_slice())?;
    Ok(nix::unistd::chdir(path.as_c_str())?)
}

/// A working directory outside of the root would be a way out of it (CVE-2024-21626).
fn inside() -> io::Result<()> {
    let cwd = nix::unistd::getcwd()?;
    if cwd.is_absolute() {
        return Ok(());
    }
    Err(io::Error::other(
        "the working directory is outside of the root",
    ))
}

fn strings(words: &[Vec<u8>]) -> io::Result<Vec<CString>> {
    words
        .iter()
        .map(|word| Ok(CString::new(word.as_slice())?))
        .collect()
}

/// Writes all of `value` at once, as kernel files want it.
pub(super) fn write_once(mut file: File, value: &[u8]) -> io::Result<()> {
    match file.write(value)? {
        written if written == value.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}
