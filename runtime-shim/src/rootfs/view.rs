//! A read-only look into a prepared root file system, without leaving a mount behind.
//!
//! The root is an overlay whose upper layer is still empty, so its lower layers are the whole
//! truth. One layer is opened as it is; several are joined by an overlay that is detached from
//! the tree at once and lives only as long as the descriptor.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::chdir;

use crate::runtime::RootMount;

/// Opens the root's top directory.
pub(super) fn open(root: &[RootMount], view_dir: &Path) -> io::Result<OwnedFd> {
    let Some(top) = root.last() else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the snapshot has no mounts",
        ));
    };
    match top.r#type.as_str() {
        "bind" => open_dir(Path::new(&top.source)),
        "overlay" => match lower_dirs(top).as_slice() {
            [] => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "overlay without lowerdir",
            )),
            [only] => open_dir(only),
            several => open_joined(several, view_dir),
        },
        other => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("cannot look into a root of type {other:?}"),
        )),
    }
}

/// Mounts the root's files at a folder, read-only and without anything to be run.
pub(super) fn mount_at(root: &[RootMount], point: &Path) -> io::Result<()> {
    let Some(top) = root.last() else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the snapshot has no mounts",
        ));
    };
    match (top.r#type.as_str(), lower_dirs(top).as_slice()) {
        ("bind", _) => bind_read_only(Path::new(&top.source), point),
        ("overlay", [only]) => bind_read_only(only, point),
        ("overlay", several) if !several.is_empty() => on_own_thread(|| {
            let (folder, names) = relative(several);
            unshare(CloneFlags::CLONE_FS)?;
            chdir(&folder)?;
            let options = format!("lowerdir={}", names.join(":"));
            let kind = Some("overlay");
            mount(kind, point, kind, view_flags(), Some(options.as_str())).map_err(io::Error::from)
        }),
        (other, _) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("cannot mount a root of type {other:?} without lower layers"),
        )),
    }
}

fn bind_read_only(source: &Path, point: &Path) -> io::Result<()> {
    let none: Option<&str> = None;
    mount(Some(source), point, none, MsFlags::MS_BIND, none)?;
    let flags = view_flags() | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
    let remounted = mount(none, point, none, flags, none);
    if remounted.is_err() {
        // Writable layers of an image are nothing to leave behind.
        let _ = umount2(point, MntFlags::MNT_DETACH);
    }
    remounted.map_err(io::Error::from)
}

fn view_flags() -> MsFlags {
    MsFlags::MS_RDONLY | MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC
}

fn lower_dirs(mount: &RootMount) -> Vec<PathBuf> {
    let lower = mount
        .options
        .iter()
        .find_map(|option| option.strip_prefix("lowerdir="));
    lower
        .map(|list| list.split(':').map(PathBuf::from).collect())
        .unwrap_or_default()
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    Ok(File::open(path)?.into())
}

fn open_joined(layers: &[PathBuf], view_dir: &Path) -> io::Result<OwnedFd> {
    let point = view_dir.join(uuid::Uuid::new_v4().to_string());
    std::fs::create_dir_all(&point)?;
    // The thread that mounts has another working directory.
    let point = point.canonicalize()?;
    let opened = on_own_thread(|| join_layers(layers, &point));
    std::fs::remove_dir(&point)?;
    opened
}

fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("view".to_owned());
        let thread = thread.spawn_scoped(scope, work)?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("view thread panicked")))
    })
}

/// The kernel takes one page of mount options, which the full paths of some fifty layers fill:
/// as in containerd, they are relative to the working directory. So this needs a thread of its
/// own, whose working directory nobody shares.
fn join_layers(layers: &[PathBuf], point: &Path) -> io::Result<OwnedFd> {
    let (folder, names) = relative(layers);
    unshare(CloneFlags::CLONE_FS)?;
    chdir(&folder)?;
    let options = format!("lowerdir={}", names.join(":"));
    mount(
        Some("overlay"),
        point,
        Some("overlay"),
        view_flags(),
        Some(options.as_str()),
    )?;
    let opened = open_dir(point);
    umount2(point, MntFlags::MNT_DETACH)?;
    opened
}

/// The deepest folder that all layers are in, and their paths from there.
fn relative(layers: &[PathBuf]) -> (PathBuf, Vec<String>) {
    let mut folder = layers
        .first()
        .and_then(|l| l.parent())
        .unwrap_or(Path::new("/"));
    while let Some(parent) = folder.parent()
        && !layers
            .iter()
            .all(|layer| layer != folder && layer.starts_with(folder))
    {
        folder = parent;
    }
    let names = layers.iter().map(|layer| {
        let name = layer.strip_prefix(folder).unwrap_or(layer);
        name.to_string_lossy().into_owned()
    });
    (folder.to_owned(), names.collect())
}

