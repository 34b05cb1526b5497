//! A path of the host itself as a volume: checked as `pkg/volume/hostpath` of the kubelet does,
//! and opened so that no link leads out of the folder that the administrator allowed.
//!
//! What was opened is pinned by a bind mount: a pod that may write to the folder could otherwise
//! put a link in the place of what was checked.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, mkdirat};
use sandman_protocol::access::HostAccess;
use sandman_protocol::v1;
use v1::HostPathType as Type;

use super::{VolumeError, mounts};

const NEW_DIRECTORY: Mode = Mode::from_bits_truncate(0o755);
const NEW_FILE: Mode = Mode::from_bits_truncate(0o644);

/// Makes what may be made, checks the kind, and returns the path to bind: the host's own where
/// all of the host is allowed, else `pin`, at which it is mounted.
pub(super) fn resolve(
    wish: &v1::HostPath,
    access: &HostAccess,
    own_state: &Path,
    pin: &Path,
) -> Result<PathBuf, VolumeError> {
    let path = Path::new(&wish.path);
    let root = access.host_path_root(path).ok_or_else(|| {
        VolumeError::Invalid(format!(
            "hostPath {:?} is in no folder that allow.host_path of this host names",
            wish.path
        ))
    })?;
    let failed = |error: io::Error| match error.raw_os_error() {
        Some(libc::EXDEV | libc::ELOOP) => VolumeError::Invalid(format!(
            "hostPath {:?} leads out of {root:?}, which allow.host_path of this host names",
            wish.path
        )),
        _ => VolumeError::io(format!("hostPath {:?}", wish.path))(error),
    };
    let target = open_or_make(root, path, wish.r#type()).map_err(failed)?;
    check_kind(&target, wish).map_err(failed)??;
    if root == Path::new("/") {
        return Ok(path.to_owned());
    }
    let real = fs::read_link(by_descriptor(&target)).map_err(failed)?;
    // With our own state in it, the mounts below would be the pins and secrets of all pods.
    let recursive = !own_state.starts_with(&real);
    pin_at(&target, pin, recursive).map_err(failed)?;
    Ok(pin.to_owned())
}

fn by_descriptor(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

fn makes(kind: Type) -> bool {
    // The API calls an unspecified type "no check"; the container runtime then makes a folder.
    matches!(
        kind,
        Type::Unspecified | Type::DirectoryOrCreate | Type::FileOrCreate
    )
}

fn open_or_make(root: &Path, path: &Path, kind: Type) -> io::Result<OwnedFd> {
    let below = path.strip_prefix(root).unwrap_or(path);
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let base = match open(root, flags, Mode::empty()) {
        // Named by the administrator, so nobody else can have put a link there.
        Err(Errno::ENOENT) if makes(kind) => {
            let is_file = kind == Type::FileOrCreate && below.as_os_str().is_empty();
            if is_file {
                File::options().create(true).append(true).open(root)?;
            } else {
                fs::create_dir_all(root)?;
            }
            open(root, flags, Mode::empty())?
        }
        other => other?,
    };
    if below.as_os_str().is_empty() {
        return Ok(base);
    }
    let within = Within {
        // All of the host is allowed: its own absolute links are followed.
        flag: if root == Path::new("/") {
            ResolveFlag::RESOLVE_IN_ROOT
        } else {
            ResolveFlag::RESOLVE_BENEATH
        },
        base,
    };
    match within.open(below) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && makes(kind) => {}
        other => return other,
    }
    within.make(below, kind)
}

struct Within {
    base: OwnedFd,
    flag: ResolveFlag,
}

impl Within {
    fn open(&self, path: &Path) -> io::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(self.flag | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        loop {
            match openat2(self.base.as_fd(), path, how) {
                // A rename raced with the walk; the kernel asks to try again.
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                other => return other.map_err(io::Error::from),
            }
        }
    }

    /// Makes the missing folders, and last the file or folder itself.
    fn make(&self, path: &Path, kind: Type) -> io::Result<OwnedFd> {
        let mut folder = self.base.try_clone()?;
        let mut so_far = PathBuf::new();
        let parts: Vec<Component<'_>> = path.components().collect();
        for (index, part) in parts.iter().enumerate() {
            so_far.push(part);
            folder = match self.open(&so_far) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let last = index + 1 == parts.len();
                    make_one(&folder, part, last && kind == Type::FileOrCreate)?;
                    // Opened by its whole path: the name may be a link by now.
                    self.open(&so_far)?
                }
                other => other?,
            };
        }
        Ok(folder)
    }
}

