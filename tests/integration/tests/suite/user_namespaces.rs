//! Pods with users of their own (`hostUsers: false`).

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::PostParams;
use sandman_integration::{PodBuilder, Scope};
use serde_json::json;

fn apart(scope: &Scope, name: &str) -> Pod {
    PodBuilder::sleeper(&scope.cluster, name)
        .spec(|spec| {
            spec.host_users = Some(false);
            spec.security_context = serde_json::from_value(json!({"fsGroup": 2000})).ok();
            spec.volumes = serde_json::from_value(json!([
                {"name": "scratch", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
                {"name": "secret", "secret": {"secretName": "key", "defaultMode": 0o400}},
            ]))
            .ok();
            spec.containers[0].volume_mounts = serde_json::from_value(json!([
                {"name": "scratch", "mountPath": "/scratch"},
                {"name": "memory", "mountPath": "/memory"},
                {"name": "secret", "mountPath": "/secret"},
                {"name": "scratch", "mountPath": "/part", "subPath": "part"},
            ]))
            .ok();
        })
        .build()
}

async fn inside(scope: &Scope, pod: &str, command: &[&str]) -> Result<String> {
    let arguments = [&["exec", pod, "--"], command].concat();
    Ok(scope.kubectl().run(&arguments).await?.ok()?.text())
}

/// First id of the host that is root's inside.
async fn first_id(scope: &Scope, pod: &str) -> Result<u32> {
    let map = inside(scope, pod, &["cat", "/proc/self/uid_map"]).await?;
    let mut words = map.split_whitespace();
    ensure!(words.next() == Some("0"), "{map:?}");
    let first = words.next().context("no host id")?.parse()?;
    ensure!(words.next() == Some("65536"), "{map:?}");
    Ok(first)
}

#[test]
fn root_inside_is_nobody_outside_and_files_keep_their_owners() {
    Scope::run(|scope| async move {
        let secret: Secret = serde_json::from_value(json!({
            "metadata": {"name": "key"}, "stringData": {"k": "v"},
        }))?;
        let params = PostParams::default();
        scope.api::<Secret>().create(&params, &secret).await?;
        scope.ready_pod(&apart(&scope, "one")).await?;
        // One more than there are hosts, so that two share one.
        let mut taken = Vec::new();
        for index in 0..=scope.cluster.hosts {
            let name = format!("other-{index}");
            let pod = scope.ready_pod(&apart(&scope, &name)).await?;
            let host = pod.status.and_then(|status| status.host_ip);
            taken.push((host.context("hostIP")?, first_id(&scope, &name).await?));
        }
        taken.sort();
        for pair in taken.windows(2) {
            let ((host, one), (other, two)) = (&pair[0], &pair[1]);
            ensure!(*one >= 65_536 && *two >= 65_536, "{taken:?}");
            ensure!(host != other || two - one >= 65_536, "{taken:?} overlap");
        }
        let script = "set -e; id -u; stat -c %u:%g /bin/sh /etc/hosts /dev/termination-log; \
            stat -c %g /scratch /memory; cat /secret/k; echo; \
            for d in / /scratch /memory /part; do echo x > $d/f; stat -c %u $d/f; done; \
            chown 1000 /f; stat -c %u /f; echo bye > /dev/termination-log";
        let out = inside(&scope, "one", &["sh", "-c", script]).await?;
        let expected = "0 0:0 0:0 0:0 2000 2000 v 0 0 0 0 1000";
        let found: Vec<_> = out.split_whitespace().collect();
        ensure!(found.join(" ") == expected, "{out}");
        Ok(())
    });
}
