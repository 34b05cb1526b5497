//! What the host has left, and what a folder of a sandbox takes of it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{SFlag, fstatat};
use nix::sys::statvfs::statvfs;

use super::rank::Disk;
use super::threshold::{Level, Levels, Signal};

/// Unit of `st_blocks`.
const BLOCK: u64 = 512;
/// Folders open at a time. A tree that is nested deeper counts as endless: it must not hide what
/// is in it from a limit.
const MAX_DEPTH: usize = 256;

/// Reads all signals. `images` is the folder of containerd's snapshots, if it is known; on the
/// file system of `data_dir` it has no signals of its own.
pub(super) fn levels(data_dir: &Path, images: Option<&Path>) -> Levels {
    let mut levels = Levels::new();
    if let Some(level) = memory() {
        levels.insert(Signal::Memory, level);
    }
    file_system(&mut levels, data_dir, Signal::Disk, Signal::DiskInodes);
    let device = |path: &Path| {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::metadata(path).map(|metadata| metadata.dev()).ok()
    };
    if let Some(images) = images
        && device(images) != device(data_dir)
    {
        file_system(&mut levels, images, Signal::Image, Signal::ImageInodes);
    }
    if let Some(level) = pids() {
        levels.insert(Signal::Pids, level);
    }
    levels
}

fn file_system(levels: &mut Levels, path: &Path, space: Signal, inodes: Signal) {
    let Ok(fs) = statvfs(path) else {
        return;
    };
    let unit = fs.fragment_size();
    levels.insert(
        space,
        Level {
            available: fs.blocks_available().saturating_mul(unit),
            capacity: fs.blocks().saturating_mul(unit),
        },
    );
    // btrfs and others have no number of inodes to run out of.
    if fs.files() > 0 {
        levels.insert(
            inodes,
            Level {
                available: fs.files_available(),
                capacity: fs.files(),
            },
        );
    }
}

fn memory() -> Option<Level> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some(Level {
        available: meminfo(&text, "MemAvailable")?,
        capacity: meminfo(&text, "MemTotal")?,
    })
}

/// A line of `/proc/meminfo`, in bytes.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

fn pids() -> Option<Level> {
    let number =
        |path: &str| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let limits = [
        number("/proc/sys/kernel/pid_max"),
        number("/proc/sys/kernel/threads-max"),
    ];
    let capacity = limits.into_iter().flatten().min()?;
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    let (_, threads) = load.split_whitespace().nth(3)?.split_once('/')?;
    Some(Level {
        available: capacity.saturating_sub(threads.parse().ok()?),
        capacity,
    })
}

/// Disk that a tree takes, which a container may be changing all the while: links are not
/// followed and other file systems not entered. A missing one takes nothing.
pub(crate) fn tree(path: &Path) -> io::Result<Disk> {
    let top = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Disk::default()),
        other => other?,
    };
    let mut sum = Disk {
        bytes: 0,
        inodes: 1,
    };
    count(&OwnedFd::from(top), 0, &mut sum)?;
    Ok(sum)
}

fn count(folder: &OwnedFd, depth: usize, sum: &mut Disk) -> io::Result<()> {
    if depth >= MAX_DEPTH {
        sum.bytes = u64::MAX;
        return Ok(());
    }
    let listed = within(folder, c".")?;
    for entry in Dir::from_fd(listed)?.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = match fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => continue,
            other => other?,
        };
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        // A file with several names is counted once for each, as nobody keeps a list here.
        sum.bytes = sum.bytes.saturating_add(blocks.saturating_mul(BLOCK));
        sum.inodes = sum.inodes.saturating_add(1);
        if SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR {
            match within(folder, name) {
                Ok(below) => count(&below, depth + 1, sum)?,
                // Gone, another kind by now, or a mount point.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EXDEV)
                    ) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

fn within(folder: &OwnedFd, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_XDEV,
        );
    openat2(folder.as_fd(), name, how).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_levels() {
        let folder = tempfile::tempdir().unwrap();
        let levels = levels(folder.path(), Some(folder.path()));
        for signal in [Signal::Memory, Signal::Disk, Signal::Pids] {
            let level = levels[&signal];
            assert!(
                level.available > 0 && level.available <= level.capacity,
                "{signal:?} {level:?}"
            );
        }
        assert!(!levels.contains_key(&Signal::Image));
        assert_eq!(meminfo("MemTotal:  12 kB\n", "MemTotal"), Some(12 << 10));
        assert_eq!(meminfo("MemTotal:  x kB\n", "MemTotal"), None);
    }

    #[test]
    fn a_tree_is_counted_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("tree");
        assert_eq!(tree(&root).unwrap(), Disk::default());
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/b/file"), vec![1; 100_000]).unwrap();
        std::os::unix::fs::symlink("/usr", root.join("link")).unwrap();
        // A sparse file takes no more than what was written.
        let sparse = File::create(root.join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        let disk = tree(&root).unwrap();
        assert_eq!(disk.inodes, 6);
        assert!((100_000..1 << 20).contains(&disk.bytes), "{disk:?}");
    }

    #[test]
    fn depth_hides_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut path = folder.path().to_owned();
        for _ in 0..MAX_DEPTH {
            path.push("d");
        }
        std::fs::create_dir_all(&path).unwrap();
        assert_eq!(tree(folder.path()).unwrap().bytes, u64::MAX);
    }
}
