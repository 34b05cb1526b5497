//! A mounted layer is the tree that GNU tar unpacks.

use std::{fs, process::Command};

use crate::support::{Mounted, archive, assert_same, convert, tree};

#[test]
#[ignore = "needs root and EROFS from files"]
fn a_mounted_layer_is_what_tar_unpacks() {
    for seed in 0..12 {
        let work = tempfile::tempdir().unwrap();
        let at = |name: &str| work.path().join(name);
        let archive = archive(seed, 400);
        fs::write(at("layer.tar"), &archive).unwrap();
        fs::create_dir(at("plain")).unwrap();
        let unpacked = Command::new("tar")
            .args([
                "--xattrs",
                "--xattrs-include=*",
                "--same-owner",
                "--delay-directory-restore",
                "--warning=no-timestamp",
                "-xpf",
            ])
            .arg(at("layer.tar"))
            .arg("-C")
            .arg(at("plain"))
            .status()
            .unwrap();
        assert!(unpacked.success());
        let converted = convert(&archive, &at("layer")).unwrap();
        let _mounted = Mounted::new(converted.folder(), &at("mounted"));
        let compared = assert_same(&at("mounted"), &at("plain"));
        assert!(compared > 300, "{compared} paths");
    }
}

#[test]
#[ignore = "needs root and EROFS from files"]
fn overlayfs_sees_whiteouts_and_opaque_directories() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    let work = tempfile::tempdir().unwrap();
    let at = |name: &str| work.path().join(name);
    let layer = |paths: &[&str]| {
        let mut builder = tar::Builder::new(Vec::new());
        for path in paths {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_mode(0o755);
            if path.ends_with('/') {
                header.set_entry_type(tar::EntryType::Directory);
            }
            builder
                .append_data(&mut header, path, std::io::empty())
                .unwrap();
        }
        builder.into_inner().unwrap()
    };
    let below = layer(&[
        "gone",
        "stays",
        "opaque/",
        "opaque/hidden",
        "again/",
        "again/hidden",
        "merged/",
        "merged/below",
    ]);
    let above = layer(&[
        ".wh.gone",
        "opaque/",
        "opaque/.wh..wh..opq",
        "opaque/new",
        ".wh.again",
        "again/",
        "merged/",
        "merged/above",
    ]);
    let below = convert(&below, &at("below")).unwrap();
    let above = convert(&above, &at("above")).unwrap();
    let _below = Mounted::new(below.folder(), &at("lower"));
    let _above = Mounted::new(above.folder(), &at("upper"));
    fs::create_dir(at("merged")).unwrap();
    let options = format!(
        "lowerdir={}:{}",
        at("upper").display(),
        at("lower").display()
    );
    mount(
        Some("overlay"),
        &at("merged"),
        Some("overlay"),
        MsFlags::MS_RDONLY,
        Some(&*options),
    )
    .unwrap();
    let paths: Vec<_> = tree(&at("merged"))
        .into_keys()
        .map(|path| path.display().to_string())
        .collect();
    umount2(&at("merged"), MntFlags::MNT_DETACH).unwrap();
    let wanted = [
        "again",
        "merged",
        "merged/above",
        "merged/below",
        "opaque",
        "opaque/new",
        "stays",
    ];
    assert_eq!(paths, wanted);
}

#[test]
#[ignore = "needs root and EROFS from files"]
fn a_large_directory_is_found_by_every_name() {
    let mut builder = tar::Builder::new(Vec::new());
    for number in 0..20_000 {
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        header.set_mode(0o600 + number % 0o100);
        builder
            .append_data(&mut header, format!("d/{number}"), std::io::empty())
            .unwrap();
    }
    let archive = builder.into_inner().unwrap();
    let work = tempfile::tempdir().unwrap();
    let converted = convert(&archive, &work.path().join("layer")).unwrap();
    assert_eq!(converted.index().inodes(), 20_002);
    assert_eq!(converted.index().implicit_directories(), 1);
    let target = work.path().join("mounted");
    let _mounted = Mounted::new(converted.folder(), &target);
    for number in 0..20_000 {
        use std::os::unix::fs::MetadataExt;
        let metadata = fs::metadata(target.join(format!("d/{number}"))).unwrap();
        assert_eq!(metadata.mode(), 0o100_600 + number % 0o100, "{number}");
    }
    assert_eq!(fs::read_dir(target.join("d")).unwrap().count(), 20_000);
    assert!(!target.join("d/20000").exists());
}