fn make_one(folder: &OwnedFd, name: &Component<'_>, file: bool) -> io::Result<()> {
    let name = name.as_os_str();
    let made = if file {
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        nix::fcntl::openat(folder, name, flags, NEW_FILE).map(drop)
    } else {
        mkdirat(folder, name, NEW_DIRECTORY)
    };
    match made {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The kubelet's check, in its words.
fn check_kind(target: &OwnedFd, wish: &v1::HostPath) -> io::Result<Result<(), VolumeError>> {
    let kind = File::from(target.try_clone()?).metadata()?.file_type();
    let (fits, what) = match wish.r#type() {
        Type::Unspecified => return Ok(Ok(())),
        Type::Directory | Type::DirectoryOrCreate => (kind.is_dir(), "a directory"),
        Type::File | Type::FileOrCreate => (kind.is_file(), "a file"),
        Type::Socket => (kind.is_socket(), "a socket file"),
        Type::CharDevice => (kind.is_char_device(), "a character device"),
        Type::BlockDevice => (kind.is_block_device(), "a block device"),
    };
    if fits {
        return Ok(Ok(()));
    }
    Ok(Err(VolumeError::Invalid(format!(
        "hostPath type check failed: {} is not {what}",
        wish.path
    ))))
}

/// Mounts the target at `pin`, unless something is mounted there already.
fn pin_at(target: &OwnedFd, pin: &Path, recursive: bool) -> io::Result<()> {
    if let Some(folder) = pin.parent() {
        fs::create_dir_all(folder)?;
    }
    if mounts::is_mounted(pin)? {
        return Ok(());
    }
    // Left by a process that did not live to mount, perhaps of the other kind.
    super::remove::tree(pin)?;
    if File::from(target.try_clone()?).metadata()?.is_dir() {
        fs::create_dir(pin)?;
    } else {
        File::create_new(pin)?;
    }
    let none: Option<&str> = None;
    let source = by_descriptor(target);
    let mut bind = MsFlags::MS_BIND;
    bind.set(MsFlags::MS_REC, recursive);
    mount(Some(source.as_str()), pin, none, bind, none)?;
    // What the host mounts there later is seen, but the end of the pin ends nothing of the host's.
    let slave = MsFlags::MS_SLAVE | MsFlags::MS_REC;
    mount(none, pin, none, slave, none)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn opened(root: &Path, path: &Path, kind: Type) -> Result<PathBuf, VolumeError> {
        let wish = v1::HostPath {
            path: path.to_string_lossy().into_owned(),
            r#type: kind as i32,
        };
        let failed = || VolumeError::io("test");
        let target = open_or_make(root, path, kind).map_err(failed())?;
        check_kind(&target, &wish).map_err(failed())??;
        fs::read_link(by_descriptor(&target)).map_err(failed())
    }

    #[test]
    fn kinds_are_checked_in_the_kubelets_words() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir(root.join("dir")).unwrap();
        fs::write(root.join("file"), "").unwrap();
        let _socket = UnixListener::bind(root.join("socket")).unwrap();
        for (name, kind, problem) in [
            ("dir", Type::Directory, None),
            ("dir", Type::DirectoryOrCreate, None),
            ("dir", Type::Unspecified, None),
            ("file", Type::File, None),
            ("socket", Type::Socket, None),
            ("file", Type::Directory, Some("a directory")),
            ("file", Type::DirectoryOrCreate, Some("a directory")),
            ("dir", Type::FileOrCreate, Some("a file")),
            ("dir", Type::Socket, Some("a socket file")),
            ("file", Type::CharDevice, Some("a character device")),
            ("file", Type::BlockDevice, Some("a block device")),
        ] {
            let path = root.join(name);
            match (opened(&root, &path, kind), problem) {
                (Ok(real), None) => assert_eq!(real, path),
                (Err(error), Some(problem)) => assert_eq!(
                    error.to_string(),
                    format!(
                        "hostPath type check failed: {} is not {problem}",
                        path.display()
                    )
                ),
                (other, _) => panic!("{name} {kind:?}: {other:?}"),
            }
        }
        let null = Path::new("/dev/null");
        opened(Path::new("/"), null, Type::CharDevice).unwrap();
    }

    #[test]
    fn only_what_may_be_made_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap().join("allowed");
        for kind in [Type::Directory, Type::File, Type::Socket] {
            assert!(opened(&root, &root.join("x"), kind).is_err());
        }
        assert!(!root.exists());
        opened(&root, &root.join("a/b"), Type::DirectoryOrCreate).unwrap();
        opened(&root, &root.join("c"), Type::Unspecified).unwrap();
        assert!(root.join("a/b").is_dir() && root.join("c").is_dir());
        opened(&root, &root.join("a/file"), Type::FileOrCreate).unwrap();
        assert!(root.join("a/file").is_file());
        let file = folder.path().join("only");
        opened(&file, &file, Type::FileOrCreate).unwrap();
        assert!(file.is_file());
    }

    #[test]
    fn no_link_leads_out_of_what_is_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap().join("allowed");
        fs::create_dir(&root).unwrap();
        fs::create_dir(root.join("inside")).unwrap();
        symlink("inside", root.join("good")).unwrap();
        let good = opened(&root, &root.join("good"), Type::Directory).unwrap();
        assert_eq!(good, root.join("inside"));
        let access = HostAccess {
            host_path: vec![root.clone()],
            ..HostAccess::default()
        };
        for (name, target) in [
            ("absolute", "/etc"),
            ("relative", "../../etc"),
            ("dangling", "/not-there"),
        ] {
            symlink(target, root.join(name)).unwrap();
            for kind in [Type::Unspecified, Type::DirectoryOrCreate, Type::Directory] {
                for path in [root.join(name), root.join(name).join("x")] {
                    let wish = v1::HostPath {
                        path: path.to_string_lossy().into_owned(),
                        r#type: kind as i32,
                    };
                    let pin = folder.path().join("pin");
                    let error = resolve(&wish, &access, Path::new("/state"), &pin).unwrap_err();
                    let text = error.to_string();
                    assert!(text.contains("leads out of"), "{path:?} {kind:?}: {text}");
                }
            }
        }
        assert!(!Path::new("/not-there").exists());
    }
}
