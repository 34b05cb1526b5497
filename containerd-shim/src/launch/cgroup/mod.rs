//! A sandbox's cgroup, behind one interface for v1 and v2.
//!
//! No cpuset, devices or named hierarchy: making a cgroup there costs more the more there are. A
//! v1 freezer is made when something is to be frozen. What was there before, we leave.
//!
//! A sandbox without a memory limit may be put into a memory cgroup that it shares: each of its
//! own costs the kernel memory in proportion to all mounts that there ever were.

mod hierarchy;
mod values;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use oci_spec::runtime::LinuxResources;

pub use self::hierarchy::Hierarchies;

use crate::zygote::gate::words;

/// v1 hierarchies that each sandbox has a folder in.
const CONTROLLERS: [&str; 4] = ["memory", "cpu", "cpuacct", "pids"];
const FREEZER: &str = "freezer";
/// Annotation of a spec without a memory limit: the memory cgroup that the sandbox shares.
pub const MEMORY_ANNOTATION: &str = "sandman.dev/memory-cgroup";

/// A cgroup by its path; holds nothing open and can be made again from the path at any time.
#[derive(Clone, Debug)]
pub struct Cgroup {
    hierarchies: Hierarchies,
    path: PathBuf,
    /// Where its memory counts, if not by itself.
    memory: Option<PathBuf>,
}

fn context(error: &io::Error, what: &str, path: &Path) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("{what} {}: {}", path.display(), words(error)),
    )
}

