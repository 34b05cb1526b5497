//! The tar applet against GNU tar in both directions, and against archives made
//! to break out.

#![allow(clippy::unwrap_used)] // helpers of tests may panic like tests

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tar::{Builder, EntryType, Header};

fn ours(args: &[&str], dir: &Path, input: &[u8]) -> Output {
    let mut command = support::daemon();
    command.arg("tar").args(args);
    feed(command, dir, input)
}

fn gnu(args: &[&str], dir: &Path, input: &[u8]) -> Output {
    let mut command = Command::new("tar");
    command.args(args);
    feed(command, dir, input)
}

fn feed(mut command: Command, dir: &Path, input: &[u8]) -> Output {
    command
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // A refused archive may not be read to its end.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().unwrap()
    })
}

fn assert_clean(output: &Output) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.as_ref()), (Some(0), ""));
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A tree with one of everything.
fn tree() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let long = format!("t/{}/{}", "d".repeat(120), "e".repeat(200));
    fs::create_dir_all(at(&long)).unwrap();
    fs::write(at(&format!("{long}/file")), "deep").unwrap();
    fs::write(at("t/file"), vec![b'x'; 200_000]).unwrap();
    fs::write(at("t/empty"), "").unwrap();
    fs::write(at("t/üñ \\ name"), "odd").unwrap();
    fs::hard_link(at("t/file"), at("t/hard")).unwrap();
    symlink("file", at("t/soft")).unwrap();
    symlink("/".to_owned() + &"x/".repeat(90), at("t/longlink")).unwrap();
    nix::unistd::mkfifo(
        &at("t/fifo"),
        nix::sys::stat::Mode::from_bits_truncate(0o640),
    )
    .unwrap();
    fs::set_permissions(at("t/empty"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::create_dir(at("t/closed")).unwrap();
    fs::write(at("t/closed/in"), "in").unwrap();
    fs::set_permissions(at("t/closed"), fs::Permissions::from_mode(0o500)).unwrap();
    let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    for name in ["t/file", "t/closed", "t"] {
        fs::File::open(at(name)).unwrap().set_modified(old).unwrap();
    }
    root
}

/// Everything about the tree below `root`, a line a file.
fn describe(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut queue = vec![root.join("t")];
    while let Some(path) = queue.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let kind = meta.file_type();
        let content = if kind.is_file() {
            format!(
                "{} bytes, {} links",
                fs::read(&path).unwrap().len(),
                meta.nlink()
            )
        } else if kind.is_symlink() {
            fs::read_link(&path).unwrap().display().to_string()
        } else if kind.is_dir() {
            queue.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            String::new()
        } else {
            format!("fifo {}", kind.is_fifo())
        };
        let name = path.strip_prefix(root).unwrap().display().to_string();
        lines.push(format!(
            "{name} {:o} {} {content}",
            meta.mode(),
            meta.mtime()
        ));
    }
    lines.sort();
    lines
}

#[test]
fn gnu_tar_reads_what_we_write() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let made = ours(&["cf", "-", "t"], from.path(), b"");
    assert_clean(&made);
    assert_clean(&gnu(&["-xpf", "-"], to.path(), &made.stdout));
    assert_eq!(describe(from.path()), describe(to.path()));
}

#[test]
fn we_read_what_gnu_tar_writes() {
    for format in ["gnu", "pax", "posix"] {
        let (from, to) = (tree(), tempfile::tempdir().unwrap());
        let made = gnu(&["--format", format, "-cf", "-", "t"], from.path(), b"");
        assert_clean(&made);
        assert_clean(&ours(
            &["-xf", "-", "-C", to.path().to_str().unwrap()],
            "/".as_ref(),
            &made.stdout,
        ));
        assert_eq!(describe(from.path()), describe(to.path()), "{format}");
        // And once more over what is there.
        assert_clean(&ours(&["xf", "-"], to.path(), &made.stdout));
        assert_eq!(describe(from.path()), describe(to.path()), "{format}");
    }
}

#[test]
fn sparse_files_of_gnu_tar_keep_their_content() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = fs::File::create(from.path().join("sparse")).unwrap();
    file.set_len(3_000_000).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"middle", 1_500_000).unwrap();
    let made = gnu(&["-Scf", "-", "sparse"], from.path(), b"");
    assert!(made.stdout.len() < 1_000_000);
    assert_clean(&ours(&["xf", "-"], to.path(), &made.stdout));
    let read = |dir: &tempfile::TempDir| fs::read(dir.path().join("sparse")).unwrap();
    assert!(read(&from) == read(&to));
}

