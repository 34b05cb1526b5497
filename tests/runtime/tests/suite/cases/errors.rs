//! Specs that cannot work, and their words.

use serde_json::json;

use crate::harness::{Case, base, run, scenario};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        run("command-missing", "", |s| {
            s["process"]["args"] = json!(["no-such-command"])
        })
        .must("executable file not found in $PATH"),
        run("command-absent-file", "", |s| {
            s["process"]["args"] = json!(["/no/such/file"])
        })
        .must("no such file or directory"),
        run("command-not-executable", "", |s| {
            s["process"]["args"] = json!(["/etc/plain"])
        })
        .must("permission denied"),
        run("command-a-folder", "", |s| {
            s["process"]["args"] = json!(["/etc"])
        })
        .must("exec: \"/etc\": ")
        .differs("only newer versions of runc say that it is a directory"),
        run("command-none", "", |s| s["process"]["args"] = json!([])).must("create:"),
        run("folder-is-a-file", "true", |s| {
            s["process"]["cwd"] = json!("/etc/plain")
        })
        .must("/etc/plain")
        .must("not a directory")
        .differs("the words around it"),
        run("folder-relative", "true", |s| {
            s["process"]["cwd"] = json!("etc")
        })
        .must("create:"),
        run("mount-source-missing", "true", |s| {
            s["mounts"]
                .as_array_mut()
                .unwrap()
                .push(json!({ "destination": "/mnt", "type": "bind",
                "source": "/no/such/source", "options": ["bind"] }));
        })
        .must("create:")
        .must("/no/such/source")
        .must("no such file or directory")
        .differs("the words around it"),
        run("mount-kind-unknown", "true", |s| {
            s["mounts"]
                .as_array_mut()
                .unwrap()
                .push(json!({ "destination": "/mnt",
                "type": "nosuchfs", "source": "x", "options": [] }));
        })
        .must("no such device"),
        run("namespace-unknown", "true", |s| {
            let list = s["linux"]["namespaces"].as_array_mut().unwrap();
            list.push(json!({ "type": "nosuch" }));
        })
        .must("nosuch"),
        run("namespace-path-missing", "true", |s| {
            s["linux"]["namespaces"][4] = json!({ "type": "network", "path": "/no/such/ns" });
        })
        .must("create:")
        .must("/no/such/ns")
        .must("no such file or directory")
        .differs("the words around it"),
        run("capability-unknown", "echo ran", |s| {
            s["process"]["capabilities"]["bounding"] = json!(["CAP_NOPE"]);
        })
        .must("stderr"),
        run("hostname-without-namespace", "true", |s| {
            s["linux"]["namespaces"]
                .as_array_mut()
                .unwrap()
                .retain(|n| n["type"] != "uts");
        })
        .must("UTS"),
        run("memory-limit-too-small", "true", |s| {
            s["linux"]["resources"]["memory"] = json!({ "limit": 4096 });
        })
        .must("create:")
        .must("memory limit")
        .differs("runc sets it late and refuses it, ours is there from the start and kills"),
        run("hook-fails", "true", |s| {
            s["hooks"] = json!({ "prestart": [{ "path": "/bin/false" }] });
        })
        .must("hook"),
        run("version-unknown", "true", |s| {
            s["ociVersion"] = json!("9.0")
        })
        .must("exit"),
        scenario("stream-missing", |session| async move {
            let spec = base(&session, &["/bin/true"]);
            session.register(&spec).await;
            let path = session.path("io/absent");
            // The words are ours; that it is refused is the same.
            vec![format!(
                "refused {}",
                session.create(["", &path, ""], false).await.is_err()
            )]
        })
        .must("refused true"),
    ]
}
