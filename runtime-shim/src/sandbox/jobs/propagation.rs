//! Whether the host's mounts can be passed on as a container asks: containerd's
//! `ensureShared` and `ensureSharedOrSlave`, in its words.

use std::path::Path;

use sandman_protocol::v1::MountPropagation;

/// Checks the mount that a volume's path is on; `mountinfo` is `/proc/self/mountinfo`.
///
/// # Errors
/// What to tell the user.
pub(super) fn check(mountinfo: &str, path: &Path, wish: MountPropagation) -> Result<(), String> {
    let (tags, kinds): (&[&str], _) = match wish {
        MountPropagation::Unspecified => return Ok(()),
        MountPropagation::HostToContainer => (&["shared:", "master:"], "shared or slave"),
        MountPropagation::Bidirectional => (&["shared:"], "shared"),
    };
    let mut found: Option<(&Path, bool)> = None;
    for line in mountinfo.lines() {
        // "36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/sda rw"
        let mut fields = line.split(' ');
        let Some(point) = fields.nth(4).map(Path::new) else {
            continue;
        };
        if !path.starts_with(point) {
            continue;
        }
        let passes = fields
            .skip(1)
            .take_while(|field| *field != "-")
            .any(|field| tags.iter().any(|tag| field.starts_with(tag)));
        let depth = |point: &Path| point.components().count();
        // Of two on the same point, the later one is on top.
        if found.is_none_or(|(other, _)| depth(other) <= depth(point)) {
            found = Some((point, passes));
        }
    }
    match found {
        Some((_, true)) => Ok(()),
        Some((point, false)) => Err(format!(
            "path {path:?} is mounted on {point:?} but it is not a {kinds} mount"
        )),
        None => Err(format!("path {path:?} is on no mount")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use MountPropagation::{Bidirectional, HostToContainer, Unspecified};

    const TABLE: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:27 / /srv rw,relatime shared:7 - tmpfs tmpfs rw
31 30 0:28 / /srv/below rw,relatime master:9 - tmpfs tmpfs rw
32 27 0:28 / /top rw,relatime shared:3 - tmpfs tmpfs rw
33 32 0:28 / /top rw,relatime - tmpfs tmpfs rw
";

    #[test]
    fn the_deepest_mount_decides() {
        for (path, wish, passes) in [
            ("/srv/x", Bidirectional, true),
            ("/srv/x", HostToContainer, true),
            ("/srv/below/x", Bidirectional, false),
            ("/srv/below/x", HostToContainer, true),
            ("/srvx", HostToContainer, false),
            ("/top/x", Bidirectional, false),
            ("/x", Unspecified, true),
        ] {
            let checked = check(TABLE, Path::new(path), wish);
            assert_eq!(checked.is_ok(), passes, "{path} {wish:?}: {checked:?}");
        }
        assert_eq!(
            check(TABLE, Path::new("/x"), Bidirectional).unwrap_err(),
            "path \"/x\" is mounted on \"/\" but it is not a shared mount"
        );
        assert!(check("", Path::new("/x"), Bidirectional).is_err());
    }
}
