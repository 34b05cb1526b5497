//! What the death of each process leaves, and what does not get lost.

use std::os::fd::AsFd;

use crate::support::{Host, children, connect, gone, is_alive, key, null, within, zygote};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sandman_containerd_shim::holder::client::HolderError;
use sandman_containerd_shim::holder::protocol::Code;
use sandman_containerd_shim::launch::{CreateError, Gate, SLOT_GATE};

fn kill_hard(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn a_new_client_takes_everything_back() {
    let mut host = Host::start().await;
    let out = tempfile::tempfile().unwrap();
    let (running, waiting, ended) = (key("running"), key("waiting"), key("ended"));
    let one = host
        .create(&running, host.spec("exec sleep 1000"), &out)
        .await
        .unwrap();
    within(one.gate.start()).await.unwrap();
    let two = host
        .create(&waiting, host.spec("exit 5"), &out)
        .await
        .unwrap();
    let three = host
        .create(&ended, host.spec("exit 6"), &out)
        .await
        .unwrap();
    within(three.gate.start()).await.unwrap();
    within(host.client.note(&waiting, b"created".to_vec()))
        .await
        .unwrap();
    within(host.client.keep(&running, 9, null().as_fd()))
        .await
        .unwrap();
    host.exit_of(&ended).await;

    // The old one loses its connection, as a killed process does, and all that it held.
    let waiting_pid = two.pid;
    drop((one, two, three));
    let (client, exits) = connect(host.dir.path()).await;
    host.client = client;
    host.exits = exits;
    let told = within(host.exits.recv()).await.unwrap();
    assert_eq!((told.key, told.exit.code), (ended.clone(), 6));
    let mut entries = within(host.client.list()).await.unwrap();
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    let names: Vec<_> = entries.iter().map(|e| e.key.clone()).collect();
    assert_eq!(names, [ended.clone(), running.clone(), waiting.clone()]);
    assert_eq!(entries[1].slots, [SLOT_GATE, 9]);
    assert_eq!(entries[2].note, b"created");
    assert!(is_alive(waiting_pid), "the holder keeps its gate");

    let taken = within(host.client.take(&waiting)).await.unwrap().unwrap();
    let gate = taken
        .fds
        .into_iter()
        .find(|(slot, _)| *slot == SLOT_GATE)
        .unwrap()
        .1;
    within(Gate::from_fd(gate).unwrap().start()).await.unwrap();
    assert_eq!(host.exit_of(&waiting).await.exit.code, 5);

    // Acknowledged, it is forgotten; what runs is not.
    within(host.client.forget(&ended)).await.unwrap();
    within(host.client.forget(&waiting)).await.unwrap();
    let refused = within(host.client.forget(&running)).await.unwrap_err();
    assert!(matches!(
        refused,
        HolderError::Refused {
            code: Code::Running,
            ..
        }
    ));
    within(host.client.signal(&running, 15)).await.unwrap();
    within(host.client.signal(&running, 9)).await.unwrap();
    assert_eq!(host.exit_of(&running).await.exit.code, 137);
    within(host.client.forget(&running)).await.unwrap();
    assert!(within(host.client.list()).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn exits_wait_for_a_client() {
    let mut host = Host::start().await;
    let out = tempfile::tempfile().unwrap();
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let k = key("later");
    let streams = sandman_containerd_shim::launch::Streams::Fds([
        reader.try_clone().unwrap(),
        null(),
        null(),
    ]);
    let prepared = host
        .prepare(host.spec("read line; exit $line"), streams)
        .unwrap();
    let created = within(prepared.create(&host.client, &k, &[]))
        .await
        .unwrap();
    within(created.gate.start()).await.unwrap();
    let pid = created.pid;
    // Nobody is connected when it ends.
    let (client, exits) = connect(host.dir.path()).await;
    drop((std::mem::replace(&mut host.client, client), out));
    host.exits = exits;
    nix::unistd::write(&writer, b"33\n").unwrap();
    gone(&[pid]).await;
    let (client, exits) = connect(host.dir.path()).await;
    host.client = client;
    host.exits = exits;
    let exited = host.exit_of(&k).await;
    assert_eq!((exited.pid, exited.exit.code), (pid, 33));
    // Again for the next one, as long as nobody has acknowledged it.
    let (client, exits) = connect(host.dir.path()).await;
    host.client = client;
    host.exits = exits;
    assert_eq!(host.exit_of(&k).await.exit.code, 33);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn the_zygotes_death_costs_nothing() {
    let mut host = Host::start().await;
    let out = tempfile::tempfile().unwrap();
    let k = key("running");
    let created = host
        .create(&k, host.spec("exec sleep 1000"), &out)
        .await
        .unwrap();
    within(created.gate.start()).await.unwrap();
    for _ in 0..3 {
        let pid = zygote(host.holder.id());
        kill_hard(pid);
        gone(&[pid]).await;
        assert_eq!(host.script("echo next").await, "next\n");
        assert!(is_alive(created.pid));
    }
    // Stopped in the middle of a launch and killed: refused, not lost, and the key is free.
    let pid = zygote(host.holder.id());
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    let k2 = key("refused");
    let launch = host.create(&k2, host.spec("exit 0"), &out);
    let (launch, ()) = tokio::join!(launch, async {
        // Anything asked after it is answered before it.
        within(host.client.list()).await.unwrap();
        kill_hard(pid);
    });
    let error = launch.unwrap_err();
    assert!(
        matches!(
            &error,
            CreateError::Holder(HolderError::Refused {
                code: Code::Zygote,
                ..
            })
        ),
        "{error:?}"
    );
    assert_eq!(host.script("echo again").await, "again\n");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn the_holders_death_ends_its_sandboxes() {
    let mut host = Host::start().await;
    let out = tempfile::tempfile().unwrap();
    let mut pids = Vec::new();
    for name in ["a", "b"] {
        let k = key(name);
        // It ignores what it can, and has children.
        let script = "trap '' TERM INT HUP; sleep 1000 & sleep 1000; wait";
        let created = host.create(&k, host.spec(script), &out).await.unwrap();
        within(created.gate.start()).await.unwrap();
        pids.push(created.pid);
    }
    let waiting = host
        .create(&key("c"), host.spec("exit 0"), &out)
        .await
        .unwrap();
    pids.push(waiting.pid);
    pids.extend(children(host.holder.id()));
    host.holder.kill().unwrap();
    host.holder.wait().unwrap();
    gone(&pids).await;
    assert!(
        within(host.exits.recv()).await.is_none(),
        "the client is told"
    );
    // The next one finds the folder free.
    host.holder = crate::support::start_holder(host.dir.path());
    let (client, exits) = connect(host.dir.path()).await;
    host.client = client;
    host.exits = exits;
    assert!(within(host.client.list()).await.unwrap().is_empty());
    assert_eq!(host.script("echo next").await, "next\n");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn a_launch_without_a_client_ends() {
    let host = Host::start().await;
    let out = tempfile::tempfile().unwrap();
    let k = key("abandoned");
    let created = host.create(&k, host.spec("exit 0"), &out).await.unwrap();
    let pid = created.pid;
    drop(created);
    assert!(is_alive(pid));
    // The holder's copy was the last.
    within(host.client.drop_slot(&k, SLOT_GATE)).await.unwrap();
    gone(&[pid]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn host_programs_and_orphans_are_kept_too() {
    let mut host = Host::start().await;
    let words = |words: &[&str]| {
        words
            .iter()
            .map(|w| w.as_bytes().to_vec())
            .collect::<Vec<_>>()
    };
    let k = key("logger");
    let argv = words(&[
        "/bin/busybox",
        "sh",
        "-c",
        "test $A = b || exit 1; (sleep 1000 & echo $! >&4); exit 7",
    ]);
    let out = tempfile::tempfile().unwrap();
    let n = null();
    let fds = [n.as_fd(), n.as_fd(), n.as_fd(), n.as_fd(), out.as_fd()];
    let root = std::path::Path::new("/");
    within(
        host.client
            .spawn(&k, argv, words(&["A=b", "PATH=/bin"]), root, &fds),
    )
    .await
    .unwrap();
    assert_eq!(host.exit_of(&k).await.exit.code, 7);
    let mut text = String::new();
    use std::io::{Read, Seek};
    let mut out = out;
    out.rewind().unwrap();
    out.read_to_string(&mut text).unwrap();
    let orphan: i32 = text.trim().parse().unwrap();
    let o = key("orphan");
    within(host.client.claim(&o, orphan)).await.unwrap();
    within(host.client.signal(&o, 9)).await.unwrap();
    assert_eq!(host.exit_of(&o).await.exit.code, 137);
    // Neither a child nor an orphan.
    let error = within(host.client.claim(&key("x"), 1)).await.unwrap_err();
    assert!(matches!(
        error,
        HolderError::Refused {
            code: Code::NotFound,
            ..
        }
    ));
    let none = words(&["/nothing/here"]);
    let error = within(host.client.spawn(&key("y"), none, vec![], root, &[]))
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            HolderError::Refused {
                code: Code::System,
                errno: libc::ENOENT,
                ..
            }
        ),
        "{error:?}"
    );
}
