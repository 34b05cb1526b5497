//! What a process inside a sandbox sees.

use std::io::{Read, Seek};

use nix::sys::signal::Signal;
use sandman_containerd_shim::launch::{Exec, Request, RootMount, Rootfs, Streams};
use serde_json::json;

use crate::support::{Host, copy, key, null, within};

fn status_line<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status
        .lines()
        .find(|line| line.starts_with(name))
        .expect(name);
    line.split_once(':').unwrap().1.trim()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn identity_is_the_specs() {
    let mut host = Host::start().await;
    let mut spec = host.spec("cat /proc/self/status; id; pwd; umask; ulimit -n; ulimit -Hn; env");
    spec["process"]["user"] =
        json!({"uid": 1000, "gid": 1001, "additionalGids": [5, 7], "umask": 0o27});
    spec["process"]["cwd"] = json!("/made/here");
    spec["process"]["noNewPrivileges"] = json!(true);
    spec["process"]["capabilities"] = json!({
        "bounding": ["CAP_KILL", "CAP_CHOWN"], "permitted": ["CAP_KILL"],
        "effective": ["CAP_KILL"], "inheritable": ["CAP_KILL"], "ambient": ["CAP_KILL"],
    });
    spec["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 100, "hard": 200}]);
    spec["process"]["env"] = json!(["PATH=/bin", "ONE=1", "TWO=a b"]);
    let text = host.output(spec).await;
    assert_eq!(status_line(&text, "Uid"), "1000\t1000\t1000\t1000");
    assert_eq!(status_line(&text, "Gid"), "1001\t1001\t1001\t1001");
    assert_eq!(status_line(&text, "Groups"), "5 7");
    for (set, bits) in [
        ("CapBnd", 0x21),
        ("CapPrm", 0x20),
        ("CapEff", 0x20),
        ("CapInh", 0x20),
        ("CapAmb", 0x20),
    ] {
        assert_eq!(status_line(&text, set), format!("{bits:016x}"), "{set}");
    }
    assert_eq!(status_line(&text, "NoNewPrivs"), "1");
    assert_eq!(status_line(&text, "Seccomp"), "0");
    assert_eq!(status_line(&text, "SigBlk"), "0000000000000000");
    assert_eq!(status_line(&text, "SigIgn"), "0000000000000000");
    for line in ["/made/here", "0027", "100", "200", "ONE=1", "TWO=a b"] {
        assert!(text.lines().any(|l| l == line), "{line}: {text}");
    }
    // Root without capabilities is just a number.
    let text = host.script("cat /proc/self/status").await;
    for set in ["CapBnd", "CapPrm", "CapEff", "CapInh", "CapAmb"] {
        assert_eq!(status_line(&text, set), "0000000000000000", "{set}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn the_hosts_device_files_are_not_to_change() {
    let mut host = Host::start().await;
    // Nodes, what hides a file, and the stream that came from the host.
    let nodes = [
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/urandom",
        "/dev/tty",
    ];
    let changed = || nodes.map(|node| std::fs::metadata(node).unwrap().modified().unwrap());
    let before = changed();
    let script = format!(
        "for f in {} /proc/keys /proc/self/fd/0; do touch -d @86400 $f 2>/dev/null && echo $f; done
         echo x >/dev/null; echo x >/proc/self/fd/0; head -c 2 /dev/zero | wc -c",
        nodes.join(" ")
    );
    assert_eq!(host.script(&script).await, "2\n");
    assert_eq!(changed(), before);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn the_tree_is_the_specs_and_nothing_more() {
    let mut host = Host::start().await;
    let data = host.dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("file"), "content").unwrap();
    let mut spec = host.spec(
        "cat /proc/self/mountinfo; ls /; cat /data/file /one;
         touch /x 2>/dev/null && echo root-writable; touch /data/x 2>/dev/null && echo data-writable
         cat /proc/kcore | wc -c; ls /sys/firmware | wc -l;
         echo 1 > /proc/sys/vm/drop_caches 2>/dev/null && echo sys-writable
         echo > /dev/null && head -c 3 /dev/zero | wc -c
         ls -l /dev/fd /dev/stdin /dev/ptmx; ls /sys/fs/cgroup",
    );
    spec["root"]["readonly"] = json!(true);
    let mounts = spec["mounts"].as_array_mut().unwrap();
    mounts.push(json!({"destination": "/data", "type": "bind", "source": data, "options": ["rbind", "ro", "rprivate", "nosuid"]}));
    mounts.push(json!({"destination": "/up/../one", "type": "bind", "source": data.join("file"), "options": ["bind", "ro"]}));
    let text = host.output(spec).await;
    let mount = |point: &str| {
        let mut lines = text.lines().filter(|l| l.split(' ').nth(4) == Some(point));
        lines
            .next_back()
            .unwrap_or_else(|| panic!("{point}: {text}"))
            .split(' ')
            .nth(5)
            .unwrap()
    };
    assert_eq!(mount("/data"), "ro,nosuid,nodev,relatime");
    assert!(mount("/").starts_with("ro,nodev"), "{}", mount("/"));
    assert_eq!(mount("/proc"), "rw,nosuid,nodev,noexec,relatime");
    assert_eq!(mount("/sys"), "ro,nosuid,nodev,noexec,relatime");
    assert_eq!(mount("/dev/shm"), "rw,nosuid,nodev,noexec,relatime");
    assert!(mount("/proc/sys").starts_with("ro,"));
    assert_eq!(text.matches("content").count(), 2, "{text}");
    assert!(!text.contains("writable"), "{text}");
    assert!(text.contains("/dev/ptmx -> pts/ptmx"), "{text}");
    // The three counts: an empty kcore, an empty folder, three zeros.
    let counts: Vec<&str> = text
        .lines()
        .filter(|l| l.trim().parse::<u32>().is_ok())
        .collect();
    assert_eq!(counts, ["0", "0", "3"], "{text}");
    // Nothing shows where the host's files are, but for the root of each mount.
    assert!(!std::path::Path::new(&host.rootfs()).join("x").exists());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn devices_cannot_be_made() {
    let mut host = Host::start().await;
    let mut spec = host.spec(
        "echo > /null; for place in /tmp/n /dev/n /dev/shm/n /run/n /data/n; do mknod $place c 1 5 || exit 1
         head -c1 $place >/dev/null 2>&1 && echo opened $place; done; head -c1 /dev/zero | wc -c",
    );
    // Mounts whose options say nothing about devices, or ask for them.
    let mounts = spec["mounts"].as_array_mut().unwrap();
    mounts.push(
        json!({"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}),
    );
    mounts.push(json!({"destination": "/data", "type": "bind", "source": host.dir.path(), "options": ["rbind", "dev"]}));
    mounts.push(
        json!({"destination": "/null", "type": "bind", "source": "/dev/null", "options": ["bind"]}),
    );
    let caps = json!(["CAP_MKNOD"]);
    spec["process"]["capabilities"] =
        json!({"bounding": caps, "permitted": caps, "effective": caps});
    assert_eq!(host.output(spec).await, "1\n");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn a_read_only_dev_is_shared_and_complete() {
    let mut host = Host::start().await;
    let mut spec = host.spec("touch /dev/x 2>/dev/null && echo writable; ls -l /dev; head -c2 /dev/urandom | wc -c; grep -c . /proc/self/mountinfo");
    spec["mounts"][1]["options"] = json!(["nosuid", "ro", "mode=755"]);
    let text = host.output(spec).await;
    assert!(!text.contains("writable"), "{text}");
    for name in [
        "null", "zero", "full", "random", "urandom", "tty", "pts", "shm", "mqueue", "fd", "ptmx",
    ] {
        assert!(
            text.lines()
                .any(|l| l.split_whitespace().any(|w| w == name)),
            "{name}: {text}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn namespaces_are_the_sandboxs_own() {
    let mut host = Host::start().await;
    let mut spec = host.spec(
        "echo pid $$; hostname; cat /proc/sys/net/core/somaxconn; ip addr show lo | grep -o 'UP'; ls /sys/class/net | grep -vc '^lo$'; ps | grep -c zygote",
    );
    spec["hostname"] = json!("boxed");
    spec["linux"]["sysctl"] = json!({"net.core.somaxconn": "77"});
    let ran = host.run(spec).await.unwrap();
    let lines: Vec<&str> = ran.output.lines().collect();
    assert_eq!(lines[0], "pid 1");
    assert_eq!(lines[1], "boxed");
    assert_eq!(lines[2], "77");
    assert!(lines[3].starts_with("UP"), "{lines:?}");
    assert_ne!(nix::unistd::gethostname().unwrap(), "boxed");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn seccomp_filters_with_and_without_no_new_privileges() {
    let mut host = Host::start().await;
    for no_new_privileges in [false, true] {
        let mut spec = host.spec("mkdir /tmp/x; echo $?; grep ^Seccomp: /proc/self/status");
        spec["process"]["noNewPrivileges"] = json!(no_new_privileges);
        spec["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
        });
        let text = host.output(spec).await;
        assert!(text.contains("Operation not permitted"), "{text}");
        assert!(text.contains("\n1\nSeccomp:\t2\n"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn exit_codes_and_programs() {
    let mut host = Host::start().await;
    for (script, code) in [("exit 0", 0), ("exit 42", 42), ("kill -9 $$; sleep 9", 0)] {
        // A signal that PID 1 does not handle is not for it, even SIGKILL from inside.
        let script = script.replace("sleep 9", "exit 0");
        assert_eq!(
            host.run(host.spec(&script)).await.unwrap().code,
            code,
            "{script}"
        );
    }
    let mut spec = host.spec("");
    spec["process"]["args"] = json!(["/etc/script", "word"]);
    assert_eq!(host.output(spec).await, "script /etc/script word\n");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn mistakes_are_named() {
    let mut host = Host::start().await;
    let prefix = "unable to start container process: ";
    let cases = [
        (
            json!(["nothing"]),
            "/",
            "exec: \"nothing\": executable file not found in $PATH",
        ),
        (
            json!(["/none"]),
            "/",
            "exec: \"/none\": stat /none: no such file or directory",
        ),
        (
            json!(["/etc/plain"]),
            "/",
            "exec: \"/etc/plain\": permission denied",
        ),
        (
            json!(["sh"]),
            "/etc/plain",
            "chdir to cwd (\"/etc/plain\") set in config.json failed: not a directory",
        ),
    ];
    for (args, cwd, text) in cases {
        let mut spec = host.spec("");
        spec["process"]["args"] = args;
        spec["process"]["cwd"] = json!(cwd);
        assert_eq!(host.run(spec).await, Err(format!("{prefix}{text}")));
    }
    // A mount point that leads to a descriptor of ours leads nowhere.
    let mut spec = host.spec("");
    let mounts = spec["mounts"].as_array_mut().unwrap();
    mounts.push(
        json!({"destination": "/magic/x", "type": "bind", "source": "/etc", "options": ["rbind"]}),
    );
    let error = host.run(spec).await.unwrap_err();
    assert!(error.contains("mount \"/magic/x\""), "{error}");
    assert_eq!(host.script("echo still here").await, "still here\n");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn overlays_become_roots() {
    let mut host = Host::start().await;
    let dir = host.dir.path().to_owned();
    for name in ["upper", "work"] {
        std::fs::create_dir(dir.join(name)).unwrap();
    }
    let mounts = [RootMount {
        kind: "overlay".into(),
        source: "overlay".into(),
        options: vec![
            "index=off".into(),
            format!("workdir={}", dir.join("work").display()),
            format!("upperdir={}", dir.join("upper").display()),
            format!("lowerdir={}", host.rootfs().display()),
        ],
    }];
    let spec = serde_json::from_value(host.spec("echo new > /file")).unwrap();
    let streams = Streams::Fds([null(), null(), null()]);
    let request = Request {
        spec: &spec,
        rootfs: Rootfs::Mounts(&mounts),
        streams,
    };
    let prepared = host.launcher.prepare(request).unwrap();
    let key = key("overlay");
    let created = within(prepared.create(&host.client, &key, &[]))
        .await
        .unwrap();
    within(created.gate.start()).await.unwrap();
    assert_eq!(host.exit_of(&key).await.exit.code, 0);
    assert_eq!(
        std::fs::read_to_string(dir.join("upper/file")).unwrap(),
        "new\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn terminals_are_the_sandboxs_own() {
    let mut host = Host::start().await;
    let mut spec =
        host.spec("tty; stty size; test -c /dev/console && echo console; echo x > /dev/tty");
    spec["process"]["terminal"] = json!(true);
    let streams = Streams::Terminal {
        width: 91,
        height: 17,
    };
    let prepared = host.prepare(spec, streams).unwrap();
    assert!(prepared.has_terminal());
    let key = key("tty");
    let created = within(prepared.create(&host.client, &key, &[]))
        .await
        .unwrap();
    let mut master = std::fs::File::from(created.terminal.expect("a terminal"));
    within(created.gate.start()).await.unwrap();
    let text = tokio::task::spawn_blocking(move || {
        let mut text = Vec::new();
        // EIO is how a terminal says that nobody is left.
        let _ = master.read_to_end(&mut text);
        String::from_utf8(text).unwrap()
    });
    let text = within(text).await.unwrap().replace('\r', "");
    assert_eq!(text, "/dev/pts/0\n17 91\nconsole\nx\n");
    assert_eq!(host.exit_of(&key).await.exit.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn cgroups_limit_freeze_and_go() {
    let mut host = Host::start().await;
    let path = host.cgroup.join("box");
    let mut spec = host.spec("exec sleep 1000");
    spec["linux"]["cgroupsPath"] = json!(path);
    spec["linux"]["resources"]["pids"] = json!({"limit": 9});
    spec["linux"]["resources"]["memory"] = json!({"limit": 64 << 20});
    let out = tempfile::tempfile().unwrap();
    let key = key("cgroup");
    let created = host.create(&key, spec.clone(), &out).await.unwrap();
    within(created.gate.start()).await.unwrap();
    let cgroup = created.cgroup.unwrap();
    assert_eq!(cgroup.pids().unwrap(), [created.pid]);
    assert_eq!(cgroup.read("pids", "pids.max").unwrap().trim(), "9");
    if !cgroup.is_v2() {
        let limit = cgroup.read("memory", "memory.limit_in_bytes").unwrap();
        assert_eq!(limit.trim(), (64 << 20).to_string());
    }
    // A second sandbox may not share it unasked.
    let streams = Streams::Fds([null(), copy(&out), copy(&out)]);
    let error = host.prepare(spec, streams).unwrap_err();
    assert!(error.to_string().contains("has processes"), "{error}");

    cgroup.freeze().unwrap();
    let deadline = std::time::Instant::now() + crate::support::DEADLINE;
    while !cgroup.frozen().unwrap() {
        assert!(std::time::Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
    cgroup.thaw().unwrap();
    assert!(!cgroup.frozen().unwrap());
    cgroup.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
    let exited = host.exit_of(&key).await;
    assert_eq!(exited.exit.code, 128 + Signal::SIGKILL as u32);
    cgroup.remove().unwrap();
    assert!(
        cgroup
            .folder("memory")
            .is_some_and(|folder| !folder.exists())
    );
    cgroup.remove().unwrap();
    // Ours to tidy: the parent that the first one made.
    host.launcher
        .cgroup(&host.cgroup, None)
        .unwrap()
        .remove()
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root"]
async fn a_further_process_joins_the_sandbox() {
    let mut host = Host::start().await;
    let path = host.cgroup.join("exec");
    let mut spec = host.spec("echo mine > /tmp/mark; exec sleep 1000");
    spec["hostname"] = json!("boxed");
    spec["linux"]["cgroupsPath"] = json!(path);
    let out = tempfile::tempfile().unwrap();
    let init = key("init");
    let created = host.create(&init, spec.clone(), &out).await.unwrap();
    within(created.gate.start()).await.unwrap();
    let cgroup = created.cgroup.unwrap();

    let script = "test -t 0 && tty; cat /proc/self/status /tmp/mark; hostname; pwd; ps; exit 4";
    let mut process = spec["process"].clone();
    process["args"] = json!(["sh", "-c", script]);
    process["cwd"] = json!("/etc");
    process["user"] = json!({"uid": 12, "gid": 13});
    let process = serde_json::from_value(process).unwrap();
    let exec = |streams| Exec {
        pid: created.pid,
        process: &process,
        seccomp: None,
        cgroup: Some(&cgroup),
        streams,
    };
    let k = key("init/exec");
    let mut output = tempfile::tempfile().unwrap();
    let streams = Streams::Fds([null(), copy(&output), copy(&output)]);
    let prepared = host.launcher.prepare_exec(exec(streams)).unwrap();
    let started = within(prepared.create(&host.client, &k, &[]))
        .await
        .unwrap();
    assert_eq!(cgroup.pids().unwrap().len(), 2);
    within(started.gate.start()).await.unwrap();
    assert_eq!(host.exit_of(&k).await.exit.code, 4);
    let mut text = String::new();
    output.rewind().unwrap();
    output.read_to_string(&mut text).unwrap();
    assert_eq!(status_line(&text, "Uid"), "12\t12\t12\t12");
    assert_eq!(status_line(&text, "CapBnd"), "0000000000000000");
    assert!(text.contains("\nmine\nboxed\n/etc\n"), "{text}");
    assert!(text.contains("sleep 1000"), "{text}");

    let k = key("init/tty");
    let streams = Streams::Terminal {
        width: 0,
        height: 0,
    };
    let prepared = host.launcher.prepare_exec(exec(streams)).unwrap();
    let started = within(prepared.create(&host.client, &k, &[]))
        .await
        .unwrap();
    assert!(started.terminal.is_some());
    within(started.gate.start()).await.unwrap();
    assert_eq!(host.exit_of(&k).await.exit.code, 4);

    within(host.client.signal(&init, 9)).await.unwrap();
    host.exit_of(&init).await;
    cgroup.remove().unwrap();
    host.launcher
        .cgroup(&host.cgroup, None)
        .unwrap()
        .remove()
        .unwrap();
}