#[test]
fn names_are_as_gnu_tar_gives_them() {
    let from = tree();
    let file = from.path().join("t/empty");
    let parent = from.path().join("t/closed");
    for (args, dir) in [
        (vec!["cf", "-", "."], from.path()),
        (vec!["cf", "-", "./t/"], from.path()),
        (
            vec!["cf", "-", "-C", "t", "closed", "-C", "closed", "in"],
            from.path(),
        ),
        (vec!["cf", "-", "../empty"], parent.as_path()),
        (vec!["cf", "-", file.to_str().unwrap()], from.path()),
    ] {
        let list = |made: &Output| {
            let listed = gnu(&["-tf", "-"], from.path(), &made.stdout);
            let mut names: Vec<String> = String::from_utf8(listed.stdout)
                .unwrap()
                .lines()
                .map(str::to_owned)
                .collect();
            names.sort();
            names
        };
        let (mine, theirs) = (ours(&args, dir, b""), gnu(&args, dir, b""));
        assert_eq!(list(&mine), list(&theirs), "{args:?}");
        assert_eq!(mine.status.code(), theirs.status.code(), "{args:?}");
        assert_eq!(stderr(&mine), stderr(&theirs), "{args:?}");
    }
}

#[test]
fn kubectl_cp_options() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let made = gnu(&["-cf", "-", "t/empty", "t/file"], from.path(), b"");
    let target = to.path().to_str().unwrap();
    let args = [
        "--no-same-permissions",
        "--no-same-owner",
        "-xmf",
        "-",
        "-C",
        target,
    ];
    assert_clean(&ours(&args, "/".as_ref(), &made.stdout));
    let empty = fs::metadata(to.path().join("t/empty")).unwrap();
    assert_eq!(empty.mode() & 0o7000, 0, "no set-user-id without -p");
    assert!(fs::metadata(to.path().join("t/file")).unwrap().mtime() > 1_000_000_000);
}

#[test]
fn members_can_be_chosen() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let made = gnu(&["-cf", "-", "t"], from.path(), b"");
    let output = ours(
        &["xf", "-", "t/closed/", "t/absent"],
        to.path(),
        &made.stdout,
    );
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("tar: t/absent: Not found in archive"));
    let names: Vec<_> = fs::read_dir(to.path().join("t"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["closed"]);
    assert!(to.path().join("t/closed/in").exists());
}

#[test]
fn what_cannot_be_read_is_left_out_and_told() {
    let from = tree();
    let output = ours(&["cf", "-", "absent", "t/file"], from.path(), b"");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        stderr(&output),
        "tar: absent: Cannot stat: No such file or directory\n\
         tar: Exiting with failure status due to previous errors\n"
    );
    assert_eq!(
        gnu(&["-tf", "-"], from.path(), &output.stdout).stdout,
        b"t/file\n"
    );
}

#[test]
fn broken_archives_fail() {
    let (from, to) = (tree(), tempfile::tempdir().unwrap());
    let made = gnu(&["-cf", "-", "t/file"], from.path(), b"").stdout;
    for broken in [&made[..0], &made[..300], &made[..5000], &[7; 4096]] {
        let output = ours(&["xf", "-"], to.path(), broken);
        assert_eq!(output.status.code(), Some(2));
        assert!(
            stderr(&output).contains("not recoverable"),
            "{}",
            stderr(&output)
        );
    }
    let output = ours(&["xf", "-", "-C", "nowhere"], to.path(), &made);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("tar: nowhere: Cannot open: No such file"));
}

#[test]
fn version_names_itself() {
    let output = ours(&["--version"], "/".as_ref(), b"");
    assert!(output.status.success());
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .starts_with("tar (sandman-daemon) ")
    );
}

/// Archives that a well-meaning tar does not write.
struct Evil(Builder<Vec<u8>>);

impl Default for Evil {
    fn default() -> Self {
        Self(Builder::new(Vec::new()))
    }
}

