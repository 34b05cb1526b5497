use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::mount::{MsFlags, mount};

use super::*;
use crate::net::{Member, enter};

/// A process of the kind that a crash leaves behind: no record names it.
fn forgotten(prepare: impl FnOnce(&mut Command)) -> std::process::Child {
    let mut command = Command::new("sleep");
    command.arg("600").process_group(0);
    prepare(&mut command);
    command.spawn().unwrap()
}

/// Needs root.
#[tokio::test]
async fn what_a_crash_left_is_found_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path(), &dir.path().join("state")).unwrap();
    let progress = Progress::start();

    // A namespace with a process in it, and the bare file of one that was not finished.
    let namespace = NetNs::named(&layout.netns_name(Member::Control));
    namespace.ensure().unwrap();
    let inside = namespace
        .run(|| {
            enter(&namespace.open()?)?;
            Ok(forgotten(|_| ()))
        })
        .unwrap();
    fs::write(NetNs::named(&layout.netns_name(Member::Host(3))).path(), "").unwrap();

    // A container's process in its cgroup.
    let group = cgroups::hierarchies()[0].join(layout.cgroup_parent().trim_start_matches('/'));
    let child = group.join("host-0/pod");
    fs::create_dir_all(&child).unwrap();
    let contained = forgotten(|_| ());
    fs::write(child.join("cgroup.procs"), contained.id().to_string()).unwrap();

    // One mount on another, and a file that is still open.
    for point in [layout.run_dir().to_owned(), layout.run_dir().join("a b")] {
        fs::create_dir_all(&point).unwrap();
        mount(
            Some("x"),
            &point,
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap();
    }
    let _open = fs::File::create(layout.run_dir().join("a b/open")).unwrap();

    let found = leftovers(&layout);
    for pid in [inside.id(), contained.id()] {
        let seen = |leftover: &Leftover| matches!(leftover, Leftover::Process(p, _) if *p == pid);
        assert!(found.iter().any(seen), "{pid} is not in {found:?}");
    }
    assert!(found.contains(&Leftover::Mount(layout.run_dir().join("a b"))));
    assert!(found.contains(&Leftover::Cgroup(child)));

    let left = down(&layout, true, progress).await.unwrap();
    assert_eq!(left, []);
    assert!(!layout.run_dir().exists() && !group.exists());
    for mut process in [inside, contained] {
        // By a signal, not by itself.
        assert_eq!(process.wait().unwrap().code(), None);
    }
    // Nothing to do, and no error.
    assert_eq!(down(&layout, true, progress).await.unwrap(), []);
}
