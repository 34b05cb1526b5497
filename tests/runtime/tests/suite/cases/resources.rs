//! Cgroups: values, updates, statistics, lack of memory.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{Case, Lines, Session, base, scenario};

/// Values of the container's cgroups while it waits to be started.
fn values(
    name: &'static str,
    resources: Value,
    files: &'static [(&'static str, &'static str)],
) -> Case {
    scenario(name, move |session| {
        let resources = resources.clone();
        async move {
            let mut spec = base(&session, &["/bin/true"]);
            for (key, value) in resources.as_object().unwrap() {
                spec["linux"]["resources"][key] = value.clone();
            }
            session.register(&spec).await;
            let mut lines = vec![format!(
                "{:?}",
                session.create(["", "", ""], false).await.map(|_| ())
            )];
            lines.extend(read(&session, files));
            lines
        }
    })
}

fn read(session: &Session, files: &[(&str, &str)]) -> Lines {
    files
        .iter()
        .map(|(controller, file)| {
            let path = format!("/sys/fs/cgroup/{controller}{}/{file}", session.cgroup());
            let value = fs::read_to_string(&path).map(|text| text.trim().to_owned());
            format!(
                "{controller} {file} {}",
                value.unwrap_or_else(|error| error.to_string())
            )
        })
        .collect()
}

async fn sleeper(session: &Session, resources: Value) -> Lines {
    let mut spec = base(session, &["/bin/sleep", "1000"]);
    for (key, value) in resources.as_object().unwrap() {
        spec["linux"]["resources"][key] = value.clone();
    }
    session.register(&spec).await;
    let created = session.create(["", "", ""], false).await.map(|_| ());
    let started = session.start("").await.map(|_| ());
    vec![format!("{created:?} {started:?}")]
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        values(
            "memory-limit",
            json!({ "memory": { "limit": 67_108_864 } }),
            &[("memory", "memory.limit_in_bytes")],
        )
        .must("67108864"),
        values(
            "memory-reservation",
            json!({ "memory": { "limit": 67_108_864, "reservation": 33_554_432 } }),
            &[
                ("memory", "memory.limit_in_bytes"),
                ("memory", "memory.soft_limit_in_bytes"),
            ],
        )
        .must("33554432"),
        values(
            "cpu-shares",
            json!({ "cpu": { "shares": 512 } }),
            &[("cpu", "cpu.shares")],
        )
        .must("512"),
        values(
            "cpu-quota",
            json!({ "cpu": { "quota": 50_000, "period": 100_000 } }),
            &[("cpu", "cpu.cfs_quota_us"), ("cpu", "cpu.cfs_period_us")],
        )
        .must("50000"),
        values(
            "pids-limit",
            json!({ "pids": { "limit": 17 } }),
            &[("pids", "pids.max")],
        )
        .must("17"),
        values(
            "no-limits",
            json!({}),
            &[("pids", "pids.max"), ("cpu", "cpu.shares")],
        )
        .must("max"),
        scenario("pids-limit-holds", |session| async move {
            let script = "for i in 1 2 3 4 5 6 7 8; do sleep 100 & done; echo no";
            let mut spec = base(&session, &["/bin/sh", "-c", script]);
            spec["linux"]["resources"]["pids"] = json!({ "limit": 4 });
            session.run_to_end(spec).await
        })
        .must("can't fork"),
        scenario("update", |session| async move {
            let mut lines = sleeper(&session, json!({ "memory": { "limit": 67_108_864 } })).await;
            let update = json!({ "memory": { "limit": 134_217_728 }, "cpu": { "shares": 256 },
                                 "pids": { "limit": 33 } });
            lines.push(format!("{:?}", session.update(&update).await));
            lines.extend(read(
                &session,
                &[
                    ("memory", "memory.limit_in_bytes"),
                    ("cpu", "cpu.shares"),
                    ("pids", "pids.max"),
                ],
            ));
            lines
        })
        .must("134217728"),
        scenario("update-wrong", |session| async move {
            let mut lines = sleeper(&session, json!({})).await;
            let update = json!({ "cpu": { "quota": 50_000, "period": 1 } });
            lines.push(format!("{:?}", session.update(&update).await));
            lines
        })
        .must("invalid argument")
        .must("cpu.cfs_period_us")
        .differs("the words around it"),
        scenario("stats", |session| async move {
            let mut lines = sleeper(&session, json!({})).await;
            let metrics = session.metrics().await;
            // Counters differ from one moment to the next; kind and presence do not.
            lines.push(format!(
                "{:?}",
                metrics.map(|(kind, length)| (kind, length > 100))
            ));
            lines
        })
        .must("cgroups.v1.Metrics\", true"),
        scenario("out-of-memory", |session| async move {
            let script = "x=x; while :; do x=$x$x; done";
            let mut spec = base(&session, &["/bin/sh", "-c", script]);
            spec["linux"]["resources"]["memory"] =
                json!({ "limit": 16_777_216, "swap": 16_777_216 });
            session.register(&spec).await;
            let created = session.create(["", "", ""], false).await.map(|_| ());
            let started = session.start("").await.map(|_| ());
            let oom = session
                .events_until("/tasks/oom")
                .await
                .contains("/tasks/oom");
            let end = session.wait("").await;
            vec![format!("{created:?} {started:?} oom {oom} end {end:?}")]
        })
        .must("oom true end Ok(137)"),
        scenario("cgroup-is-removed", |session| async move {
            let spec = base(&session, &["/bin/true"]);
            let mut lines = session.run_to_end(spec).await;
            for controller in ["memory", "pids", "cpu"] {
                let path = format!("/sys/fs/cgroup/{controller}{}", session.cgroup());
                lines.push(format!("{controller} {}", fs::exists(path).unwrap()));
            }
            lines
        })
        .must("memory false"),
    ]
}