impl Evil {
    fn put(mut self, kind: EntryType, name: &str, target: &str, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        let gnu = header.as_gnu_mut().unwrap();
        gnu.name[..name.len()].copy_from_slice(name.as_bytes());
        gnu.linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o777);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, name: &str) -> Self {
        self.put(EntryType::Regular, name, "", b"evil")
    }

    fn symlink(self, name: &str, target: &str) -> Self {
        self.put(EntryType::Symlink, name, target, b"")
    }

    fn hard_link(self, name: &str, target: &str) -> Self {
        self.put(EntryType::Link, name, target, b"")
    }

    fn directory(self, name: &str) -> Self {
        self.put(EntryType::Directory, name, "", b"")
    }
}

/// Extracts `evil` and a harmless last member into `outer/target`; nothing else
/// in `outer` may change, and the harmless member must arrive.
fn contained(evil: Evil, expected: i32) -> tempfile::TempDir {
    let outer = tempfile::tempdir().unwrap();
    let target = outer.path().join("target");
    fs::create_dir_all(target.join("kept")).unwrap();
    fs::create_dir(outer.path().join("dir")).unwrap();
    fs::set_permissions(outer.path().join("dir"), fs::Permissions::from_mode(0o711)).unwrap();
    fs::write(outer.path().join("victim"), "good").unwrap();
    symlink(outer.path().join("victim"), target.join("to-victim")).unwrap();
    symlink("../dir", target.join("to-dir")).unwrap();

    let bytes = evil.file("last").0.into_inner().unwrap();
    let output = ours(&["xf", "-", "-C", "target"], outer.path(), &bytes);
    assert_eq!(output.status.code(), Some(expected), "{}", stderr(&output));
    assert_eq!(fs::read(target.join("last")).unwrap(), b"evil");
    assert_eq!(fs::read(outer.path().join("victim")).unwrap(), b"good");
    let victim = fs::metadata(outer.path().join("victim")).unwrap();
    assert_eq!(victim.nlink(), 1);
    let dir = fs::metadata(outer.path().join("dir")).unwrap();
    assert_eq!(dir.mode() & 0o777, 0o711);
    assert_eq!(fs::read_dir(outer.path().join("dir")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 3);
    outer
}

#[test]
fn dot_dot_is_refused() {
    for name in ["../victim", "kept/../../victim", "..", "kept/.."] {
        contained(Evil::default().file(name), 2);
        contained(Evil::default().directory(name), 2);
    }
    contained(Evil::default().hard_link("x", "../victim"), 2);
}

#[test]
fn absolute_names_land_below_the_target() {
    let outer = contained(Evil::default().file("/etc/evil"), 0);
    assert!(outer.path().join("target/etc/evil").exists());
}

#[test]
fn links_are_never_followed() {
    let evil = Evil::default;
    // Links made by the archive, to outside by either way.
    contained(evil().symlink("out", "..").file("out/victim"), 2);
    contained(evil().symlink("out", "../dir").file("out/new"), 2);
    contained(evil().symlink("out", "../dir").file("out/deeper/new"), 2);
    contained(
        evil()
            .symlink("a", "b")
            .symlink("b", "../dir")
            .file("a/new"),
        2,
    );
    // Links that were there.
    contained(evil().file("to-dir/new"), 2);
    contained(evil().directory("to-dir/new"), 2);
    contained(evil().hard_link("x", "to-dir/../victim"), 2);
    // A hard link to a symbolic link is the link again, and writing replaces it.
    contained(evil().hard_link("x", "to-victim").file("x"), 0);
    contained(evil().symlink("x", "../victim").file("x"), 0);
}

#[test]
fn old_links_are_replaced_not_written_through() {
    let outer = contained(Evil::default().file("to-victim").directory("to-dir"), 0);
    let target = outer.path().join("target");
    assert!(
        fs::symlink_metadata(target.join("to-victim"))
            .unwrap()
            .is_file()
    );
    assert!(
        fs::symlink_metadata(target.join("to-dir"))
            .unwrap()
            .is_dir()
    );
}

#[test]
fn a_directory_is_not_replaced_by_a_file() {
    let outer = contained(Evil::default().file("kept"), 2);
    assert!(outer.path().join("target/kept").is_dir());
}

#[test]
fn late_modes_do_not_go_through_links() {
    // A directory whose name is a link by the time its mode is set.
    contained(
        Evil::default()
            .directory("d/sub")
            .symlink("to-dir", "../dir"),
        0,
    );
}
