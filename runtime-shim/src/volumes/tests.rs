//! Whole pods' volumes, on real mounts in a mount namespace of the test's own;
//! these need root and say so when skipped.

use std::os::unix::fs::MetadataExt as _;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use sandman_protocol::v1::file::Content;

use super::*;

const UID: &str = "0a1b2c3d-0000-4000-8000-00000000000a";

fn in_own_mounts<F: Future<Output = ()>>(test: impl FnOnce(PathBuf, Volumes) -> F + Send) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            let root = folder.path();
            let access = HostAccess {
                host_path: vec![root.join("allowed")],
                ..HostAccess::default()
            };
            let volumes = Volumes::new(&root.join("state"), &root.join("data"), access).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(test(root.to_owned(), volumes));
        });
        thread.join().unwrap();
    });
}

fn empty_dir(name: &str, memory: bool, size_limit_bytes: u64) -> v1::Volume {
    let source = Source::EmptyDir(v1::EmptyDir {
        memory,
        size_limit_bytes,
    });
    v1::Volume {
        name: name.to_owned(),
        source: Some(source),
    }
}

fn files(name: &str, secret: bool, content: &str) -> v1::Volume {
    let content = Some(Content::Data(content.as_bytes().to_vec()));
    let file = v1::File {
        path: "token".to_owned(),
        mode: 0o600,
        content,
    };
    let source = Source::Files(v1::Files {
        files: vec![file],
        secret,
    });
    v1::Volume {
        name: name.to_owned(),
        source: Some(source),
    }
}

fn file_system(path: &Path) -> nix::sys::statfs::FsType {
    nix::sys::statfs::statfs(path).unwrap().filesystem_type()
}

#[test]
fn a_pods_volumes_are_made_kept_and_removed() {
    in_own_mounts(|root, volumes| async move {
        let all = [
            empty_dir("disk", false, 0),
            empty_dir("memory", true, 1 << 20),
            files("secret", true, "s3cret"),
            files("config", false, "plain"),
        ];
        let fields = HostFields::default();
        let paths = volumes.apply(UID, &all, Some(4242), &fields).await.unwrap();

        for (name, mode) in [("disk", 0o2777), ("memory", 0o3777)] {
            let metadata = fs::metadata(&paths[name]).unwrap();
            assert_eq!(
                (metadata.mode() & 0o7777, metadata.gid()),
                (mode, 4242),
                "{name}"
            );
            fs::write(paths[name].join("kept"), "x").unwrap();
        }
        for name in ["memory", "secret"] {
            assert_eq!(
                file_system(&paths[name]),
                nix::sys::statfs::TMPFS_MAGIC,
                "{name}"
            );
        }
        assert!(fs::write(paths["memory"].join("big"), vec![0; 2 << 20]).is_err());
        assert!(paths["secret"].starts_with(root.join("state")));
        assert_eq!(
            fs::read_to_string(paths["secret"].join("token")).unwrap(),
            "s3cret"
        );

        // A user changed the mode; the next apply leaves it alone and refreshes files.
        fs::set_permissions(&paths["disk"], fs::Permissions::from_mode(0o700)).unwrap();
        let mut newer = all.clone();
        newer[2] = files("secret", true, "rotated");
        assert_eq!(
            volumes
                .apply(UID, &newer, Some(4242), &fields)
                .await
                .unwrap(),
            paths
        );
        assert_eq!(fs::metadata(&paths["disk"]).unwrap().mode() & 0o7777, 0o700);
        assert!(paths["memory"].join("kept").exists());
        assert_eq!(
            fs::read_to_string(paths["secret"].join("token")).unwrap(),
            "rotated"
        );

        volumes
            .etc_files(
                UID,
                &EtcFiles {
                    hostname: "a".to_owned(),
                    ..EtcFiles::default()
                },
            )
            .await
            .unwrap();
        let message = volumes.termination_file(UID, "main", 0).await.unwrap();
        fs::write(message, "last words").unwrap();
        let read = volumes
            .read_termination_file(UID, "main", 0, 5)
            .await
            .unwrap();
        assert_eq!(read, b"words");

        volumes.remove(UID).await.unwrap();
        volumes.remove(UID).await.unwrap();
        for folder in [
            "data/volumes",
            "data/pods",
            "state/secrets",
            "state/subpaths",
        ] {
            assert_eq!(
                fs::read_dir(root.join(folder)).unwrap().count(),
                0,
                "{folder}"
            );
        }
    });
}

#[test]
fn sub_paths_are_pinned_and_fresh_on_each_start() {
    in_own_mounts(|_root, volumes| async move {
        let all = [empty_dir("disk", false, 0), files("config", false, "plain")];
        let paths = volumes
            .apply(UID, &all, None, &HostFields::default())
            .await
            .unwrap();
        let disk = &paths["disk"];
        let pin = volumes
            .resolve_sub_path(UID, "main", 0, disk, "a/b")
            .await
            .unwrap();
        fs::write(pin.join("file"), "x").unwrap();
        assert!(disk.join("a/b/file").exists());

        fs::rename(disk.join("a"), disk.join("old")).unwrap();
        let again = volumes
            .resolve_sub_path(UID, "main", 0, disk, "a/b")
            .await
            .unwrap();
        assert_eq!(again, pin);
        assert!(!pin.join("file").exists());

        // A file of a configMap, by the links of its layout.
        let config = &paths["config"];
        let pin = volumes
            .resolve_sub_path(UID, "main", 1, config, "token")
            .await
            .unwrap();
        assert_eq!(fs::read_to_string(&pin).unwrap(), "plain");
        // The same mount, another kind.
        let pin = volumes
            .resolve_sub_path(UID, "main", 1, disk, "folder")
            .await
            .unwrap();
        assert!(pin.is_dir());

        std::os::unix::fs::symlink("/etc", disk.join("escape")).unwrap();
        for path in ["escape", "escape/passwd", "../x", "/etc"] {
            let error = volumes
                .resolve_sub_path(UID, "main", 2, disk, path)
                .await
                .unwrap_err();
            assert!(matches!(error, VolumeError::Invalid(_)), "{path}: {error}");
        }
        volumes.remove(UID).await.unwrap();
        assert!(!pin.exists());
    });
}

