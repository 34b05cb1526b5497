use std::collections::BTreeMap;

use erofs_rs::{EroFS, backend::SliceImage};

use super::*;
use crate::{
    tar::{Entry, Parser, TarError, TarSink},
    testing::{Archive, Fields},
};

const MANY: u32 = 1 << 20;

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Tar(#[from] TarError),
    #[error(transparent)]
    Tree(#[from] TreeError),
}

struct Building(Tree);

impl TarSink for Building {
    type Error = Refused;

    fn entry(&mut self, entry: Entry) -> Result<(), Refused> {
        Ok(self.0.add(entry)?)
    }
}

fn build(archive: &[u8]) -> Result<Image, Refused> {
    let mut tree = Building(Tree::new(MANY));
    let mut parser = Parser::new();
    parser.push(archive, &mut tree)?;
    parser.finish()?;
    Ok(tree.0.finish(archive.len() as u64)?)
}

/// What another implementation reads from an image: a line for each path.
fn listing(archive: &[u8]) -> BTreeMap<String, String> {
    let image = build(archive).unwrap();
    // Twice the same.
    assert!(image.bytes == build(archive).unwrap().bytes);
    let devices = vec![SliceImage::new(archive)];
    let fs = EroFS::new_with_devices(SliceImage::new(&image.bytes), devices).unwrap();
    let mut lines = BTreeMap::new();
    let root = fs.get_inode(fs.super_block().root_inode_id()).unwrap();
    let mut inodes = std::collections::HashSet::from([root.id()]);
    let entries = fs.walk_dir("/").unwrap().map(Result::unwrap);
    let all = entries.map(|entry| {
        (
            entry.dir_entry.path().to_string_lossy().into_owned(),
            entry.inode,
        )
    });
    for (path, inode) in std::iter::once(("/".to_owned(), root)).chain(all) {
        inodes.insert(inode.id());
        let what = match inode.device() {
            Some(device) => format!(" {device:?}"),
            None if inode.is_dir() => String::new(),
            None if inode.is_symlink() => {
                format!(
                    " -> {}",
                    fs.read_link_inode(inode).unwrap().to_string_lossy()
                )
            }
            None if inode.is_file() => {
                let mut data = vec![0; inode.data_size() as usize];
                let file = fs.open_inode_file(inode).unwrap();
                assert_eq!(file.read_at(&mut data, 0).unwrap(), data.len());
                format!(" {:?}", String::from_utf8_lossy(&data))
            }
            None => " fifo".to_owned(),
        };
        use std::os::unix::fs::PermissionsExt;
        let mut line = format!(
            "{:o} {}:{} x{}{what}",
            inode.permissions().mode() & 0o7777,
            inode.uid(),
            inode.gid(),
            inode.nlink(),
        );
        for (name, value) in fs.xattrs_inode(inode).unwrap().iter() {
            line += &format!(
                " {}={:?}",
                String::from_utf8_lossy(name),
                String::from_utf8_lossy(value)
            );
        }
        assert!(lines.insert(path, line).is_none());
    }
    assert_eq!(inodes.len() as u64, image.inodes);
    lines
}

/// The listing without what every tree has.
fn check(archive: &mut Archive, wanted: &[(&str, &str)]) {
    let mut found = listing(&archive.end());
    let root = found.remove("/").unwrap();
    assert!(root.starts_with("755 0:0 ") || wanted[0].0 == "/", "{root}");
    if wanted[0].0 == "/" {
        found.insert("/".to_owned(), root);
    }
    let wanted: BTreeMap<_, _> = (wanted.iter())
        .map(|(path, line)| ((*path).to_owned(), (*line).to_owned()))
        .collect();
    assert_eq!(found, wanted);
}

fn refused(archive: &mut Archive, wanted: &str) {
    let error = build(&archive.end()).unwrap_err().to_string();
    assert!(error.contains(wanted), "{error:?} does not say {wanted:?}");
}

#[test]
fn all_kinds() {
    let mut archive = Archive::default();
    archive
        .directory("./", 0o700)
        .directory("d", 0o1777)
        .file("d/f", b"data");
    archive
        .link(b'2', "d/s", "../x")
        .link(b'6', "p", "")
        .file("empty", b"");
    archive
        .link(b'1', "hard", "d/f")
        .link(b'1', "d/soft", "d/s");
    archive.entry(&Fields {
        path: b"c",
        flag: b'3',
        uid: 1000,
        gid: 5,
        device: (1, 3),
        ..Fields::default()
    });
    archive.entry(&Fields {
        path: b"b",
        flag: b'4',
        mode: 0o4755,
        device: (259, 1000),
        ..Fields::default()
    });
    check(
        &mut archive,
        &[
            ("/", "700 0:0 x3"),
            ("/d", "1777 0:0 x2"),
            ("/d/f", "644 0:0 x2 \"data\""),
            ("/d/s", "777 0:0 x2 -> ../x"),
            ("/d/soft", "777 0:0 x2 -> ../x"),
            ("/p", "644 0:0 x1 fifo"),
            ("/empty", "644 0:0 x1 \"\""),
            ("/hard", "644 0:0 x2 \"data\""),
            ("/c", "644 1000:5 x1 (1, 3)"),
            ("/b", "4755 0:0 x1 (259, 1000)"),
        ],
    );
}

#[test]
fn later_entries_replace_earlier_ones() {
    let mut archive = Archive::default();
    archive.file("f", b"old").file("f", b"new");
    archive
        .file("becomes a directory", b"x")
        .directory("becomes a directory", 0o711);
    archive
        .directory("becomes a file", 0o755)
        .file("becomes a file/lost", b"")
        .file("becomes a file", b"y");
    archive
        .directory("merged", 0o700)
        .file("merged/kept", b"k")
        .directory("merged", 0o750);
    archive
        .file("a", b"first")
        .link(b'1', "b", "a")
        .file("a", b"second");
    check(
        &mut archive,
        &[
            ("/f", "644 0:0 x1 \"new\""),
            ("/becomes a directory", "711 0:0 x2"),
            ("/becomes a file", "644 0:0 x1 \"y\""),
            ("/merged", "750 0:0 x2"),
            ("/merged/kept", "644 0:0 x1 \"k\""),
            ("/a", "644 0:0 x1 \"second\""),
            ("/b", "644 0:0 x1 \"first\""),
        ],
    );
}

#[test]
fn paths_stay_below_the_root() {
    let mut archive = Archive::default();
    archive
        .file("/abs", b"")
        .file("../../up", b"")
        .file("a/./b//../c", b"")
        .file("x/../..", b"");
    let error = build(&archive.0.clone()).unwrap_err().to_string();
    assert!(error.contains("root that is not a directory"), "{error}");
    let mut archive = Archive::default();
    archive
        .file("/abs", b"")
        .file("../../up", b"")
        .file("a/./b//../c", b"")
        .directory("x/../..", 0o755);
    check(
        &mut archive,
        &[
            ("/abs", "644 0:0 x1 \"\""),
            ("/up", "644 0:0 x1 \"\""),
            ("/a", "755 0:0 x2"),
            ("/a/c", "644 0:0 x1 \"\""),
        ],
    );
}

#[test]
fn symbolic_links_are_followed_within_the_tree() {
    let mut archive = Archive::default();
    archive
        .directory("usr/lib", 0o755)
        .link(b'2', "lib", "usr/lib")
        .file("lib/a", b"a");
    archive
        .link(b'2', "out", "/../../../usr")
        .file("out/b", b"b");
    archive
        .link(b'2', "usr/up", "../usr/./lib")
        .link(b'1', "hard", "usr/up/a");
    archive.link(b'2', "new", "made/later").file("new/c", b"c");
    check(
        &mut archive,
        &[
            ("/usr", "755 0:0 x3"),
            ("/usr/lib", "755 0:0 x2"),
            ("/usr/lib/a", "644 0:0 x2 \"a\""),
            ("/usr/b", "644 0:0 x1 \"b\""),
            ("/usr/up", "777 0:0 x1 -> ../usr/./lib"),
            ("/hard", "644 0:0 x2 \"a\""),
            ("/lib", "777 0:0 x1 -> usr/lib"),
            ("/out", "777 0:0 x1 -> /../../../usr"),
            ("/new", "777 0:0 x1 -> made/later"),
            ("/made", "755 0:0 x3"),
            ("/made/later", "755 0:0 x2"),
            ("/made/later/c", "644 0:0 x1 \"c\""),
        ],
    );
}

#[test]
fn whiteouts() {
    let mut archive = Archive::default();
    archive
        .file("gone/.wh.a", b"")
        .file(".wh.b", b"")
        .directory("opaque", 0o755);
    archive
        .file("opaque/.wh..wh..opq", b"")
        .file("implied/.wh..wh..opq", b"");
    archive
        .link(b'1', ".wh..wh.plnk/1.2", "nothing")
        .directory(".wh..wh.aufs", 0o700);
    // Replaced by this layer, in either order.
    archive
        .file(".wh.c", b"")
        .file("c", b"")
        .file("d", b"")
        .file(".wh.d", b"");
    archive
        .file(".wh.e", b"")
        .directory("e", 0o755)
        .directory("f", 0o755)
        .file(".wh.f", b"");
    archive.file(".wh.g", b"").file("g/h", b"");
    let opaque = "755 0:0 x2 trusted.overlay.opaque=\"y\"";
    check(
        &mut archive,
        &[
            ("/gone", "755 0:0 x2"),
            ("/gone/a", "755 0:0 x1 (0, 0)"),
            ("/b", "755 0:0 x1 (0, 0)"),
            ("/opaque", opaque),
            ("/implied", opaque),
            ("/c", "644 0:0 x1 \"\""),
            ("/d", "644 0:0 x1 \"\""),
            ("/e", opaque),
            ("/f", opaque),
            ("/g", opaque),
            ("/g/h", "644 0:0 x1 \"\""),
        ],
    );
}

#[test]
fn xattrs() {
    let mut archive = Archive::default();
    let long = vec![b'v'; 3000];
    archive.pax(&[
        (b"SCHILY.xattr.user.a", b"1"),
        (b"SCHILY.xattr.user.long", &long),
        (b"SCHILY.xattr.security.capability", b"cap"),
        (b"SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
    ]);
    archive.file("f", b"data");
    archive
        .pax(&[(b"SCHILY.xattr.user.b", b"2")])
        .link(b'2', "s", &"t".repeat(90));
    archive
        .pax(&[(b"SCHILY.xattr.user.c", &[b'c'; 490])])
        .directory("d", 0o755);
    archive.file("d/.wh..wh..opq", b"");
    let long = String::from_utf8(long).unwrap();
    check(
        &mut archive,
        &[
            (
                "/f",
                &format!(
                    "644 0:0 x1 \"data\" security.capability=\"cap\" user.a=\"1\" user.long={long:?}"
                ),
            ),
            (
                "/s",
                &format!("777 0:0 x1 -> {} user.b=\"2\"", "t".repeat(90)),
            ),
            (
                "/d",
                &format!(
                    "755 0:0 x2 trusted.overlay.opaque=\"y\" user.c={:?}",
                    "c".repeat(490)
                ),
            ),
        ],
    );
}

#[test]
fn names_and_targets_of_all_lengths() {
    let mut archive = Archive::default();
    let mut wanted = BTreeMap::new();
    for length in 1..=255 {
        let name = format!("{:a<length$}", "");
        let target = "t".repeat(length * 16);
        archive.pax(&[(b"path", name.as_bytes()), (b"linkpath", target.as_bytes())]);
        archive.link(b'2', "", "");
        wanted.insert(format!("/{name}"), format!("777 0:0 x1 -> {target}"));
    }
    // Around `.` and `..` in the order of bytes.
    for name in ["!", "-", "...", "..a", ".a", "0"] {
        archive.file(name, b"");
        wanted.insert(format!("/{name}"), "644 0:0 x1 \"\"".to_owned());
    }
    let mut found = listing(&archive.end());
    found.remove("/");
    assert_eq!(found, wanted);
}

#[test]
fn deep_paths() {
    let mut archive = Archive::default();
    let path = vec!["d"; 3000].join("/");
    archive
        .pax(&[(b"path", path.as_bytes())])
        .file("", b"bottom");
    let image = build(&archive.end()).unwrap();
    assert_eq!(image.inodes, 3001);
    assert_eq!(image.implicit_directories, 2999);
}

#[test]
fn refusals() {
    let new = Archive::default;
    refused(
        new().pax(&[(b"path", &[b'n'; 256])]).file("", b""),
        "255 bytes",
    );
    refused(
        new()
            .pax(&[(b"path", &[&[b'n'; 256][..], b"/a"].concat())])
            .file("", b""),
        "255 bytes",
    );
    refused(new().file("f", b"").file("f/a", b""), "not a directory");
    refused(new().link(b'1', "a", "b"), "hard link to nothing");
    refused(
        new().directory("d", 0o755).link(b'1', "a", "d"),
        "hard link to a directory",
    );
    refused(new().link(b'1', "a", "/"), "hard link to a directory");
    refused(
        new().file(".wh.b", b"").link(b'1', "a", "b"),
        "hard link to nothing",
    );
    refused(new().link(b'2', "a", ""), "empty or too long");
    refused(
        new()
            .pax(&[(b"linkpath", &[b't'; 4096])])
            .link(b'2', "a", ""),
        "empty or too long",
    );
    refused(
        new()
            .link(b'2', "a", "b")
            .link(b'2', "b", "a")
            .file("a/c", b""),
        "too many",
    );
    refused(new().file(".wh.", b""), "whiteout of nothing");
    refused(new().file(".wh...", b""), "whiteout of nothing");
    refused(
        new()
            .pax(&[(b"SCHILY.xattr.user.a", &[0; 70_000])])
            .file("a", b""),
        "64 KiB",
    );
    let far = tree::data_block(1 << 41, 1);
    assert!(far.is_err());
    assert!(tree::data_block(0, (1 << 40) + 1).is_err());
    assert!(tree::data_block(0, 1 << 40).is_ok());
    let mut tree = Building(Tree::new(3));
    let archive = new().file("a", b"").file("b", b"").file("c", b"").end();
    let error = Parser::new()
        .push(&archive, &mut tree)
        .unwrap_err()
        .to_string();
    assert!(error.contains("\"c\": one file more"), "{error}");
}
