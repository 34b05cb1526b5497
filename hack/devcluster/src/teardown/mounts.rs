//! Mounts and loop devices below the cluster's folders. Read from the kernel, newest first, for one
//! mount may hide or hold another.

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

/// Mount points at or below a folder, the newest first.
pub(super) fn below(root: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    parse_below(&table, root)
}

fn parse_below(table: &str, root: &Path) -> Vec<PathBuf> {
    let mut points: Vec<_> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescape)
        .filter(|point| point.starts_with(root))
        .collect();
    points.reverse();
    points
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let digits = tail
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(value) if byte == b'\\' => {
                bytes.push(value);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

/// Unmounts all below a folder; gives their number. One that is busy is detached, and goes with its
/// last user.
pub(super) fn unmount_below(root: &Path) -> anyhow::Result<usize> {
    let mut total = 0;
    loop {
        let mut unmounted = 0;
        for point in below(root) {
            let flags = MntFlags::UMOUNT_NOFOLLOW;
            let result = match umount2(&point, flags) {
                Err(Errno::EBUSY) => umount2(&point, flags | MntFlags::MNT_DETACH),
                other => other,
            };
            match result {
                Ok(()) => unmounted += 1,
                // Gone with the one above it.
                Err(Errno::EINVAL | Errno::ENOENT) => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot unmount {}", point.display()));
                }
            }
        }
        if unmounted == 0 {
            return Ok(total);
        }
        total += unmounted;
    }
}

/// Loop devices that show a file below a folder.
pub(super) fn loop_devices(root: &Path) -> Vec<(PathBuf, PathBuf)> {
    let Ok(devices) = fs::read_dir("/sys/block") else {
        return Vec::new();
    };
    devices
        .flatten()
        .filter_map(|device| {
            let backing = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
            // The kernel marks a file that was removed.
            let file = PathBuf::from(backing.trim_end().trim_end_matches(" (deleted)"));
            let node = Path::new("/dev").join(device.file_name());
            file.starts_with(root).then_some((node, file))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_path_newest_first() {
        let table = "\
1 0 8:1 / / rw - ext4 /dev/a rw
2 1 0:2 / /run/sandman-a rw - tmpfs x rw
3 1 0:2 / /run/sandman-ab rw - tmpfs x rw
4 2 0:3 / /run/sandman-a/with\\040space rw - tmpfs x rw
";
        assert_eq!(
            parse_below(table, Path::new("/run/sandman-a")),
            [
                Path::new("/run/sandman-a/with space"),
                Path::new("/run/sandman-a")
            ]
        );
    }

    #[test]
    fn escapes_are_undone() {
        assert_eq!(unescape("a\\040b\\134c"), Path::new("a b\\c"));
        assert_eq!(unescape("a\\"), Path::new("a\\"));
        assert_eq!(unescape("a\\9999"), Path::new("a\\9999"));
    }
}
