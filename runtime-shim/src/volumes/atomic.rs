//! Files of a volume, changed all at once: the layout and steps of the
//! kubelet's atomic writer, so that programs which watch `..data` work.
//!
//! ```text
//! volume/token    -> ..data/token
//! volume/..data   -> ..2026_11_29_12_00_00.1234567890
//! volume/..2026_11_29_12_00_00.1234567890/token
//! ```
//!
//! Replacing the one link `..data` is the change. Nothing is synced to disk:
//! after a crash of the host the volume is written anew.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown, lchown,
    symlink,
};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::payload::Payload;

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";
const FOLDER_MODE: u32 = 0o755;
/// What the kubelet adds for a read-only volume with an fsGroup.
const GROUP_FILE_BITS: u32 = 0o440;
const GROUP_FOLDER_BITS: u32 = 0o2550;

/// Whom the files belong to besides root.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ownership {
    /// The pod's fsGroup.
    pub(super) group: Option<u32>,
}

impl Ownership {
    fn file_mode(self, mode: u32) -> u32 {
        mode | self.group.map_or(0, |_| GROUP_FILE_BITS)
    }

    fn folder_mode(self) -> u32 {
        FOLDER_MODE | self.group.map_or(0, |_| GROUP_FOLDER_BITS)
    }

    fn apply_to_folder(self, path: &Path) -> io::Result<()> {
        chown(path, None, self.group)?;
        fs::set_permissions(path, fs::Permissions::from_mode(self.folder_mode()))
    }
}

/// Makes the volume at `root` hold exactly the payload. Returns false if it
/// did already and nothing was touched.
pub(super) fn write(root: &Path, payload: &Payload, owner: Ownership) -> io::Result<bool> {
    if !root.is_dir() {
        fs::create_dir_all(root)?;
        owner.apply_to_folder(root)?;
    }
    let old = current(root)?;
    if let Some(old) = &old
        && holds_exactly(old, payload, owner)?
    {
        // A run that died after the switch may have left these two undone.
        link_top_level(root, payload, owner)?;
        remove_stale(root, payload, Some(old))?;
        return Ok(false);
    }

    let new = new_folder(root)?;
    owner.apply_to_folder(&new)?;
    for (path, file) in &payload.files {
        write_file(&new, path, &file.data, owner.file_mode(file.mode), owner)?;
    }
    let name = new.file_name().map(OsString::from).unwrap_or_default();
    let link = root.join(NEW_DATA);
    ignore_missing(fs::remove_file(&link))?;
    symlink(name, &link)?;
    lchown(&link, None, owner.group)?;
    fs::rename(&link, root.join(DATA))?;

    link_top_level(root, payload, owner)?;
    remove_stale(root, payload, Some(&new))?;
    Ok(true)
}

/// The folder that `..data` leads to.
fn current(root: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_link(root.join(DATA)) {
        Ok(target) => Ok(target.file_name().map(|name| root.join(name))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn holds_exactly(folder: &Path, payload: &Payload, owner: Ownership) -> io::Result<bool> {
    for (path, file) in &payload.files {
        let path = folder.join(path);
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            return Ok(false);
        };
        let same = metadata.is_file()
            && metadata.mode() & 0o7777 == owner.file_mode(file.mode)
            && owner.group.is_none_or(|group| metadata.gid() == group)
            && metadata.len() == file.data.len() as u64
            && fs::read(&path)? == file.data;
        if !same {
            return Ok(false);
        }
    }
    let mut count = 0;
    count_files(folder, &mut count)?;
    Ok(count == payload.files.len())
}

fn count_files(folder: &Path, count: &mut usize) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            count_files(&entry.path(), count)?;
        } else {
            *count += 1;
        }
    }
    Ok(())
}

/// A folder named by the time, as the kubelet's; never one that exists.
fn new_folder(root: &Path) -> io::Result<PathBuf> {
    let time = Timestamp::now();
    let name = format!(
        "..{}.{:09}{}",
        time.strftime("%Y_%m_%d_%H_%M_%S"),
        time.subsec_nanosecond(),
        &uuid::Uuid::new_v4().simple().to_string()[..8],
    );
    let path = root.join(name);
    fs::create_dir(&path)?;
    Ok(path)
}

