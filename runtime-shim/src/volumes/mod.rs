//! Volumes and managed files of this host's pods: emptyDir, files that vnode
//! resolved, `/etc/hosts` and the like, sub paths, and their hostile-safe removal.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use sandman_protocol::access::HostAccess;
use sandman_protocol::v1;
use sandman_protocol::v1::volume::Source;

mod atomic;
mod attributes;
mod etc;
mod host_path;
mod mounts;
mod payload;
mod remove;
mod sub_path;
mod termination;

use self::atomic::Ownership;
pub use self::etc::EtcFiles;
use self::payload::Payload;
pub(crate) use self::remove::tree as remove_tree;
use crate::eviction::{Disk, measure};
use crate::users::{self, OwnUsers};

/// Open to every user of the pod, as the kubelet makes it.
const EMPTY_DIR_MODE: u32 = 0o777;
/// The kernel's mode of a new tmpfs, which the kubelet leaves as it is.
const MEMORY_DIR_MODE: u32 = 0o1777;
/// Set-group-id, so that new files belong to the pod's fsGroup too.
const GROUP_DIR_BITS: u32 = 0o2770;

/// What only the host knows and files may contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostFields {
    /// Address of the pod.
    pub pod_ip: Option<IpAddr>,
    /// Address of this host.
    pub host_ip: Option<IpAddr>,
}

impl HostFields {
    /// The text of a field; empty if it is not known.
    pub fn text(&self, field: v1::HostField) -> String {
        let address = match field {
            v1::HostField::PodIp => self.pod_ip,
            v1::HostField::HostIp => self.host_ip,
            v1::HostField::Unspecified => None,
        };
        address
            .map(|address| address.to_string())
            .unwrap_or_default()
    }
}

/// Host paths of the managed files; bound into each container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcPaths {
    /// For `/etc/hosts`.
    pub hosts: PathBuf,
    /// For `/etc/hostname`.
    pub hostname: PathBuf,
    /// For `/etc/resolv.conf`.
    pub resolv_conf: PathBuf,
}

/// Why a volume could not be made.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The request is wrong; names the field.
    #[error("{0}")]
    Invalid(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl VolumeError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            what: what.into(),
            source,
        }
    }
}

/// The volumes of this host.
///
/// ```text
/// data_dir/volumes/<uid>/<name>               emptyDir, configMap, downwardAPI
/// data_dir/pods/<uid>/etc/                    hosts, hostname, resolv.conf
/// data_dir/pods/<uid>/termination/            <container>/<attempt>
/// state_dir/secrets/<uid>/<name>              files with any secret, on a tmpfs
/// state_dir/subpaths/<uid>/<container>/<n>    binds of sub paths
/// state_dir/hostpaths/<uid>/<name>            binds of the host's own paths
/// state_dir/imagevolumes/<uid>/<name>         mounts of images
/// state_dir/mapped/<uid>/<container>/<key>    any of them, and layers, for a pod with own users
/// ```
#[derive(Clone, Debug)]
pub struct Volumes {
    volumes: PathBuf,
    pods: PathBuf,
    secrets: PathBuf,
    sub_paths: PathBuf,
    host_paths: PathBuf,
    images: PathBuf,
    mapped: PathBuf,
    state_dir: PathBuf,
    access: HostAccess,
}

