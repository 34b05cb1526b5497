//! Who the process is: users, groups, capabilities, environment, working directory.

use serde_json::{Value, json};

use crate::harness::{Case, run};

const IDS: &str = "grep -E '^(Uid|Gid|Groups)' /proc/self/status";
const CAPS: &str = "grep -E '^(Cap|NoNewPrivs)' /proc/self/status";

fn user(spec: &mut Value, user: Value) {
    spec["process"]["user"] = user;
}

fn caps(spec: &mut Value, set: &str, names: &[&str]) {
    spec["process"]["capabilities"][set] = json!(names);
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        run("user-root", IDS, |_| {}).must("Uid:\t0"),
        run("user-plain", IDS, |s| {
            user(s, json!({ "uid": 1000, "gid": 1000 }))
        })
        .must("Uid:\t1000"),
        run("user-without-name", IDS, |s| {
            user(s, json!({ "uid": 4242, "gid": 4343 }))
        })
        .must("4343"),
        run("user-large", IDS, |s| {
            user(s, json!({ "uid": 2_147_483_647, "gid": 2_147_483_647 }));
        })
        .must("2147483647"),
        run("groups-more", IDS, |s| {
            user(
                s,
                json!({ "uid": 1000, "gid": 1000, "additionalGids": [2000, 3000, 7] }),
            );
        })
        .must("3000"),
        run("groups-doubled", IDS, |s| {
            user(
                s,
                json!({ "uid": 0, "gid": 0, "additionalGids": [5, 5, 0] }),
            );
        })
        .must("Groups:"),
        run(
            "umask-default",
            "umask; touch /tmp/f; stat -c %a /tmp/f",
            |_| {},
        )
        .must("644"),
        run("umask-set", "umask; touch /tmp/f; stat -c %a /tmp/f", |s| {
            s["process"]["user"]["umask"] = json!(0o077);
        })
        .must("600"),
        run("caps-default", CAPS, |_| {}).must("CapBnd:\t00000000a80425fb"),
        run("caps-none", CAPS, |s| {
            s["process"]["capabilities"] = json!({});
        })
        .must("CapBnd:\t0000000000000000"),
        run("caps-absent", CAPS, |s| {
            s["process"].as_object_mut().unwrap().remove("capabilities");
        })
        .must("CapBnd:"),
        run("caps-inheritable", CAPS, |s| {
            caps(s, "inheritable", &["CAP_CHOWN"])
        })
        .must("CapInh:"),
        run("caps-ambient", CAPS, |s| {
            user(s, json!({ "uid": 1000, "gid": 1000 }));
            caps(s, "inheritable", &["CAP_NET_RAW"]);
            caps(s, "ambient", &["CAP_NET_RAW"]);
        })
        .must("CapAmb:\t0000000000002000"),
        run("caps-user", CAPS, |s| {
            user(s, json!({ "uid": 1000, "gid": 1000 }))
        })
        .must("CapEff:\t0000000000000000"),
        run("caps-admin", CAPS, |s| {
            for set in ["bounding", "effective", "permitted"] {
                caps(s, set, &["CAP_SYS_ADMIN", "CAP_NET_ADMIN"]);
            }
        })
        .must("CapEff:\t0000000000201000"),
        run("new-privileges", CAPS, |s| {
            s["process"]["noNewPrivileges"] = json!(false)
        })
        .must("NoNewPrivs:\t0"),
        run(
            "chown-needs-its-cap",
            "chown 1000 /etc/plain; echo $?",
            |s| {
                for set in ["bounding", "effective", "permitted"] {
                    caps(s, set, &["CAP_KILL"]);
                }
            },
        )
        .must("not permitted"),
        run("env", "env | sort", |s| {
            s["process"]["env"] = json!(["PATH=/bin", "B=2", "A=1 with = and space", "EMPTY="]);
        })
        .must("A=1 with = and space"),
        run("env-none", "/bin/env | /bin/sort", |s| {
            s["process"]["env"] = json!([])
        })
        .must("PWD=/"),
        run("env-doubled", "env | sort", |s| {
            s["process"]["env"] = json!(["PATH=/bin", "A=first", "A=second"]);
        })
        .must("A="),
        run("env-home-missing", "echo $HOME", |s| {
            s["process"]["env"] = json!(["PATH=/bin"]);
            user(s, json!({ "uid": 1000, "gid": 1000 }));
        })
        .must("/home/app"),
        run("cwd", "pwd", |s| s["process"]["cwd"] = json!("/home/app")).must("/home/app"),
        run("cwd-made", "pwd; stat -c '%a %u' .", |s| {
            s["process"]["cwd"] = json!("/new/folder")
        })
        .must("/new/folder"),
        run("hostname", "hostname", |s| s["hostname"] = json!("another")).must("another"),
        run("oom-score", "cat /proc/self/oom_score_adj", |s| {
            s["process"]["oomScoreAdj"] = json!(321);
        })
        .must("321"),
    ]
}
