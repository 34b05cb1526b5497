//! Root file systems as snapshotters describe them, as one detached mount.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use super::options;
use super::subset::Outside;
use crate::sys::mount::{Attributes, Context, change, copy_tree};

/// One mount of a root file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootMount {
    /// Type: `overlay` or `bind`.
    pub kind: String,
    /// Source of a bind.
    pub source: String,
    /// Options.
    pub options: Vec<String>,
}

/// What a root mount comes to; pure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Root {
    Overlay {
        layers: Vec<String>,
        parameters: Vec<(String, Option<String>)>,
        attributes: u64,
    },
    Bind {
        source: String,
        recursive: bool,
        attributes: Attributes,
    },
}

/// Reads the mounts of a root; what is not a single overlay or bind is made by runc's way.
pub(super) fn read(mounts: &[RootMount]) -> Result<Root, Outside> {
    let [mount] = mounts else {
        return Err(Outside::new("rootfs (several mounts)"));
    };
    match mount.kind.as_str() {
        "overlay" => overlay(&mount.options),
        "bind" => {
            let parsed = options::parse(&mount.options)
                .map_err(|word| Outside::new(format!("rootfs option {word:?}")))?;
            Ok(Root::Bind {
                source: mount.source.clone(),
                recursive: parsed.bind.unwrap_or_default(),
                attributes: parsed.attributes,
            })
        }
        other => Err(Outside::new(format!("rootfs type {other:?}"))),
    }
}

fn overlay(words: &[String]) -> Result<Root, Outside> {
    let mut layers = Vec::new();
    let mut parameters = Vec::new();
    let mut plain = Vec::new();
    for word in words {
        match word.split_once('=') {
            Some(("lowerdir", list)) => layers.extend(list.split(':').map(str::to_owned)),
            Some((
                key @ ("upperdir" | "workdir" | "index" | "metacopy" | "redirect_dir" | "xino"
                | "nfs_export" | "uuid" | "verity"),
                value,
            )) => {
                parameters.push((key.to_owned(), Some(value.to_owned())));
            }
            None if matches!(word.as_str(), "userxattr" | "volatile") => {
                parameters.push((word.clone(), None));
            }
            _ => plain.push(word.clone()),
        }
    }
    let parsed =
        options::parse(&plain).map_err(|word| Outside::new(format!("rootfs option {word:?}")))?;
    // Escaped colons and data-only layers (`::`) are beyond a plain split.
    let odd = layers
        .iter()
        .any(|layer| layer.is_empty() || layer.contains('\\'));
    if odd || layers.is_empty() || !parsed.data.is_empty() || parsed.bind.is_some() {
        return Err(Outside::new("rootfs options"));
    }
    Ok(Root::Overlay {
        layers,
        parameters,
        attributes: parsed.attributes.set,
    })
}

/// Makes the detached mount; without `devices`, no device node in it can be opened.
pub(super) fn make(root: &Root, devices: bool) -> io::Result<OwnedFd> {
    let nodev = if devices { 0 } else { libc::MOUNT_ATTR_NODEV };
    match root {
        Root::Overlay {
            layers,
            parameters,
            attributes,
        } => {
            let context = Context::new(c"overlay")?;
            context.set(c"source", c"overlay")?;
            for layer in layers {
                context.set(c"lowerdir+", &CString::new(layer.as_str())?)?;
            }
            for (key, value) in parameters {
                let key = CString::new(key.as_str())?;
                match value {
                    Some(value) => context.set(&key, &CString::new(value.as_str())?)?,
                    None => context.flag(&key)?,
                }
            }
            context.mount(*attributes | nodev)
        }
        Root::Bind {
            source,
            recursive,
            attributes,
        } => {
            let mount = copy_tree(&CString::new(source.as_str())?, *recursive)?;
            privatise(
                &mount,
                Attributes {
                    set: attributes.set | nodev,
                    ..*attributes
                },
            )?;
            Ok(mount)
        }
    }
}

/// The folder `path` as a root, with whatever is mounted below it.
pub(super) fn from_path(path: &Path, devices: bool) -> io::Result<OwnedFd> {
    let mount = copy_tree(&CString::new(path.as_os_str().as_encoded_bytes())?, true)?;
    let set = if devices { 0 } else { libc::MOUNT_ATTR_NODEV };
    privatise(
        &mount,
        Attributes {
            set,
            ..Attributes::default()
        },
    )?;
    Ok(mount)
}

fn privatise(mount: &OwnedFd, attributes: Attributes) -> io::Result<()> {
    let private = Attributes {
        propagation: libc::MS_PRIVATE,
        ..Attributes::default()
    };
    change(mount.as_fd(), private, true)?;
    let nodev = Attributes {
        set: attributes.set & libc::MOUNT_ATTR_NODEV,
        ..Attributes::default()
    };
    change(mount.as_fd(), nodev, true)?;
    change(mount.as_fd(), attributes, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: &str, options: &[&str]) -> RootMount {
        RootMount {
            kind: kind.into(),
            source: "/s".into(),
            options: options.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn snapshots_are_understood() {
        let overlay = mount(
            "overlay",
            &["index=off", "workdir=/w", "upperdir=/u", "lowerdir=/b:/a"],
        );
        assert_eq!(
            read(&[overlay]),
            Ok(Root::Overlay {
                layers: vec!["/b".into(), "/a".into()],
                parameters: [("index", "off"), ("workdir", "/w"), ("upperdir", "/u")]
                    .map(|(key, value)| (key.to_owned(), Some(value.to_owned())))
                    .to_vec(),
                attributes: 0,
            })
        );
        let bind = mount("bind", &["ro", "rbind"]);
        assert_eq!(
            read(&[bind]),
            Ok(Root::Bind {
                source: "/s".into(),
                recursive: true,
                attributes: Attributes {
                    set: libc::MOUNT_ATTR_RDONLY,
                    ..Attributes::default()
                },
            })
        );
    }

    #[test]
    fn others_are_left_to_runc() {
        for (mounts, text) in [
            (vec![], "several"),
            (vec![mount("bind", &[]), mount("bind", &[])], "several"),
            (vec![mount("erofs", &[])], "erofs"),
            (vec![mount("overlay", &["lowerdir=/a::/b"])], "options"),
            (vec![mount("overlay", &["upperdir=/u"])], "options"),
            (
                vec![mount("overlay", &["lowerdir=/a", "uidmapping=0:1:1"])],
                "options",
            ),
        ] {
            let error = read(&mounts).unwrap_err();
            assert!(error.field.contains(text), "{error}");
        }
    }
}