impl Volumes {
    /// Secrets go to a tmpfs below `state_dir`, all else below `data_dir`. `access` bounds which
    /// of the host's own paths can be volumes.
    ///
    /// # Errors
    /// A folder cannot be made, or the tmpfs not be mounted.
    pub fn new(state_dir: &Path, data_dir: &Path, access: HostAccess) -> Result<Self, VolumeError> {
        let volumes = Self {
            volumes: data_dir.join("volumes"),
            pods: data_dir.join("pods"),
            secrets: state_dir.join("secrets"),
            sub_paths: state_dir.join("subpaths"),
            host_paths: state_dir.join("hostpaths"),
            images: state_dir.join("imagevolumes"),
            mapped: state_dir.join("mapped"),
            state_dir: state_dir.to_owned(),
            access,
        };
        for folder in [
            &volumes.volumes,
            &volumes.pods,
            &volumes.secrets,
            &volumes.sub_paths,
            &volumes.host_paths,
            &volumes.images,
            &volumes.mapped,
        ] {
            // Not for other users of the host; containers get binds of what is inside.
            let made = fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder);
            made.map_err(VolumeError::io(format!("create {folder:?}")))?;
        }
        mounts::secret_tmpfs(&volumes.secrets).map_err(VolumeError::io(format!(
            "mount tmpfs on {:?}",
            volumes.secrets
        )))?;
        Ok(volumes)
    }

    /// Makes all volumes of a pod, or brings their files up to date while it
    /// runs; host path by volume name. Mount those of `Files` read-only.
    ///
    /// # Errors
    /// A volume is invalid or cannot be made; names the volume.
    pub async fn apply(
        &self,
        uid: &str,
        volumes: &[v1::Volume],
        fs_group: Option<u32>,
        fields: &HostFields,
    ) -> Result<BTreeMap<String, PathBuf>, VolumeError> {
        check_name("uid", uid)?;
        let (this, uid, volumes, fields) =
            (self.clone(), uid.to_owned(), volumes.to_vec(), *fields);
        blocking(move || {
            let mut paths = BTreeMap::new();
            for volume in &volumes {
                check_name("volumes[].name", &volume.name)?;
                let path = this.apply_one(&uid, volume, fs_group, &fields)?;
                if paths.insert(volume.name.clone(), path).is_some() {
                    let text = format!("volumes: {:?} is there twice", volume.name);
                    return Err(VolumeError::Invalid(text));
                }
            }
            Ok(paths)
        })
        .await
    }

    fn apply_one(
        &self,
        uid: &str,
        volume: &v1::Volume,
        fs_group: Option<u32>,
        fields: &HostFields,
    ) -> Result<PathBuf, VolumeError> {
        let name = &volume.name;
        let failed = || VolumeError::io(format!("volume {name:?}"));
        match &volume.source {
            Some(Source::EmptyDir(empty_dir)) => {
                let path = self.volumes.join(uid).join(name);
                empty_dir_at(&path, empty_dir, fs_group).map_err(failed())?;
                Ok(path)
            }
            Some(Source::Files(files)) => {
                let root = if files.secret {
                    &self.secrets
                } else {
                    &self.volumes
                };
                let path = root.join(uid).join(name);
                let payload = Payload::new(files, fields)
                    .map_err(|why| VolumeError::Invalid(format!("volume {name:?}: {why}")))?;
                atomic::write(&path, &payload, Ownership { group: fs_group }).map_err(failed())?;
                Ok(path)
            }
            Some(Source::Image(_)) => {
                let path = self.images.join(uid).join(name);
                if mounts::is_mounted(&path).map_err(failed())? {
                    return Ok(path);
                }
                Err(VolumeError::Invalid(format!(
                    "volume {name:?}: its image is not mounted"
                )))
            }
            Some(Source::HostPath(wish)) => {
                let pin = self.host_paths.join(uid).join(name);
                host_path::resolve(wish, &self.access, &self.state_dir, &pin).map_err(|error| {
                    VolumeError::Invalid(format!(
                        "MountVolume.SetUp failed for volume {name:?} : {error}"
                    ))
                })
            }
            None => Err(VolumeError::Invalid(format!(
                "volume {name:?} has no source"
            ))),
        }
    }

    /// Writes the managed files below `/etc` of a pod.
    ///
    /// # Errors
    /// A name or address is no such thing, or a file cannot be written.
    pub async fn etc_files(&self, uid: &str, etc: &EtcFiles) -> Result<EtcPaths, VolumeError> {
        check_name("uid", uid)?;
        let (folder, etc) = (self.pods.join(uid).join("etc"), etc.clone());
        blocking(move || {
            let contents = etc.contents()?;
            let paths = EtcPaths {
                hosts: folder.join("hosts"),
                hostname: folder.join("hostname"),
                resolv_conf: folder.join("resolv.conf"),
            };
            fs::create_dir_all(&folder).map_err(VolumeError::io(format!("create {folder:?}")))?;
            for (path, content) in [
                (&paths.hosts, &contents.hosts),
                (&paths.hostname, &contents.hostname),
                (&paths.resolv_conf, &contents.resolv_conf),
            ] {
                // In place: containers hold the file itself, not its name.
                if etc::holds(path, content).unwrap_or(false) {
                    continue;
                }
                fs::write(path, content)
                    .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o644)))
                    .map_err(VolumeError::io(format!("write {path:?}")))?;
            }
            Ok(paths)
        })
        .await
    }

    /// Makes the empty termination message file of one attempt and returns its path.
    ///
    /// # Errors
    /// The file cannot be made.
    pub async fn termination_file(
        &self,
        uid: &str,
        container: &str,
        attempt: u32,
    ) -> Result<PathBuf, VolumeError> {
        let path = self.termination_path(uid, container, attempt)?;
        blocking(move || {
            termination::create(&path).map_err(VolumeError::io(format!("create {path:?}")))?;
            Ok(path)
        })
        .await
    }

    /// The last `limit` bytes of a termination message file; empty if there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn read_termination_file(
        &self,
        uid: &str,
        container: &str,
        attempt: u32,
        limit: usize,
    ) -> Result<Vec<u8>, VolumeError> {
        let path = self.termination_path(uid, container, attempt)?;
        blocking(move || {
            termination::read_end(&path, limit).map_err(VolumeError::io(format!("read {path:?}")))
        })
        .await
    }

    fn termination_path(
        &self,
        uid: &str,
        container: &str,
        attempt: u32,
    ) -> Result<PathBuf, VolumeError> {
        check_name("uid", uid)?;
        check_name("container name", container)?;
        let folder = self.pods.join(uid).join("termination").join(container);
        Ok(folder.join(attempt.to_string()))
    }

    /// Pins `sub_path` of a volume for one mount of a container and returns the
    /// path to bind. What is missing is made a directory, as the kubelet does.
    /// A link may lead anywhere inside the volume, never out of it.
    ///
    /// # Errors
    /// The path is invalid, leaves the volume, or cannot be made or mounted.
    pub async fn resolve_sub_path(
        &self,
        uid: &str,
        container: &str,
        mount_index: usize,
        volume: &Path,
        sub_path: &str,
    ) -> Result<PathBuf, VolumeError> {
        check_name("uid", uid)?;
        check_name("container name", container)?;
        sub_path::check(sub_path)
            .map_err(|why| VolumeError::Invalid(format!("subPath {sub_path:?} {why}")))?;
        let folder = self.sub_paths.join(uid).join(container);
        let (volume, sub_path) = (volume.to_owned(), sub_path.to_owned());
        blocking(move || {
            let pin = folder.join(mount_index.to_string());
            fs::create_dir_all(&folder)
                .and_then(|()| sub_path::pin(&volume, &sub_path, &pin))
                .map_err(|error| match error.raw_os_error() {
                    Some(libc::EXDEV | libc::ELOOP) => VolumeError::Invalid(format!(
                        "subPath {sub_path:?} leads out of its volume"
                    )),
                    _ => VolumeError::io(format!("subPath {sub_path:?}"))(error),
                })?;
            Ok(pin)
        })
        .await
    }

    /// Shows a file or folder to one container of a pod with ids of its own, and returns the path
    /// to bind. `key` tells the container's mounts apart.
    ///
    /// # Errors
    /// Its file system cannot map ids, or the kernel refuses.
    pub async fn map_users(
        &self,
        uid: &str,
        container: &str,
        key: &str,
        source: &Path,
        users: &OwnUsers,
    ) -> Result<PathBuf, VolumeError> {
        let folder = self.mapped_folder(uid, container)?;
        let (pin, source, users) = (folder.join(key), source.to_owned(), users.clone());
        blocking(move || {
            let map = || {
                fs::create_dir_all(&folder)?;
                make_pin(&pin, fs::metadata(&source)?.is_dir())?;
                let namespace = fs::File::open(&users.namespace)?;
                users::bind(&source, &pin, namespace.as_fd())
            };
            map().map_err(|error| match error.raw_os_error() {
                Some(libc::EINVAL) => VolumeError::Invalid(format!(
                    "spec.hostUsers: the file system of {source:?} cannot map ids"
                )),
                _ => VolumeError::io(format!("map ids of {source:?}"))(error),
            })?;
            Ok(pin)
        })
        .await
    }

    /// Where the mapped mounts of a container are pinned.
    ///
    /// # Errors
    /// A name is no such thing.
    pub fn mapped_folder(&self, uid: &str, container: &str) -> Result<PathBuf, VolumeError> {
        check_name("uid", uid)?;
        check_name("container name", container)?;
        Ok(self.mapped.join(uid).join(container))
    }

    /// Where the image of a volume belongs; `None` when it is mounted there already.
    ///
    /// # Errors
    /// A name is no such thing, or the folder cannot be made.
    pub async fn image_mount_point(
        &self,
        uid: &str,
        volume: &str,
    ) -> Result<Option<PathBuf>, VolumeError> {
        check_name("uid", uid)?;
        check_name("volumes[].name", volume)?;
        let path = self.images.join(uid).join(volume);
        blocking(move || {
            let failed = || VolumeError::io(format!("create {path:?}"));
            fs::create_dir_all(&path).map_err(failed())?;
            let mounted = mounts::is_mounted(&path).map_err(failed())?;
            Ok((!mounted).then_some(path))
        })
        .await
    }

    /// Disk that an emptyDir takes.
    ///
    /// # Errors
    /// It is unreadable.
    pub(crate) async fn usage(&self, uid: &str, volume: &str) -> Result<Disk, VolumeError> {
        check_name("uid", uid)?;
        check_name("volumes[].name", volume)?;
        let path = self.volumes.join(uid).join(volume);
        blocking(move || measure::tree(&path).map_err(VolumeError::io(format!("measure {path:?}"))))
            .await
    }

    /// Removes everything of a pod, whatever its containers left there;
    /// succeeds if there is nothing. Call it when no process of the pod lives.
    ///
    /// # Errors
    /// Something cannot be removed; call again.
    pub async fn remove(&self, uid: &str) -> Result<(), VolumeError> {
        check_name("uid", uid)?;
        let (this, uid) = (self.clone(), uid.to_owned());
        blocking(move || {
            let sub_paths = this.sub_paths.join(&uid);
            let volumes = this.volumes.join(&uid);
            let host_paths = this.host_paths.join(&uid);
            let images = this.images.join(&uid);
            let mapped = this.mapped.join(&uid);
            mounts::unmount_below(&mapped, 2)
                .and_then(|()| mounts::unmount_below(&sub_paths, 2))
                .and_then(|()| mounts::unmount_below(&host_paths, 1))
                .and_then(|()| mounts::unmount_below(&images, 1))
                .and_then(|()| mounts::unmount_below(&volumes, 1))
                .map_err(VolumeError::io(format!("unmount volumes of pod {uid}")))?;
            for folder in [
                mapped,
                sub_paths,
                host_paths,
                images,
                volumes,
                this.secrets.join(&uid),
                this.pods.join(&uid),
            ] {
                remove::tree(&folder).map_err(VolumeError::io(format!("remove {folder:?}")))?;
            }
            Ok(())
        })
        .await
    }
}

