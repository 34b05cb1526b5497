//! A root file system as a pod with ids of its own sees it.

use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::chown;
use std::path::Path;

use super::{OwnUsers, bind};
use crate::runtime::RootMount;
use crate::volumes::make_pin;

/// Replaces the read-only layers of an overlay by mounts that map ids, pinned in `folder`, and
/// gives its empty writable layer to the pod's root. The pins may go once the root is mounted.
///
/// # Errors
/// A mount of another kind, or the kernel refuses.
pub fn map_root(
    root: Vec<RootMount>,
    users: &OwnUsers,
    folder: &Path,
) -> io::Result<Vec<RootMount>> {
    let namespace = fs::File::open(&users.namespace)?;
    fs::create_dir_all(folder)?;
    let mut count = 0_usize;
    let mut pinned = |source: &Path| -> io::Result<String> {
        let pin = folder.join(format!("root-{count}"));
        count += 1;
        make_pin(&pin, true)?;
        bind(source, &pin, namespace.as_fd())?;
        Ok(pin.to_string_lossy().into_owned())
    };
    root.into_iter()
        .map(|mut mount| {
            match mount.r#type.as_str() {
                "overlay" => {
                    let mut layered = false;
                    for option in &mut mount.options {
                        if let Some(layers) = option.strip_prefix("lowerdir=") {
                            let layers: io::Result<Vec<_>> = layers
                                .split(':')
                                .map(|layer| pinned(Path::new(layer)))
                                .collect();
                            *option = format!("lowerdir={}", layers?.join(":"));
                            layered = true;
                        } else if let Some(upper) = option.strip_prefix("upperdir=") {
                            let root = Some(users.range.first);
                            chown(upper, root, root)?;
                        }
                    }
                    if !layered {
                        return Err(unsupported("an overlay that names its layers otherwise"));
                    }
                }
                "bind" => mount.source = pinned(Path::new(&mount.source))?,
                other => {
                    return Err(unsupported(&format!("a root of type {other:?}")));
                }
            }
            Ok(mount)
        })
        .collect()
}

fn unsupported(what: &str) -> io::Error {
    let text = format!("spec.hostUsers: {what} cannot map ids");
    io::Error::new(io::ErrorKind::Unsupported, text)
}