impl Cgroup {
    /// The cgroup at `path` of the spec (`cgroupsPath`), on this host's hierarchies.
    ///
    /// # Errors
    /// No cgroup file system is mounted, or `path` leads out of it.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::on(Hierarchies::detect()?, path)
    }

    /// The same on given hierarchies.
    ///
    /// # Errors
    /// `path` leads out of them.
    pub fn on(hierarchies: Hierarchies, path: &Path) -> io::Result<Self> {
        Ok(Self {
            hierarchies,
            path: relative(path, "linux.cgroupsPath")?,
            memory: None,
        })
    }

    /// The same, with its memory counted in a cgroup above it, which others share.
    ///
    /// # Errors
    /// `path` is none above it.
    pub fn with_memory_in(mut self, path: Option<&Path>) -> io::Result<Self> {
        let memory = path.map(|path| relative(path, MEMORY_ANNOTATION));
        self.memory = memory.transpose()?;
        let memory = self.memory.as_ref();
        if memory.is_some_and(|it| *it == self.path || !self.path.starts_with(it)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{MEMORY_ANNOTATION} is no cgroup above linux.cgroupsPath"),
            ));
        }
        Ok(self)
    }

    /// Its path below the root of each hierarchy.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this host has cgroup v2 only.
    #[must_use]
    pub fn is_v2(&self) -> bool {
        matches!(self.hierarchies, Hierarchies::Unified(_))
    }

    /// Its folder for a controller; on v2 the one folder. `None` where the host lacks it.
    #[must_use]
    pub fn folder(&self, controller: &str) -> Option<PathBuf> {
        self.hierarchies
            .root(controller)
            .map(|root| root.join(&self.path))
    }

    fn folders(&self) -> Vec<PathBuf> {
        let shared = self.memory.is_some() && !self.is_v2();
        let mut folders: Vec<PathBuf> = CONTROLLERS
            .iter()
            .filter(|controller| !(shared && **controller == "memory"))
            .filter_map(|controller| self.folder(controller))
            .collect();
        // Several controllers may share one v1 mount; on v2 all do.
        folders.dedup();
        folders
    }

    /// The folder that its memory counts in with that of others; v1.
    fn shared_memory(&self) -> Option<PathBuf> {
        match (&self.memory, &self.hierarchies) {
            (Some(path), Hierarchies::Legacy(roots)) => Some(roots.get("memory")?.join(path)),
            _ => None,
        }
    }

    /// Makes the folders and sets the limits. Made already and without processes is fine.
    ///
    /// # Errors
    /// Processes are in it, or a limit is refused; the text names file and value.
    pub fn create(&self, resources: &LinuxResources) -> io::Result<()> {
        if let Hierarchies::Unified(root) = &self.hierarchies {
            hierarchy::delegate(root, &self.path, self.memory.as_deref())?;
        }
        for folder in self.folders().into_iter().chain(self.shared_memory()) {
            fs::create_dir_all(&folder).map_err(|e| context(&e, "make", &folder))?;
        }
        if !self.pids()?.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("cgroup {:?} has processes", self.path.display()),
            ));
        }
        self.update(resources)
    }

    /// Sets limits; what `resources` does not name stays.
    ///
    /// # Errors
    /// A limit is refused; the text names file and value.
    pub fn update(&self, resources: &LinuxResources) -> io::Result<()> {
        let writes = if self.is_v2() {
            values::unified(resources)
        } else {
            values::legacy(resources)
        };
        if self.memory.is_some() && writes.iter().any(|write| write.controller == "memory") {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "linux.resources.memory: this sandbox shares its memory cgroup with others, and can \
                 have no limit of its own",
            ));
        }
        let mut last = Ok(());
        for values::Write {
            controller,
            file,
            value,
        } in &writes
        {
            let Some(folder) = self.folder(controller) else {
                continue;
            };
            let path = folder.join(file);
            match write(&path, value) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    // Memory and swap bound each other: what is refused now may be right after
                    // the other one has been set.
                    last = Err(context(&error, &format!("write {value:?} to"), &path));
                }
                Ok(()) => {}
            }
        }
        if last.is_ok() {
            return last;
        }
        for values::Write {
            controller,
            file,
            value,
        } in &writes
        {
            let Some(folder) = self.folder(controller) else {
                continue;
            };
            let path = folder.join(file);
            match write(&path, value) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(context(&error, &format!("write {value:?} to"), &path));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// `cgroup.procs` files for a process to put itself in.
    ///
    /// # Errors
    /// It is not made.
    pub fn procs(&self) -> io::Result<Vec<OwnedFd>> {
        let open = |folder: &PathBuf| {
            let path = folder.join("cgroup.procs");
            let file = OpenOptions::new().write(true).open(&path);
            file.map(OwnedFd::from)
                .map_err(|e| context(&e, "open", &path))
        };
        let folders = self.folders();
        folders
            .iter()
            .chain(&self.shared_memory())
            .map(open)
            .collect()
    }

    /// Processes in it and below, as this PID namespace numbers them.
    ///
    /// # Errors
    /// Reading fails; a folder that is not there has none.
    pub fn pids(&self) -> io::Result<Vec<i32>> {
        let mut pids = Vec::new();
        let any = || self.folders().into_iter().next();
        if let Some(folder) = self.folder("pids").or_else(any) {
            collect(&folder, &mut pids)?;
        }
        Ok(pids)
    }

    /// Contents of one of its files.
    ///
    /// # Errors
    /// `NotFound` where host or kernel lack it.
    pub fn read(&self, controller: &str, file: &str) -> io::Result<String> {
        let folder = self.folder(controller).ok_or(io::ErrorKind::NotFound)?;
        fs::read_to_string(folder.join(file))
    }

    /// Processes in it that the kernel has killed for lack of memory; 0 if it cannot be asked.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        let file = if self.is_v2() {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        let text = self.read("memory", file).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or_default()
    }

    /// Signals all processes in it and below. `SIGKILL` reaches those that fork meanwhile on v2 only.
    ///
    /// # Errors
    /// Reading or writing its files fails.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        if let (true, Signal::SIGKILL, Some(folder)) = (self.is_v2(), signal, self.folder("memory"))
        {
            match write(&folder.join("cgroup.kill"), "1") {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => return other,
            }
        }
        for pid in self.pids()? {
            match nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal) {
                Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Asks the kernel to freeze all its processes; [`Cgroup::frozen`] tells when they are.
    ///
    /// # Errors
    /// The host has no freezer, or writing fails.
    pub fn freeze(&self) -> io::Result<()> {
        if self.is_v2() {
            return self.write_unified("cgroup.freeze", "1");
        }
        let folder = self.folder(FREEZER).ok_or_else(no_freezer)?;
        fs::create_dir_all(&folder)?;
        // What forks meanwhile forks into the same old cgroup: until nobody is left there.
        loop {
            let inside = {
                let mut inside = Vec::new();
                collect(&folder, &mut inside)?;
                inside
            };
            let outside: Vec<i32> = self
                .pids()?
                .into_iter()
                .filter(|pid| !inside.contains(pid))
                .collect();
            if outside.is_empty() {
                break;
            }
            for pid in outside {
                match write(&folder.join("cgroup.procs"), &pid.to_string()) {
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    other => other?,
                }
            }
        }
        write(&folder.join("freezer.state"), "FROZEN")
    }

    /// Lets its processes go on.
    ///
    /// # Errors
    /// Writing fails; one that was never frozen is fine.
    pub fn thaw(&self) -> io::Result<()> {
        if self.is_v2() {
            return self.write_unified("cgroup.freeze", "0");
        }
        let Some(folder) = self.folder(FREEZER) else {
            return Ok(());
        };
        match write(&folder.join("freezer.state"), "THAWED") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Whether all its processes are frozen.
    ///
    /// # Errors
    /// Reading fails; one that was never frozen is not.
    pub fn frozen(&self) -> io::Result<bool> {
        let text = if self.is_v2() {
            self.read("memory", "cgroup.events")
                .map(|text| text.contains("frozen 1"))
        } else {
            self.read(FREEZER, "freezer.state")
                .map(|text| text.trim() == "FROZEN")
        };
        match text {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            other => other,
        }
    }

    fn write_unified(&self, file: &str, value: &str) -> io::Result<()> {
        let folder = self.folder("memory").ok_or(io::ErrorKind::NotFound)?;
        write(&folder.join(file), value)
    }

    /// Removes its folders and those below. What is gone already is fine.
    ///
    /// # Errors
    /// `ResourceBusy` while processes are in it: try again when they have ended.
    pub fn remove(&self) -> io::Result<()> {
        let freezer = if self.is_v2() {
            None
        } else {
            self.folder(FREEZER)
        };
        for folder in self.folders().into_iter().chain(freezer) {
            remove(&folder).map_err(|e| context(&e, "remove", &folder))?;
        }
        Ok(())
    }
}

fn relative(path: &Path, field: &str) -> io::Result<PathBuf> {
    use std::path::Component;
    let relative: PathBuf = path
        .components()
        .filter(|part| *part != Component::RootDir)
        .collect();
    let normal = |part| matches!(part, Component::Normal(_));
    if relative.as_os_str().is_empty() || !relative.components().all(normal) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{field} {:?} is no path below the root", path.display()),
        ));
    }
    Ok(relative)
}

