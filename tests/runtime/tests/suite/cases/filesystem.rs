//! What the process sees of files: the root, mounts and their flags, masks, devices.

use serde_json::{Value, json};

use crate::harness::{Case, base, run, scenario};

/// Mount points, kinds and flags, without numbers and sources.
const MOUNTS: &str = "awk '{print $5, $6, $(NF-2)}' /proc/self/mountinfo | sort";

fn mount(spec: &mut Value, value: Value) {
    spec["mounts"].as_array_mut().unwrap().push(value);
}

fn tmpfs(spec: &mut Value, options: &[&str]) {
    mount(
        spec,
        json!({ "destination": "/mnt", "type": "tmpfs", "source": "tmpfs", "options": options }),
    );
}

const NODEV: &str = "there is no device cgroup: each mount is nodev, and the host's own nodes are \
                     mounted one by one";
const TMPFS: &str = "runc gives a tmpfs the mode of the folder below it, whatever the spec says; ours \
                     has the spec's, and is nodev as all mounts are";

const MNT: &str = "grep ' /mnt ' /proc/self/mountinfo | awk '{print $5, $6, $7}'; touch /mnt/f; \
                   echo $?; stat -c '%a %u %g' /mnt";

/// A container with the host's folder `data` at /mnt.
fn bound(name: &'static str, options: &'static [&'static str], script: &'static str) -> Case {
    scenario(name, move |session| async move {
        std::fs::write(session.path("data/file"), "of the host\n").unwrap();
        let mut spec = base(&session, &["/bin/sh", "-c", script]);
        mount(
            &mut spec,
            json!({ "destination": "/mnt", "type": "bind", "source": session.path("data"),
                    "options": options }),
        );
        session.run_to_end(spec).await
    })
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        run("root-content", "ls / /home; cat /etc/plain", |_| {}).must("plain"),
        run("root-written", "echo more >>/etc/plain && cat /etc/plain; rm -r /masked; ls /", |_| {})
            .must("more"),
        run("root-read-only", "touch /x; echo $?; touch /dev/shm/x; echo $?", |s| {
            s["root"]["readonly"] = json!(true);
        })
        .must("Read-only"),
        run("mounts-default", MOUNTS, |_| {}).must("/dev/mqueue").differs(NODEV),
        run("dev-content", "cd /dev && find . | grep -v pts/ | sort; stat -c '%N %a %u %g %t %T' null ptmx fd", |_| {})
            .must("./null"),
        run("dev-works", "head -c 3 /dev/zero | wc -c; echo x >/dev/null; echo x >/dev/full", |_| {})
            .must("3"),
        run("proc-sys", "cat /proc/sys/kernel/hostname; echo x >/proc/sys/kernel/hostname", |_| {})
            .must("Read-only"),
        run("sys-read-only", "mkdir /sys/fs/x; echo $?; ls /sys | sort", |_| {}).must("1"),
        run("masked-default", "cat /proc/kcore /proc/keys | wc -c; ls /proc/acpi", |_| {}).must("0"),
        run("masked-more", "ls /masked; cat /etc/plain; echo $?", |s| {
            s["linux"]["maskedPaths"] = json!(["/masked", "/etc/plain", "/absent"]);
        })
        .must("0"),
        run("masked-written", "touch /masked/x; echo $?", |s| {
            s["linux"]["maskedPaths"] = json!(["/masked"]);
        })
        .must("1"),
        run("read-only-paths", "touch /etc/x; echo $?; touch /tmp/x; echo $?", |s| {
            s["linux"]["readonlyPaths"] = json!(["/etc", "/absent"]);
        })
        .must("Read-only"),
        run("tmpfs", MNT, |s| tmpfs(s, &["nosuid", "size=1m", "mode=1777"]))
            .must("/mnt rw,nosuid")
            .differs(TMPFS),
        run("tmpfs-read-only", MNT, |s| tmpfs(s, &["ro", "noexec"]))
            .must("/mnt ro")
            .must("Read-only")
            .differs(TMPFS),
        run("tmpfs-owner", MNT, |s| tmpfs(s, &["uid=1000", "gid=1000", "mode=700"]))
            .must("1000 1000")
            .differs(TMPFS),
        run("tmpfs-full", "dd if=/dev/zero of=/mnt/f bs=64k count=32; stat -c %s /mnt/f", |s| {
            tmpfs(s, &["size=1m"]);
        })
        .must("No space"),
        run("tmpfs-copied-up", "ls /masked", |s| {
            mount(
                s,
                json!({ "destination": "/masked", "type": "tmpfs", "source": "tmpfs",
                        "options": ["tmpcopyup"] }),
            );
        })
        .must("secret"),
        run("mount-in-new-folder", "ls -d /a/b/c; stat -c %a /a/b", |s| {
            mount(
                s,
                json!({ "destination": "/a/b/c", "type": "tmpfs", "source": "tmpfs", "options": [] }),
            );
        })
        .must("/a/b/c"),
        bound("bind", &["rbind", "rw"], "cat /mnt/file; echo more >/mnt/file; cat /mnt/file")
            .must("more"),
        bound("bind-read-only", &["rbind", "ro"], "cat /mnt/file; echo more >/mnt/file").must("Read-only"),
        bound(
            "bind-flags",
            &["bind", "nosuid", "nodev", "noexec"],
            "grep ' /mnt ' /proc/self/mountinfo | awk '{print $5, $6}'; cp /bin/busybox /mnt/b; /mnt/b true",
        )
        .must("noexec"),
        bound(
            "bind-propagation-slave",
            &["rbind", "rslave"],
            "grep ' /mnt ' /proc/self/mountinfo | grep -c master",
        )
        .must("exit"),
        bound("bind-private", &["rbind", "rprivate"], MOUNTS).must("/mnt").differs(NODEV),
        scenario("bind-file", |session| async move {
            std::fs::write(session.path("data/one"), "one file\n").unwrap();
            let mut spec = base(&session, &["/bin/sh", "-c", "cat /etc/one /etc/plain"]);
            for destination in ["/etc/one", "/etc/plain"] {
                mount(
                    &mut spec,
                    json!({ "destination": destination, "type": "bind",
                            "source": session.path("data/one"), "options": ["bind", "ro"] }),
                );
            }
            session.run_to_end(spec).await
        })
        .must("one file"),
        run("link-in-destination", "ls -d /tmp/real; grep -c ' /tmp/real' /proc/self/mountinfo", |s| {
            // A destination that leads through a link stays in the root folder.
            mount(
                s,
                json!({ "destination": "/tmp/real", "type": "tmpfs", "source": "tmpfs",
                        "options": [] }),
            );
        })
        .must("/tmp/real"),
        run("device-given", "ls -l /dev/extra | awk '{print $1, $3, $4, $5, $6}'; head -c 2 /dev/extra | wc -c", |s| {
            s["linux"]["devices"] = json!([{ "path": "/dev/extra", "type": "c", "major": 1,
                "minor": 5, "fileMode": 0o640, "uid": 1000, "gid": 1000 }]);
            s["linux"]["resources"]["devices"] = json!([
                { "allow": false, "access": "rwm" },
                { "allow": true, "type": "c", "major": 1, "minor": 5, "access": "rwm" }
            ]);
        })
        .must("2"),
        run("device-refused", "mknod /tmp/mem c 1 1; cat /tmp/mem | wc -c", |_| {})
            .must("0\n")
            .must("can't open '/tmp/mem'")
            .differs("a mount with nodev says EACCES, a device cgroup EPERM"),
        run("shm-size", "df -k /dev/shm | tail -1 | awk '{print $2}'", |s| {
            s["mounts"][3]["options"] = json!(["nosuid", "noexec", "nodev", "size=1024k"]);
        })
        .must("1024"),
    ]
}
