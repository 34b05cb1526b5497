//! The in-sandbox agent's image, mounted once for all sandboxes.
//!
//! A read-only EROFS file is the agent's only source: root inside a container holds a mount of it
//! and can change neither the file nor what other containers run (CVE-2019-5736).

mod loop_device;

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::statfs;
use sha2::{Digest, Sha256};

/// Name of the agent inside its image.
const NAME: &str = "daemon";
/// `statfs` type of EROFS (linux/magic.h).
const EROFS_MAGIC: i64 = 0xE0F5_E1E2;

/// Mounts `image` below `state_dir` unless it is mounted, and returns the agent's path.
///
/// Each content has its own mount point: after an upgrade new sandboxes get the new agent, and
/// those that run keep the one they have.
///
/// # Errors
/// The image is missing, is no EROFS image, or holds no agent.
pub fn mount_image(image: &Path, state_dir: &Path) -> io::Result<PathBuf> {
    let content = std::fs::read(image).map_err(|error| annotate("cannot read", image, error))?;
    let digest = hex::encode(&Sha256::digest(&content)[..8]);
    let point = state_dir.join("agent").join(digest);
    std::fs::create_dir_all(&point)?;
    if !is_erofs(&point)? {
        mount_erofs(image, &point).map_err(|error| annotate("cannot mount", image, error))?;
    }
    let agent = point.join(NAME);
    let executable = std::fs::metadata(&agent)
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    if executable {
        Ok(agent)
    } else {
        Err(io::Error::other(format!(
            "{} holds no executable {NAME:?}",
            image.display()
        )))
    }
}

fn is_erofs(point: &Path) -> io::Result<bool> {
    Ok(statfs(point)?.filesystem_type().0 == EROFS_MAGIC)
}

fn mount_erofs(image: &Path, point: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    let try_mount = |source: &Path| mount(Some(source), point, Some("erofs"), flags, None::<&str>);
    match try_mount(image) {
        Ok(()) => Ok(()),
        // Before Linux 6.12, or without CONFIG_EROFS_FS_BACKED_BY_FILE, a file is no source.
        Err(Errno::ENOTBLK | Errno::EINVAL) => {
            let device = loop_device::attach(&File::open(image)?)?;
            try_mount(&device.path)?;
            Ok(())
        }
        Err(errno) => Err(errno.into()),
    }
}

fn annotate(what: &str, path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}