#[test]
fn a_restart_finds_the_secrets_where_they_were() {
    in_own_mounts(|root, volumes| async move {
        let all = [files("secret", true, "s3cret")];
        let fields = HostFields::default();
        let before = volumes.apply(UID, &all, None, &fields).await.unwrap();
        let inode = fs::metadata(before["secret"].join("token")).unwrap().ino();
        let volumes = Volumes::new(
            &root.join("state"),
            &root.join("data"),
            HostAccess::default(),
        )
        .unwrap();
        let after = volumes.apply(UID, &all, None, &fields).await.unwrap();
        assert_eq!(before, after);
        assert_eq!(
            fs::metadata(after["secret"].join("token")).unwrap().ino(),
            inode
        );
        volumes.remove(UID).await.unwrap();
    });
}

#[test]
fn names_cannot_leave_their_folder() {
    in_own_mounts(|_root, volumes| async move {
        let fields = HostFields::default();
        for name in ["", "..", "a/b", ".x"] {
            let all = [empty_dir(name, false, 0)];
            assert!(
                volumes.apply(UID, &all, None, &fields).await.is_err(),
                "{name:?}"
            );
            assert!(volumes.remove(name).await.is_err());
            assert!(volumes.termination_file(UID, name, 0).await.is_err());
        }
        let twice = [empty_dir("a", false, 0), empty_dir("a", false, 0)];
        assert!(volumes.apply(UID, &twice, None, &fields).await.is_err());
        let sourceless = [v1::Volume {
            name: "a".to_owned(),
            source: None,
        }];
        assert!(
            volumes
                .apply(UID, &sourceless, None, &fields)
                .await
                .is_err()
        );
    });
}

#[test]
fn immutable_files_do_not_stop_removal() {
    in_own_mounts(|root, volumes| async move {
        let all = [empty_dir("disk", false, 0)];
        let paths = volumes
            .apply(UID, &all, None, &HostFields::default())
            .await
            .unwrap();
        let folder = paths["disk"].join("folder");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("file"), "x").unwrap();
        for path in [folder.join("file"), folder] {
            let status = std::process::Command::new("chattr")
                .arg("+i")
                .arg(&path)
                .status();
            if !status.is_ok_and(|status| status.success()) {
                eprintln!("skipped: {root:?} is on a file system without attributes");
                return;
            }
        }
        volumes.remove(UID).await.unwrap();
        assert!(!paths["disk"].exists());
    });
}

#[test]
fn host_paths_are_pinned_and_outlive_their_pods() {
    in_own_mounts(|root, volumes| async move {
        let allowed = root.join("allowed");
        std::fs::create_dir_all(allowed.join("data/below")).unwrap();
        let none: Option<&str> = None;
        // A mount below is seen too, and is still there afterwards.
        mount(
            none,
            &allowed.join("data/below"),
            Some("tmpfs"),
            MsFlags::empty(),
            none,
        )
        .unwrap();
        std::fs::write(allowed.join("data/below/file"), "precious").unwrap();
        let wish = |path: PathBuf| v1::Volume {
            name: "host".to_owned(),
            source: Some(Source::HostPath(v1::HostPath {
                path: path.to_string_lossy().into_owned(),
                r#type: v1::HostPathType::Directory as i32,
            })),
        };
        let fields = HostFields::default();
        let data = [wish(allowed.join("data"))];
        let first = volumes.apply(UID, &data, None, &fields).await.unwrap();
        // What was checked stays what is mounted, whoever moves it.
        std::fs::rename(allowed.join("data"), allowed.join("moved")).unwrap();
        std::os::unix::fs::symlink("/etc", allowed.join("data")).unwrap();
        let pinned = &first["host"];
        let text = std::fs::read_to_string(pinned.join("below/file")).unwrap();
        assert_eq!(text, "precious");
        let error = volumes.apply(UID, &data, None, &fields).await.unwrap_err();
        assert!(error.to_string().contains("leads out of"), "{error}");
        let outside = [wish(root.join("state"))];
        let error = volumes
            .apply(UID, &outside, None, &fields)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("allow.host_path"), "{error}");

        volumes.remove(UID).await.unwrap();
        assert!(!pinned.exists());

        // Around our own state, no pod's mounts are passed on to another.
        let around = [wish(allowed.clone())];
        let state = Volumes::new(
            &allowed.join("state"),
            &root.join("data"),
            volumes.access.clone(),
        );
        let state = state.unwrap();
        let memory = [empty_dir("memory", true, 0), around[0].clone()];
        let paths = state.apply(UID, &memory, None, &fields).await.unwrap();
        let below = paths["host"].join("state/secrets");
        assert!(
            below.is_dir()
                && state.secrets.metadata().unwrap().dev() != below.metadata().unwrap().dev()
        );
        state.remove(UID).await.unwrap();
        let text = std::fs::read_to_string(allowed.join("moved/below/file")).unwrap();
        assert_eq!(text, "precious");
    });
}
