//! A read-only look into a prepared root file system, without leaving a mount behind.
//!
//! The root is an overlay whose upper layer is still empty, so its lower layers are the whole
//! truth. One layer is opened as it is; several are joined by an overlay that is detached from
//! the tree at once and lives only as long as the descriptor.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

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
    let lower: Vec<_> = layers.iter().map(|layer| layer.to_string_lossy()).collect();
    let options = format!("lowerdir={}", lower.join(":"));
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let opened = mount(
        Some("overlay"),
        &point,
        Some("overlay"),
        flags,
        Some(options.as_str()),
    )
    .map_err(io::Error::from)
    .and_then(|()| {
        let opened = open_dir(&point);
        umount2(&point, MntFlags::MNT_DETACH)?;
        opened
    });
    std::fs::remove_dir(&point)?;
    opened
}

#[cfg(test)]
mod tests {
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
    fn refuses_what_it_does_not_know() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open(&[], dir.path()).is_err());
        let error = open(&[mount_of("ext4", "/dev/x", &[])], dir.path()).unwrap_err();
        assert!(error.to_string().contains("ext4"));
        let bind = mount_of("bind", &dir.path().to_string_lossy(), &["rbind"]);
        assert!(open(&[bind], dir.path()).is_ok());
    }
}
