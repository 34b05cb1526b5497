//! Namespaces, sysctls, seccomp, rlimits.

use serde_json::{Value, json};

use crate::harness::{Case, base, run, scenario};

/// Which namespaces are the host's own.
const SHARED: &str = "for n in cgroup ipc mnt net pid uts user; do readlink /proc/self/ns/$n; done";

/// Shows for each namespace whether it is the host's.
fn namespaces(name: &'static str, kinds: &'static [&'static str]) -> Case {
    scenario(name, move |session| async move {
        let mut spec = base(&session, &["/bin/sh", "-c", SHARED]);
        let list: Vec<Value> = kinds.iter().map(|kind| json!({ "type": kind })).collect();
        spec["linux"]["namespaces"] = json!(list);
        if !kinds.contains(&"uts") {
            spec.as_object_mut().unwrap().remove("hostname");
        }
        let lines = session.run_to_end(spec).await;
        lines
            .into_iter()
            .map(|line| {
                let words: Vec<_> = line
                    .lines()
                    .map(|word| match word.split_once(':') {
                        Some((kind, _)) if !kind.contains(' ') && word.contains('[') => {
                            let own = std::fs::read_link(format!("/proc/thread-self/ns/{kind}"));
                            let same = own.is_ok_and(|own| own.to_string_lossy() == word);
                            format!("{kind} {}", if same { "shared" } else { "own" })
                        }
                        _ => word.to_owned(),
                    })
                    .collect();
                words.join("\n")
            })
            .collect()
    })
}

fn seccomp(spec: &mut Value, value: Value) {
    spec["linux"]["seccomp"] = value;
}

fn rlimit(spec: &mut Value, kind: &str, soft: u64, hard: u64) {
    let limits = spec["process"]["rlimits"].as_array_mut().unwrap();
    limits.push(json!({ "type": kind, "soft": soft, "hard": hard }));
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        namespaces("namespaces-default", &["pid", "ipc", "uts", "mount", "network"]).must("pid own"),
        namespaces("namespaces-host-network", &["pid", "ipc", "uts", "mount"]).must("net shared"),
        namespaces("namespaces-host-pid", &["ipc", "uts", "mount", "network"]).must("pid shared"),
        namespaces("namespaces-host-ipc", &["pid", "uts", "mount", "network"]).must("ipc shared"),
        namespaces("namespaces-host-uts", &["pid", "ipc", "mount", "network"]).must("uts shared"),
        namespaces("namespaces-cgroup", &["pid", "ipc", "uts", "mount", "network", "cgroup"])
            .must("cgroup own"),
        run("pid-one", "echo $$; cat /proc/1/comm", |_| {}).must("1"),
        run("network-empty", "ip link show lo | head -1 | tr -d 0-9; wc -l </proc/net/dev", |_| {})
            .must("lo"),
        run("user-namespace", "cat /proc/self/uid_map /proc/self/gid_map; id -u", |s| {
            let list = s["linux"]["namespaces"].as_array_mut().unwrap();
            list.push(json!({ "type": "user" }));
            let map = json!([{ "containerID": 0, "hostID": 0, "size": 100_000 }]);
            s["linux"]["uidMappings"] = map.clone();
            s["linux"]["gidMappings"] = map;
        })
        .must("100000"),
        run("sysctl-network", "cat /proc/sys/net/ipv4/ip_forward", |s| {
            s["linux"]["sysctl"] = json!({ "net.ipv4.ip_forward": "1" });
        })
        .must("1"),
        run("sysctl-ipc", "cat /proc/sys/kernel/shmmni", |s| {
            s["linux"]["sysctl"] = json!({ "kernel.shmmni": "77" });
        })
        .must("77"),
        run("sysctl-of-the-host", "true", |s| {
            s["linux"]["sysctl"] = json!({ "kernel.panic": "1" });
        })
        .must("kernel.panic"),
        run("seccomp-off", "grep ^Seccomp: /proc/self/status", |_| {}).must("Seccomp:\t0"),
        run("seccomp-errno", "mkdir /tmp/x; echo $?; grep ^Seccomp: /proc/self/status", |s| {
            seccomp(
                s,
                json!({ "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
                    "syscalls": [{ "names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO",
                                   "errnoRet": 38 }] }),
            );
        })
        .must("Seccomp:\t2"),
        run("seccomp-kill", "mkdir /tmp/x; echo status $?", |s| {
            seccomp(
                s,
                json!({ "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
                    "syscalls": [{ "names": ["mkdir"], "action": "SCMP_ACT_KILL_PROCESS" }] }),
            );
        })
        .must("status 159"),
        run("seccomp-argument", "chmod 700 /tmp; echo $?; chmod 711 /tmp; echo $?", |s| {
            seccomp(
                s,
                json!({ "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
                    "syscalls": [{ "names": ["chmod"], "action": "SCMP_ACT_ERRNO",
                        "args": [{ "index": 1, "value": 0o711, "op": "SCMP_CMP_EQ" }] }] }),
            );
        })
        .must("1"),
        run("seccomp-unknown-names", "echo ran", |s| {
            seccomp(
                s,
                json!({ "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
                    "syscalls": [{ "names": ["no_such_call"], "action": "SCMP_ACT_ERRNO" }] }),
            );
        })
        .must("ran"),
        run("rlimit-files", "ulimit -n; ulimit -Hn", |_| {}).must("1024"),
        run("rlimit-core", "ulimit -c; ulimit -Hc", |s| rlimit(s, "RLIMIT_CORE", 0, 0)).must("0"),
        run("rlimit-memory-locked", "ulimit -l; ulimit -Hl", |s| {
            rlimit(s, "RLIMIT_MEMLOCK", 65_536, 131_072);
        })
        .must("64"),
        run("rlimit-unknown", "true", |s| rlimit(s, "RLIMIT_NOPE", 1, 1)).must("RLIMIT_NOPE"),
    ]
}
