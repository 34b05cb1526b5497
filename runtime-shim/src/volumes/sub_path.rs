//! One path inside a volume, opened so that no link and no race leads out of
//! the volume, and pinned by a bind mount that the runtime can use by name.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, mkdirat};

/// Says what is wrong with a sub path, as the API server would.
pub(super) fn check(sub_path: &str) -> Result<(), &'static str> {
    let path = Path::new(sub_path);
    if sub_path.is_empty() || sub_path.len() > 4096 || sub_path.contains('\0') {
        return Err("must have 1 to 4096 bytes without NUL");
    }
    for component in path.components() {
        match component {
            Component::Normal(_) | Component::CurDir => {}
            Component::ParentDir => return Err("must not contain '..'"),
            Component::RootDir | Component::Prefix(_) => return Err("must be relative"),
        }
    }
    Ok(())
}

/// Binds `sub_path` of `volume` to `pin`.
pub(super) fn pin(volume: &Path, sub_path: &str, pin: &Path) -> io::Result<()> {
    let target = open_inside(volume, sub_path)?;
    let metadata = File::from(target.try_clone()?).metadata()?;
    if metadata.file_type().is_block_device() || metadata.file_type().is_char_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is a device"));
    }
    super::make_pin(pin, metadata.is_dir())?;
    let source = format!("/proc/self/fd/{}", target.as_raw_fd());
    let none: Option<&str> = None;
    mount(Some(source.as_str()), pin, none, MsFlags::MS_BIND, none)?;
    Ok(())
}

/// Opens the path, making directories where there is nothing.
fn open_inside(volume: &Path, sub_path: &str) -> io::Result<OwnedFd> {
    let directory = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = open(volume, directory, Mode::empty())?;
    match open_beneath(&root, Path::new(sub_path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let mode = File::from(root.try_clone()?).metadata()?.mode() & 0o7777;
    let mut folder = root.try_clone()?;
    let mut so_far = Path::new("").to_owned();
    for component in Path::new(sub_path).components() {
        so_far.push(component);
        // From the root each time: a link on the way is followed within the volume.
        folder = match open_beneath(&root, &so_far) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_directory(&folder, Path::new(&component), mode)?
            }
            other => other?,
        };
    }
    Ok(folder)
}

fn make_directory(folder: &OwnedFd, name: &Path, mode: u32) -> io::Result<OwnedFd> {
    match mkdirat(folder, name, Mode::from_bits_truncate(0o700)) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let made = open_beneath(folder, name)?;
    // By descriptor: the name may mean another file by now. O_PATH descriptors
    // are changed through their entry in /proc.
    let by_descriptor = format!("/proc/self/fd/{}", made.as_raw_fd());
    fs::set_permissions(by_descriptor, fs::Permissions::from_mode(mode))?;
    Ok(made)
}

fn open_beneath(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    loop {
        match openat2(root.as_fd(), path, how) {
            // A rename anywhere raced with `..` or a link; the kernel asks to try again.
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn opened(volume: &Path, sub_path: &str) -> io::Result<std::path::PathBuf> {
        let fd = open_inside(volume, sub_path)?;
        fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
    }

    #[test]
    fn makes_what_is_missing_and_follows_links_inside() {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path().canonicalize().unwrap();
        fs::set_permissions(&volume, fs::Permissions::from_mode(0o2770)).unwrap();
        assert_eq!(opened(&volume, "a/./b").unwrap(), volume.join("a/b"));
        assert_eq!(
            fs::metadata(volume.join("a/b")).unwrap().mode() & 0o7777,
            0o2770
        );
        symlink("a", volume.join("link")).unwrap();
        assert_eq!(opened(&volume, "link/c").unwrap(), volume.join("a/c"));
        fs::write(volume.join("file"), "").unwrap();
        assert_eq!(opened(&volume, "file").unwrap(), volume.join("file"));
    }

    #[test]
    fn no_link_leads_out() {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path().join("volume");
        fs::create_dir(&volume).unwrap();
        fs::create_dir(folder.path().join("secret")).unwrap();
        for (name, target) in [
            ("absolute", "/etc"),
            ("relative", "../secret"),
            ("dangling", "../not-there"),
            ("magic", "/proc/self/root"),
            ("loop", "loop"),
        ] {
            symlink(target, volume.join(name)).unwrap();
            for path in [name.to_owned(), format!("{name}/x")] {
                let error = opened(&volume, &path).unwrap_err();
                let code = error.raw_os_error();
                assert!(
                    matches!(code, Some(libc::EXDEV | libc::ELOOP)),
                    "{path}: {error}"
                );
            }
        }
        assert!(!folder.path().join("not-there").exists());
        assert!(!folder.path().join("secret/x").exists());
    }

    #[test]
    fn refuses_paths_of_the_wrong_kind() {
        for path in ["", "/a", "..", "a/../b", "a\0"] {
            assert!(check(path).is_err(), "{path:?}");
        }
        check("a/b.c").unwrap();
    }
}
