//! The mounts that make a container's root folder, for containers of runc.

use std::path::Path;

use containerd_shim_protos::api::Mount;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::error::{Result, TaskError};

/// The kernel takes one page of options.
const MAX_DATA: usize = 4095;

/// A mount's options as the kernel wants them.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    flags: MsFlags,
    data: String,
}

/// Mounts each of `mounts` on `target`, one above the other. On failure nothing stays mounted.
pub(crate) fn mount_all(mounts: &[Mount], target: &Path) -> Result<()> {
    for (index, one) in mounts.iter().enumerate() {
        if let Err(error) = mount_one(one, target) {
            unmount_all(target);
            return Err(TaskError::failed(
                format_args!("rootfs[{index}] ({} from {})", one.type_, one.source),
                error,
            ));
        }
    }
    Ok(())
}

fn mount_one(one: &Mount, target: &Path) -> std::result::Result<(), String> {
    if !one.target.is_empty() {
        return Err(format!(
            "target {:?}: mounts below the root are not supported",
            one.target
        ));
    }
    let options = parse(&one.options);
    if options.data.len() > MAX_DATA {
        return Err(format!(
            "{} bytes of options are more than the kernel takes; use shorter paths of layers",
            options.data.len()
        ));
    }
    let bind = options.flags.contains(MsFlags::MS_BIND);
    let flags = if one.type_ == "bind" && !bind {
        options.flags | MsFlags::MS_BIND
    } else {
        options.flags
    };
    let first = if flags.contains(MsFlags::MS_BIND) {
        flags & (MsFlags::MS_BIND | MsFlags::MS_REC)
    } else {
        flags
    };
    let data = Some(options.data.as_str()).filter(|data| !data.is_empty());
    mount(
        Some(one.source.as_str()),
        target,
        Some(one.type_.as_str()),
        first,
        data,
    )
    .map_err(|error| error.to_string())?;
    // A bind takes its flags from a second call.
    if flags.contains(MsFlags::MS_BIND) && flags != first {
        let again = flags | MsFlags::MS_REMOUNT;
        mount(None::<&str>, target, None::<&str>, again, None::<&str>)
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn parse(options: &[String]) -> Options {
    let mut flags = MsFlags::empty();
    let mut data: Vec<&str> = Vec::new();
    for option in options {
        let (set, flag) = match option.as_str() {
            "ro" => (true, MsFlags::MS_RDONLY),
            "rw" => (false, MsFlags::MS_RDONLY),
            "bind" => (true, MsFlags::MS_BIND),
            "rbind" => (true, MsFlags::MS_BIND | MsFlags::MS_REC),
            "nosuid" => (true, MsFlags::MS_NOSUID),
            "suid" => (false, MsFlags::MS_NOSUID),
            "nodev" => (true, MsFlags::MS_NODEV),
            "dev" => (false, MsFlags::MS_NODEV),
            "noexec" => (true, MsFlags::MS_NOEXEC),
            "exec" => (false, MsFlags::MS_NOEXEC),
            "noatime" => (true, MsFlags::MS_NOATIME),
            "relatime" => (true, MsFlags::MS_RELATIME),
            "nodiratime" => (true, MsFlags::MS_NODIRATIME),
            "sync" => (true, MsFlags::MS_SYNCHRONOUS),
            "defaults" | "" => continue,
            other => {
                data.push(other);
                continue;
            }
        };
        flags.set(flag, set);
    }
    Options {
        flags,
        data: data.join(","),
    }
}

/// Unmounts whatever is on `target`.
pub(crate) fn unmount_all(target: &Path) {
    // One call a mount; a stranger could stack more of them, but not for ever.
    for _ in 0..64 {
        match umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point (any more), or no such folder.
            Err(nix::Error::EINVAL | nix::Error::ENOENT) => return,
            Err(error) => {
                tracing::warn!(%error, path = %target.display(), "unmounting");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MsFlags, Options, parse};

    #[test]
    fn flags_and_data_are_told_apart() {
        let options = [
            "ro",
            "workdir=/w",
            "nodev",
            "rbind",
            "upperdir=/u",
            "rw",
            "volatile",
        ];
        let options: Vec<String> = options.map(str::to_owned).to_vec();
        assert_eq!(
            parse(&options),
            Options {
                flags: MsFlags::MS_NODEV | MsFlags::MS_BIND | MsFlags::MS_REC,
                data: "workdir=/w,upperdir=/u,volatile".into(),
            }
        );
    }
}
