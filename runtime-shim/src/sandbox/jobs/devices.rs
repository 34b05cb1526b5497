//! Device nodes of the host, all of which a privileged container gets (containerd's
//! `HostDevices`).

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use nix::sys::stat::{major, minor};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceBuilder, LinuxDeviceType};

/// Folders of `/dev` that are file systems of their own in a container.
const OWN: [&str; 4] = ["pts", "shm", "fd", "mqueue"];
/// No host has as many; what is beyond is left out.
const MAX_DEVICES: usize = 4096;
/// Folders of devices lie in folders, but not deep.
const MAX_DEPTH: usize = 8;

/// Every device node below a folder.
pub(super) fn host_devices(dev: &Path) -> io::Result<Vec<LinuxDevice>> {
    let mut devices = Vec::new();
    collect(dev, 0, &mut devices)?;
    Ok(devices)
}

fn collect(folder: &Path, depth: usize, devices: &mut Vec<LinuxDevice>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        // A device may go while it is looked at.
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        let kind = metadata.file_type();
        if kind.is_dir() {
            let own = depth == 0 && OWN.iter().any(|own| name == *own);
            if !own && depth < MAX_DEPTH && !name.to_string_lossy().starts_with('.') {
                collect(&path, depth + 1, devices)?;
            }
            continue;
        }
        let kind = match (kind.is_block_device(), kind.is_char_device()) {
            (true, _) => LinuxDeviceType::B,
            (_, true) => LinuxDeviceType::C,
            _ => continue,
        };
        // The container's own terminal takes this name.
        if depth == 0 && name == "console" || devices.len() >= MAX_DEVICES {
            continue;
        }
        let number = metadata.rdev();
        let device = LinuxDeviceBuilder::default()
            .path(path)
            .typ(kind)
            .major(i64::try_from(major(number)).map_err(io::Error::other)?)
            .minor(i64::try_from(minor(number)).map_err(io::Error::other)?)
            .file_mode(metadata.mode() & 0o7777)
            .uid(metadata.uid())
            .gid(metadata.gid())
            .build()
            .map_err(io::Error::other)?;
        devices.push(device);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machines_devices_are_found() {
        let devices = host_devices(Path::new("/dev")).unwrap();
        let find = |path: &str| {
            devices
                .iter()
                .find(|device| device.path() == Path::new(path))
        };
        let null = find("/dev/null").unwrap();
        assert_eq!((null.major(), null.minor()), (1, 3));
        assert_eq!(null.typ(), LinuxDeviceType::C);
        assert!(find("/dev/console").is_none());
        assert!(devices.iter().all(|d| !d.path().starts_with("/dev/pts")));
    }
}