fn no_freezer() -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        "this host has no freezer cgroup",
    )
}

/// Writes a kernel file in one piece.
fn write(path: &Path, value: &str) -> io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).open(path)?;
    file.write_all(value.as_bytes())
}

fn below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut folders = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

fn collect(folder: &Path, pids: &mut Vec<i32>) -> io::Result<()> {
    let text = match fs::read_to_string(folder.join("cgroup.procs")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    pids.extend(
        text.lines()
            .filter_map(|line| line.parse::<i32>().ok())
            .filter(|pid| *pid > 0),
    );
    for child in below(folder)? {
        collect(&child, pids)?;
    }
    Ok(())
}

fn remove(folder: &Path) -> io::Result<()> {
    for child in below(folder)? {
        remove(&child)?;
    }
    // Pages of files that it read would keep a removed v1 memory cgroup, and what the kernel holds
    // for it, until memory is short. Other folders have no such file.
    let _ = write(&folder.join("memory.force_empty"), "0");
    match fs::remove_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn legacy(root: &Path) -> Hierarchies {
        let roots = CONTROLLERS.map(|name| (name.to_owned(), root.join(name)));
        Hierarchies::Legacy(roots.into())
    }

    #[test]
    fn shared_memory_is_joined_and_neither_limited_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let host = legacy(dir.path());
        let cgroup = Cgroup::on(host, Path::new("/h/class/pod/c")).unwrap();
        for outside in ["/h/other", "/h/class/pod/c", "/"] {
            let refused = cgroup.clone().with_memory_in(Some(Path::new(outside)));
            assert!(refused.is_err(), "{outside}");
        }
        let cgroup = cgroup.with_memory_in(Some(Path::new("/h/class"))).unwrap();
        cgroup.create(&LinuxResources::default()).unwrap();
        let shared = dir.path().join("memory/h/class");
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
        assert!(dir.path().join("pids/h/class/pod/c").is_dir());

        for folder in cgroup.folders().into_iter().chain([shared.clone()]) {
            fs::write(folder.join("cgroup.procs"), "").unwrap();
        }
        assert_eq!(cgroup.procs().unwrap().len(), CONTROLLERS.len());
        // Those of its neighbours are none of its own.
        fs::write(shared.join("cgroup.procs"), "4194305\n").unwrap();
        assert!(cgroup.pids().unwrap().is_empty());

        let limit = serde_json::json!({"memory": {"limit": 4096}});
        let limit = serde_json::from_value(limit).unwrap();
        let refused = cgroup.update(&limit).unwrap_err().to_string();
        assert!(refused.starts_with("linux.resources.memory"), "{refused}");

        for folder in cgroup.folders() {
            fs::remove_file(folder.join("cgroup.procs")).unwrap();
        }
        cgroup.remove().unwrap();
        assert!(shared.is_dir() && !dir.path().join("pids/h/class/pod/c").exists());
    }
}
