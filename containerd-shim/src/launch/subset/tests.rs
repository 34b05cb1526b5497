//! What is inside, what is outside, and by which field.

use serde_json::{Value, json};

use super::*;

fn base() -> Value {
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 1, "gid": 2, "additionalGids": [3], "umask": 63},
            "args": ["sh"],
            "env": ["A=b"],
            "cwd": "/a/../b/./c",
            "capabilities": {"bounding": ["CAP_KILL"], "effective": ["CAP_KILL"], "permitted": ["CAP_KILL"]},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 5, "hard": 6}],
            "noNewPrivileges": true,
            "oomScoreAdj": 7,
        },
        "root": {"path": "rootfs", "readonly": true},
        "hostname": "h",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755", "size=64k"]},
            {"destination": "/dev/pts", "type": "devpts", "options": ["newinstance", "gid=5"]},
            {"destination": "/data", "type": "bind", "source": "/host", "options": ["rbind", "ro", "rprivate"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "options": ["ro"]},
        ],
        "linux": {
            "cgroupsPath": "/a/b",
            "resources": {
                "devices": [{"allow": false, "access": "rwm"}],
                "memory": {"limit": 5},
                "hugepageLimits": [{"pageSize": "2MB", "limit": 0}],
            },
            "namespaces": [
                {"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "ipc"},
                {"type": "network", "path": "/n"},
            ],
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"],
            "sysctl": {"net.core.somaxconn": "9", "kernel.msgmax": "8"},
        },
    })
}

/// The base with one place replaced or added (a JSON pointer).
fn with(pointer: &str, value: Value) -> Value {
    let mut spec = base();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    match spec.pointer_mut(parent).unwrap() {
        Value::Object(map) => {
            map.insert(name.to_owned(), value);
        }
        Value::Array(list) if name == "-" => list.push(value),
        Value::Array(list) => list[name.parse::<usize>().unwrap()] = value,
        _ => panic!("{pointer}"),
    }
    spec
}

fn parsed(spec: Value) -> Inside<Subset> {
    read(&serde_json::from_value(spec).unwrap())
}

#[test]
fn a_shared_memory_cgroup_is_for_those_without_a_limit() {
    let shared = |mut spec: Value| {
        spec["annotations"] = json!({MEMORY_ANNOTATION: "/a"});
        read(&serde_json::from_value(spec).unwrap())
            .unwrap()
            .memory_cgroup
    };
    assert_eq!(shared(base()), None);
    for memory in [json!({}), json!({"limit": 0})] {
        let unlimited = shared(with("/linux/resources/memory", memory));
        assert_eq!(unlimited.as_deref(), Some(Path::new("/a")));
    }
}

#[test]
fn an_ordinary_spec_is_read_whole() {
    let subset = parsed(base()).unwrap();
    let process = &subset.process;
    assert_eq!(process.cwd, b"/b/c");
    assert_eq!(
        (process.uid, process.gid, process.groups.as_slice()),
        (1, 2, &[3][..])
    );
    assert_eq!(process.umask, Some(63));
    assert_eq!(process.limits, [(libc::RLIMIT_NOFILE, 5, 6)]);
    assert_eq!(process.capabilities.bounding, 1 << 5);
    assert!(process.no_new_privileges && subset.root_readonly && !subset.all_devices);
    assert_eq!(subset.oom_score_adj, Some(7));
    assert_eq!(subset.namespaces.join, [("/n".into(), libc::CLONE_NEWNET)]);
    let new = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;
    assert_eq!(subset.namespaces.new, u64::from(new.cast_unsigned()));
    assert_eq!(
        subset.sysctls,
        [("kernel/msgmax", "8"), ("net/core/somaxconn", "9")].map(|(k, v)| (k.into(), v.into()))
    );
    let bind = &subset.mounts[3];
    assert_eq!(
        bind.what,
        What::Bind {
            source: "/host".into(),
            recursive: true
        }
    );
    assert_eq!(bind.options.attributes.set, libc::MOUNT_ATTR_RDONLY);
    assert!(!subset.agent);
}

#[test]
fn the_agent_gets_its_socket() {
    let mut spec = with(
        "/mounts/-",
        json!({"destination": AGENT, "type": "bind", "source": "/d", "options": ["bind", "ro"]}),
    );
    // Mounted, but not what runs.
    assert!(!parsed(spec.clone()).unwrap().agent);
    spec["process"]["args"] = json!([AGENT, "init"]);
    assert!(parsed(spec).unwrap().agent);
    // A program of that name in an image is none of ours.
    assert!(!parsed(with("/process/args", json!([AGENT]))).unwrap().agent);
}

