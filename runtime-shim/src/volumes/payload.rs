//! The files of a volume as they are to appear, checked before any is written.
//! Pure.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use sandman_protocol::v1::file::Content;
use sandman_protocol::v1::{Files, HostField};

use super::HostFields;

/// More than any volume of API objects holds.
const MAX_FILES: usize = 10_000;
const MAX_BYTES: usize = 64 << 20;
/// Limits of the kernel, named here so that the message can say so.
const MAX_PATH: usize = 4096;
const MAX_COMPONENT: usize = 255;

/// Files by path relative to the volume.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Payload {
    pub(super) files: BTreeMap<PathBuf, File>,
}

/// One file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct File {
    pub(super) data: Vec<u8>,
    /// Permission bits.
    pub(super) mode: u32,
}

impl Payload {
    /// Checks and completes what vnode sent; the error says what is wrong.
    pub(super) fn new(files: &Files, fields: &HostFields) -> Result<Self, String> {
        if files.files.len() > MAX_FILES {
            return Err(format!(
                "has {} files, at most {MAX_FILES} are supported",
                files.files.len()
            ));
        }
        let mut checked = BTreeMap::new();
        let mut total = 0;
        for file in &files.files {
            let path = check_path(&file.path)?;
            let data = match &file.content {
                Some(Content::Data(data)) => data.clone(),
                Some(Content::HostField(field)) => fields
                    .text(HostField::try_from(*field).unwrap_or_default())
                    .into_bytes(),
                None => Vec::new(),
            };
            total += data.len();
            if total > MAX_BYTES {
                return Err(format!("is larger than {MAX_BYTES} bytes"));
            }
            // 0 would be a file nobody can read; the API has no such default.
            let mode = file.mode & 0o777;
            if checked.insert(path, File { data, mode }).is_some() {
                return Err(format!("file {:?} is there twice", file.path));
            }
        }
        for path in checked.keys() {
            let shadowed = path
                .ancestors()
                .skip(1)
                .find(|folder| checked.contains_key(*folder));
            if let Some(shadowed) = shadowed {
                return Err(format!("{shadowed:?} is a file and a directory"));
            }
        }
        Ok(Self { files: checked })
    }

    /// First components: what the user sees in the volume.
    pub(super) fn top_level(&self) -> impl Iterator<Item = &Path> {
        let mut last = None;
        self.files.keys().filter_map(move |path| {
            let top = path
                .components()
                .next()
                .map(|top| Path::new(top.as_os_str()))?;
            (last.replace(top) != Some(top)).then_some(top)
        })
    }
}

/// The kubelet's rules: relative, without `..`, and no name that the writer
/// uses for itself.
fn check_path(text: &str) -> Result<PathBuf, String> {
    let refuse = |why: &str| Err(format!("file path {text:?} {why}"));
    let path = Path::new(text);
    if text.is_empty() || text.len() > MAX_PATH {
        return refuse("must have 1 to 4096 bytes");
    }
    if text.contains('\0') || text.ends_with('/') {
        return refuse("is not the path of a file");
    }
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) if name.len() <= MAX_COMPONENT => clean.push(name),
            Component::Normal(_) => return refuse("has a name longer than 255 bytes"),
            Component::ParentDir => return refuse("must not contain '..'"),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return refuse("must be relative"),
        }
    }
    if clean.as_os_str().is_empty() {
        return refuse("is not the path of a file");
    }
    if clean.as_os_str().as_encoded_bytes().starts_with(b"..") {
        return refuse("must not start with '..'");
    }
    Ok(clean)
}

#[cfg(test)]
mod tests {
    use sandman_protocol::v1;

    use super::*;

    fn file(path: &str, content: &str) -> v1::File {
        let content = Some(Content::Data(content.as_bytes().to_vec()));
        v1::File {
            path: path.to_owned(),
            mode: 0o644,
            content,
        }
    }

    fn payload(paths: &[&str]) -> Result<Payload, String> {
        let files = paths.iter().map(|path| file(path, "x")).collect();
        Payload::new(
            &Files {
                files,
                secret: false,
            },
            &HostFields::default(),
        )
    }

    #[test]
    fn refuses_paths_that_leave_or_confuse() {
        for path in [
            "",
            "/etc/passwd",
            "..",
            "../x",
            "a/../b",
            "..data",
            "..x/y",
            "a/",
            ".",
            "a\0b",
        ] {
            assert!(payload(&[path]).is_err(), "{path:?}");
        }
        assert!(payload(&[&"x".repeat(256)]).is_err());
        assert!(payload(&["a", "a/b"]).is_err());
        assert!(payload(&["a", "./a"]).is_err());
        payload(&["a/..b", "...", ".hidden"]).unwrap_err();
        payload(&["a/..b", ".hidden"]).unwrap();
    }

    #[test]
    fn lists_each_top_level_name_once() {
        let payload = payload(&["b/1", "a", "b/2/3", "b.txt"]).unwrap();
        let top: Vec<_> = payload.top_level().collect();
        assert_eq!(top.len(), 3, "{top:?}");
    }

    #[test]
    fn fills_in_what_only_the_host_knows() {
        let content = Some(Content::HostField(HostField::PodIp.into()));
        let files = vec![v1::File {
            path: "ip".to_owned(),
            mode: 0o444,
            content,
        }];
        let fields = HostFields {
            pod_ip: "10.0.0.1".parse().ok(),
            host_ip: None,
        };
        let payload = Payload::new(
            &Files {
                files,
                secret: false,
            },
            &fields,
        )
        .unwrap();
        assert_eq!(payload.files[Path::new("ip")].data, b"10.0.0.1");
    }
}