/// Makes an empty folder or file that something can be mounted over.
pub(crate) fn make_pin(pin: &Path, folder: bool) -> io::Result<()> {
    mounts::unmount(pin)?;
    // That of an earlier start may be of the other kind.
    remove::tree(pin)?;
    if folder {
        fs::create_dir(pin)
    } else {
        fs::File::create_new(pin).map(drop)
    }
}

/// Makes an emptyDir unless it is there: what its users did to it is theirs.
fn empty_dir_at(path: &Path, empty_dir: &v1::EmptyDir, fs_group: Option<u32>) -> io::Result<()> {
    let group_bits = fs_group.map_or(0, |_| GROUP_DIR_BITS);
    let mode = EMPTY_DIR_MODE | group_bits;
    if empty_dir.memory {
        fs::create_dir_all(path)?;
        let mode = MEMORY_DIR_MODE | group_bits;
        return mounts::volume_tmpfs(path, mode, fs_group, empty_dir.size_limit_bytes);
    }
    if path.is_dir() {
        return Ok(());
    }
    // Complete before it has its name: a crash leaves none with half the rights.
    let Some(folder) = path.parent() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(folder)?;
    let making = folder.join(format!(".making-{}", uuid::Uuid::new_v4()));
    fs::create_dir(&making)?;
    chown(&making, None, fs_group)?;
    fs::set_permissions(&making, fs::Permissions::from_mode(mode))?;
    fs::rename(&making, path)
}

/// Names become file names.
fn check_name(field: &str, name: &str) -> Result<(), VolumeError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if !name.is_empty() && name.len() <= 253 && !name.starts_with('.') && name.bytes().all(fits) {
        return Ok(());
    }
    Err(VolumeError::Invalid(format!(
        "{field} {name:?} is not a valid name"
    )))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(VolumeError::io("volume thread")(io::Error::other(error))))
}

#[cfg(test)]
mod tests;