/// Removes what a look left that its process did not live to end.
pub(super) fn clear(view_dir: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(view_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let point = entry?.path();
        match umount2(&point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            // No mount: it was about to be made, or just removed.
            Ok(()) | Err(Errno::EINVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
        std::fs::remove_dir(&point)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    fn mount_of(kind: &str, source: &str, options: &[&str]) -> RootMount {
        RootMount {
            r#type: kind.into(),
            source: source.into(),
            target: String::new(),
            options: options.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn finds_the_layers() {
        let overlay = mount_of(
            "overlay",
            "overlay",
            &["index=off", "lowerdir=/a:/b", "upperdir=/u"],
        );
        assert_eq!(
            lower_dirs(&overlay),
            [PathBuf::from("/a"), PathBuf::from("/b")]
        );
        assert!(lower_dirs(&mount_of("overlay", "overlay", &[])).is_empty());
    }

    #[test]
    fn layers_are_named_from_where_they_part() {
        let relative = |layers: &[&str]| {
            let layers: Vec<_> = layers.iter().map(PathBuf::from).collect();
            let (folder, names) = super::relative(&layers);
            (folder.to_string_lossy().into_owned(), names.join(":"))
        };
        for (layers, folder, names) in [
            (&["/s/12/fs", "/s/3/fs"][..], "/s", "12/fs:3/fs"),
            (&["/s/a", "/s/b"], "/s", "a:b"),
            (&["/x/a", "/y/a"], "/", "x/a:y/a"),
            (&["/s/a", "/s"], "/", "s/a:s"),
        ] {
            assert_eq!(relative(layers), (folder.to_owned(), names.to_owned()));
        }
    }

    #[test]
    fn many_layers_are_joined_and_leftovers_cleared() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let view_dir = dir.path().join("view");
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNS).unwrap();
                let none: Option<&str> = None;
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
                // Neither a full page of options nor the disk's own overlay is in the way.
                mount(none, dir.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
                let layers: Vec<_> = (0..100)
                    .map(|n| dir.path().join(format!("a-rather-long-folder-name/{n}/fs")))
                    .collect();
                for layer in &layers {
                    std::fs::create_dir_all(layer).unwrap();
                }
                std::fs::write(layers[99].join("file"), "lowest").unwrap();
                let full: Vec<_> = layers.iter().map(|l| l.to_string_lossy()).collect();
                assert!(full.join(":").len() > 4096);
                let lower = format!("lowerdir={}", full.join(":"));
                let root = mount_of("overlay", "overlay", &[&lower]);
                let opened = open(&[root], &view_dir).unwrap();
                let path = format!("/proc/self/fd/{}/file", opened.as_raw_fd());
                assert_eq!(std::fs::read_to_string(path).unwrap(), "lowest");
                assert_eq!(std::fs::read_dir(&view_dir).unwrap().count(), 0);

                let point = dir.path().join("point");
                std::fs::create_dir(&point).unwrap();
                let single = format!("lowerdir={}", layers[99].display());
                for options in [&lower, &single] {
                    mount_at(&[mount_of("overlay", "overlay", &[options])], &point).unwrap();
                    let file = point.join("file");
                    assert_eq!(std::fs::read_to_string(&file).unwrap(), "lowest");
                    assert!(std::fs::write(&file, "other").is_err());
                    umount2(&point, MntFlags::MNT_DETACH).unwrap();
                }

                let left = view_dir.join("left");
                std::fs::create_dir(&left).unwrap();
                mount(none, &left, Some("tmpfs"), MsFlags::empty(), none).unwrap();
                std::fs::create_dir(view_dir.join("bare")).unwrap();
                clear(&view_dir).unwrap();
                assert_eq!(std::fs::read_dir(&view_dir).unwrap().count(), 0);
                clear(&dir.path().join("nothing")).unwrap();
            });
            thread.join().unwrap();
        });
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open(&[], dir.path()).is_err());
        let error = open(&[mount_of("ext4", "/dev/x", &[])], dir.path()).unwrap_err();
        assert!(error.to_string().contains("ext4"));
        let bind = mount_of("bind", &dir.path().to_string_lossy(), &["rbind"]);
        assert!(open(&[bind], dir.path()).is_ok());
    }
}
