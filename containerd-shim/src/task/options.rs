//! The options of a create request.

use std::path::{Path, PathBuf};

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci::Options;

use super::error::{Result, TaskError};
use crate::runc::Settings;

/// Reads `containerd.runc.v1.Options`, as containerd's own shim takes them. `root` is where runc
/// keeps its state unless they say otherwise.
pub(crate) fn parse(options: Option<&Any>, root: &Path, namespace: &str) -> Result<Settings> {
    let options = match options {
        Some(any) if any.type_url.ends_with("containerd.runc.v1.Options") => {
            Options::parse_from_bytes(&any.value).map_err(|error| {
                TaskError::InvalidArgument(format!("options ({}): {error}", any.type_url))
            })?
        }
        None => Options::new(),
        // containerd passes its CRI plugin's generic options to every runtime.
        Some(any) if any.type_url.is_empty() || any.type_url.contains("runtimeoptions") => {
            Options::new()
        }
        Some(any) => {
            return Err(TaskError::InvalidArgument(format!(
                "options: {:?} is not supported; use containerd.runc.v1.Options",
                any.type_url
            )));
        }
    };
    let or = |value: &str, default: PathBuf| {
        if value.is_empty() {
            default
        } else {
            PathBuf::from(value)
        }
    };
    Ok(Settings {
        binary: or(&options.binary_name, "runc".into()),
        root: or(&options.root, root.to_owned()).join(if options.root.is_empty() {
            ""
        } else {
            namespace
        }),
        systemd_cgroup: options.systemd_cgroup,
        no_pivot_root: options.no_pivot_root,
        no_new_keyring: options.no_new_keyring,
    })
}

#[cfg(test)]
mod tests {
    use super::{Any, Message, Options, Path, parse};

    fn any(type_url: &str, value: Vec<u8>) -> Any {
        Any {
            type_url: type_url.into(),
            value,
            ..Default::default()
        }
    }

    #[test]
    fn options_of_runc_count() {
        let options = Options {
            binary_name: "/opt/runc".into(),
            root: "/run/r".into(),
            systemd_cgroup: true,
            ..Default::default()
        };
        let options = any(
            "containerd.runc.v1.Options",
            options.write_to_bytes().unwrap(),
        );
        let settings = parse(Some(&options), Path::new("/state"), "ns").unwrap();
        assert_eq!(settings.binary, Path::new("/opt/runc"));
        assert_eq!(settings.root, Path::new("/run/r/ns"));
        assert!(settings.systemd_cgroup && !settings.no_pivot_root);

        let settings = parse(None, Path::new("/state"), "ns").unwrap();
        assert_eq!(settings.root, Path::new("/state"));
        assert_eq!(settings.binary, Path::new("runc"));
    }

    #[test]
    fn others_are_refused_by_name() {
        let error = parse(Some(&any("x.Options", vec![])), Path::new("/"), "").unwrap_err();
        assert!(error.to_string().contains("x.Options"));
        let broken = any("containerd.runc.v1.Options", vec![0xff]);
        assert!(parse(Some(&broken), Path::new("/"), "").is_err());
    }
}