#[test]
fn fields_outside_are_named() {
    let mapping = json!([{"hostID": 1, "containerID": 0, "size": 1}]);
    let mount = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": "/s", "options": options});
    let cases = [
        ("/hooks", json!({"poststop": [{"path": "/x"}]}), "hooks"),
        ("/hooks", json!({"prestart": [{"path": "/x"}]}), "hooks"),
        ("/process/apparmorProfile", json!("x"), "apparmorProfile"),
        ("/process/selinuxLabel", json!("x"), "selinuxLabel"),
        ("/process/args", json!([]), "process.args"),
        ("/process/cwd", json!("relative"), "process.cwd"),
        ("/process/terminal", json!(true), ""),
        ("/linux/uidMappings", mapping.clone(), "uidMappings"),
        ("/linux/gidMappings", mapping, "gidMappings"),
        ("/linux/mountLabel", json!("x"), "mountLabel"),
        (
            "/linux/rootfsPropagation",
            json!("shared"),
            "rootfsPropagation",
        ),
        ("/linux/rootfsPropagation", json!("rslave"), ""),
        ("/linux/intelRdt", json!({"closID": "x"}), "intelRdt"),
        (
            "/linux/devices",
            json!([{"path": "/dev/x", "type": "c", "major": 1, "minor": 2}]),
            "devices",
        ),
        ("/linux/namespaces", json!([{"type": "mount"}]), "uts"),
        (
            "/linux/namespaces/-",
            json!({"type": "user"}),
            "namespaces.user",
        ),
        (
            "/linux/namespaces/-",
            json!({"type": "time"}),
            "namespaces.time",
        ),
        ("/linux/namespaces/-", json!({"type": "ipc"}), "twice"),
        (
            "/linux/namespaces/1",
            json!({"type": "mount", "path": "/x"}),
            "mount.path",
        ),
        (
            "/linux/sysctl",
            json!({"vm.swappiness": "1"}),
            "vm.swappiness",
        ),
        (
            "/linux/sysctl",
            json!({"kernel.hostname": "x"}),
            "kernel.hostname",
        ),
        ("/linux/sysctl", json!({"net/../../x": "1"}), "net/"),
        (
            "/linux/resources/memory",
            json!({"swappiness": 1}),
            "swappiness",
        ),
        (
            "/linux/resources/memory",
            json!({"disableOOMKiller": true}),
            "disableOOMKiller",
        ),
        ("/linux/resources/cpu", json!({"cpus": "0"}), "cpu.cpus"),
        (
            "/linux/resources/cpu",
            json!({"shares": 5, "quota": 9, "period": 9}),
            "",
        ),
        ("/linux/resources/blockIO", json!({"weight": 10}), "blockIO"),
        (
            "/linux/resources/hugepageLimits",
            json!([{"pageSize": "2MB", "limit": 1}]),
            "hugepage",
        ),
        (
            "/linux/resources/unified",
            json!({"memory.high": "1"}),
            "unified",
        ),
        (
            "/linux/resources/devices",
            json!([{"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm"}]),
            "devices",
        ),
        (
            "/linux/resources/devices",
            json!([{"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"}]),
            "",
        ),
        (
            "/linux/resources/devices",
            json!([{"allow": true, "access": "rwm"}]),
            "",
        ),
        (
            "/mounts/-",
            mount("/x", "tmpfs", &["tmpcopyup"]),
            "tmpcopyup",
        ),
        ("/mounts/-", mount("/x", "ext4", &[]), "ext4"),
        ("/mounts/-", mount("x", "tmpfs", &[]), "destination"),
        ("/mounts/-", mount("/", "tmpfs", &[]), "destination"),
        ("/mounts/-", mount("/proc/x", "tmpfs", &[]), "destination"),
        ("/mounts/-", mount("/x", "proc", &[]), "destination"),
        ("/mounts/-", mount("/x", "sysfs", &[]), "destination"),
        ("/mounts/-", mount("/x", "tmpfs", &["huge=always"]), "huge"),
        (
            "/mounts/-",
            mount("/x", "tmpfs", &["rslave"]),
            "propagation",
        ),
        ("/mounts/1", mount("/dev", "bind", &["bind"]), "/dev"),
    ];
    for (pointer, value, field) in cases {
        let got = parsed(with(pointer, value.clone()));
        match got {
            Ok(_) => assert_eq!(field, "", "{pointer} {value}"),
            Err(outside) => {
                let right = !field.is_empty() && outside.field.contains(field);
                // The host name is the first to miss its namespace.
                let uts = field == "uts" && outside.field.contains("namespaces (no pid)");
                assert!(right || uts, "{pointer} {value}: {outside}");
            }
        }
    }
}

#[test]
fn administrators_need_a_device_cgroup() {
    let admin = json!({"bounding": ["CAP_SYS_ADMIN"]});
    let mut spec = with("/process/capabilities", admin);
    assert!(
        parsed(spec.clone())
            .unwrap_err()
            .field
            .contains("CAP_SYS_ADMIN")
    );
    spec["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]);
    assert!(parsed(spec).unwrap().all_devices);
}
