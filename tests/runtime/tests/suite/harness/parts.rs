//! The processes of our runtime, to be killed.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::{Signal, kill as send};
use nix::unistd::Pid;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The task service.
    Shim,
    /// Who clones sandboxes.
    Zygote,
    /// The parent of sandboxes.
    Holder,
}

/// How long one may take to come up or to go.
const DEADLINE: Duration = Duration::from_secs(30);

/// Kills the part, once there is one, and waits until it is gone.
pub(crate) async fn kill(part: Part) {
    let deadline = tokio::time::Instant::now() + DEADLINE;
    let pid = loop {
        if let Some(pid) = find(part) {
            break pid;
        }
        assert!(tokio::time::Instant::now() < deadline, "no {part:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    send(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    while find(part) == Some(pid) {
        assert!(tokio::time::Instant::now() < deadline, "{part:?} stays");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Its process id. Whose mounts are ours belongs to this host; the zygote is its holder's child.
fn find(part: Part) -> Option<i32> {
    let ours = fs::read_link("/proc/thread-self/ns/mnt").unwrap();
    let is = |pid: i32, program: &str, word: &str| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0);
        let first = words.next().unwrap_or_default();
        first.ends_with(program.as_bytes()) && words.any(|w| w.starts_with(word.as_bytes()))
    };
    let mounts = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    // The anchor of their process ids is a copy of the holder, and its child.
    let parent = |pid: i32| -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let rest = stat.rsplit_once(") ")?.1;
        let mut fields = rest.split(' ');
        (fields.next()? != "Z").then_some(())?;
        fields.next()?.parse().ok()
    };
    let all = || pids().into_iter().filter(|pid| parent(*pid).is_some());
    let holders: Vec<i32> = all()
        .filter(|pid| is(*pid, "sandman-holder", "/run/sandman-shim/"))
        .filter(|pid| mounts(*pid).as_ref() == Some(&ours))
        .collect();
    let holder = || {
        holders
            .iter()
            .copied()
            .find(|pid| parent(*pid).is_none_or(|parent| !holders.contains(&parent)))
    };
    match part {
        Part::Holder => holder(),
        Part::Zygote => {
            let holder = holder()?;
            all().find(|pid| is(*pid, "sandman-holder", "zygote") && parent(*pid) == Some(holder))
        }
        Part::Shim => all()
            .filter(|pid| is(*pid, "containerd-shim-sandman-v1", "serve"))
            .find(|pid| mounts(*pid).as_ref() == Some(&ours)),
    }
}

fn pids() -> Vec<i32> {
    let name = |entry: fs::DirEntry| -> PathBuf { entry.path() };
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| name(entry.ok()?).file_name()?.to_str()?.parse().ok())
        .collect()
}