fn write_file(
    folder: &Path,
    path: &Path,
    data: &[u8],
    mode: u32,
    owner: Ownership,
) -> io::Result<()> {
    let mut parent = folder.to_owned();
    for component in path.parent().unwrap_or(Path::new("")).components() {
        parent.push(component);
        match fs::DirBuilder::new().mode(0o700).create(&parent) {
            Ok(()) => owner.apply_to_folder(&parent)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    // Private until it has its owner and mode.
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(folder.join(path))?;
    file.write_all(data)?;
    std::os::unix::fs::fchown(&file, None, owner.group)?;
    file.set_permissions(fs::Permissions::from_mode(mode))
}

fn link_top_level(root: &Path, payload: &Payload, owner: Ownership) -> io::Result<()> {
    for name in payload.top_level() {
        let link = root.join(name);
        match symlink(Path::new(DATA).join(name), &link) {
            Ok(()) => lchown(&link, None, owner.group)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Removes links of files that are no more, and folders of earlier writes.
fn remove_stale(root: &Path, payload: &Payload, keep: Option<&PathBuf>) -> io::Result<()> {
    let wanted: BTreeSet<&Path> = payload.top_level().collect();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == DATA || wanted.contains(Path::new(&name)) || keep == Some(&entry.path()) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            super::remove::tree(&entry.path())?;
        } else {
            ignore_missing(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use sandman_protocol::v1;
    use sandman_protocol::v1::file::Content;

    use super::*;
    use crate::volumes::HostFields;

    fn payload(files: &[(&str, &str, u32)]) -> Payload {
        let files = files.iter().map(|(path, data, mode)| v1::File {
            path: (*path).to_owned(),
            mode: *mode,
            content: Some(Content::Data(data.as_bytes().to_vec())),
        });
        let files = v1::Files {
            files: files.collect(),
            secret: false,
        };
        Payload::new(&files, &HostFields::default()).unwrap()
    }

    fn names(root: &Path) -> Vec<String> {
        let entries = fs::read_dir(root).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn writes_replaces_and_leaves_unchanged_content_alone() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("volume");
        let first = payload(&[("token", "one", 0o600), ("a/b/c", "deep", 0o444)]);
        assert!(write(&root, &first, Ownership::default()).unwrap());
        assert_eq!(fs::read_to_string(root.join("token")).unwrap(), "one");
        assert_eq!(fs::read_to_string(root.join("a/b/c")).unwrap(), "deep");
        assert_eq!(
            fs::metadata(root.join("token")).unwrap().mode() & 0o7777,
            0o600
        );
        assert_eq!(
            fs::read_link(root.join("a")).unwrap(),
            Path::new("..data/a")
        );
        let data = fs::read_link(root.join(DATA)).unwrap();

        assert!(!write(&root, &first, Ownership::default()).unwrap());
        assert_eq!(fs::read_link(root.join(DATA)).unwrap(), data);

        let second = payload(&[("token", "two", 0o600), ("new", "n", 0o644)]);
        assert!(write(&root, &second, Ownership::default()).unwrap());
        assert_eq!(fs::read_to_string(root.join("token")).unwrap(), "two");
        let present = names(&root);
        assert_eq!(present.len(), 4, "{present:?}");
        assert!(!root.join("a").exists());
        assert!(!root.join(&data).exists());
    }

    #[test]
    fn a_changed_mode_is_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("volume");
        write(&root, &payload(&[("f", "x", 0o644)]), Ownership::default()).unwrap();
        assert!(write(&root, &payload(&[("f", "x", 0o600)]), Ownership::default()).unwrap());
        assert_eq!(fs::metadata(root.join("f")).unwrap().mode() & 0o7777, 0o600);
    }

    #[test]
    fn an_open_file_keeps_its_content() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("volume");
        write(
            &root,
            &payload(&[("f", "old", 0o644)]),
            Ownership::default(),
        )
        .unwrap();
        let open = fs::File::open(root.join("f")).unwrap();
        write(
            &root,
            &payload(&[("f", "new", 0o644)]),
            Ownership::default(),
        )
        .unwrap();
        assert_eq!(io::read_to_string(open).unwrap(), "old");
    }

    #[test]
    fn finishes_what_a_killed_run_began() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("volume");
        let content = payload(&[("f", "x", 0o644), ("g", "y", 0o644)]);
        write(&root, &content, Ownership::default()).unwrap();
        // Killed before the links, and another time before the switch.
        fs::remove_file(root.join("g")).unwrap();
        fs::create_dir(root.join("..2020_01_01_00_00_00.000000000")).unwrap();
        symlink("..2020_01_01_00_00_00.000000000", root.join(NEW_DATA)).unwrap();
        write(&root, &content, Ownership::default()).unwrap();
        assert_eq!(fs::read_to_string(root.join("g")).unwrap(), "y");
        assert_eq!(names(&root).len(), 4);
        symlink("nowhere", root.join(NEW_DATA)).unwrap();
        write(&root, &payload(&[("f", "z", 0o644)]), Ownership::default()).unwrap();
        assert_eq!(fs::read_to_string(root.join("f")).unwrap(), "z");
    }

    #[test]
    fn an_empty_payload_is_an_empty_volume() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("volume");
        write(&root, &payload(&[("f", "x", 0o644)]), Ownership::default()).unwrap();
        write(&root, &payload(&[]), Ownership::default()).unwrap();
        assert!(names(&root).iter().all(|name| name.starts_with("..")));
    }

    #[test]
    fn the_group_may_read() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("volume");
        let owner = Ownership { group: Some(4242) };
        write(&root, &payload(&[("d/f", "x", 0o600)]), owner).unwrap();
        let file = fs::metadata(root.join("d/f")).unwrap();
        assert_eq!((file.gid(), file.mode() & 0o7777), (4242, 0o640));
        let folder = fs::metadata(root.join("d")).unwrap();
        assert_eq!((folder.gid(), folder.mode() & 0o7777), (4242, 0o2755));
        assert!(!write(&root, &payload(&[("d/f", "x", 0o600)]), owner).unwrap());
    }
}
