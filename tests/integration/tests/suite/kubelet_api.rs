//! The node's own HTTPS port, called directly: who gets in and what is served.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Event, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleRef, Subject};
use kube::api::{Api, DeleteParams, ObjectMeta, PostParams};
use sandman_integration::{NodePort, PodBuilder, Scope, container, wait_event};
use tokio::io::{AsyncBufReadExt as _, BufReader};

/// A token of the namespace's default account.
async fn token(scope: &Scope) -> Result<String> {
    let request = TokenRequest {
        spec: Some(TokenRequestSpec::default()),
        ..Default::default()
    };
    scope
        .api::<ServiceAccount>()
        .create_token_request("default", &PostParams::default(), &request)
        .await?
        .status
        .and_then(|status| status.token)
        .context("token")
}

/// Binds a cluster role to that account for the length of `body`.
async fn with_role<F, Fut>(scope: &Scope, role: &str, body: F) -> Result<()>
where
    F: FnOnce() -> Fut,
    Fut: Future<Output = Result<()>>,
{
    let bindings: Api<ClusterRoleBinding> = Api::all(scope.client.clone());
    let name = format!("{}-{role}", scope.namespace).replace(':', "-");
    let binding = ClusterRoleBinding {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            ..Default::default()
        },
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".to_owned()),
            kind: "ClusterRole".to_owned(),
            name: role.to_owned(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: "default".to_owned(),
            namespace: Some(scope.namespace.clone()),
            ..Default::default()
        }]),
    };
    bindings.create(&PostParams::default(), &binding).await?;
    let outcome = body().await;
    bindings.delete(&name, &DeleteParams::default()).await?;
    outcome
}

#[test]
fn strangers_are_turned_away() {
    Scope::run(|scope| async move {
        let port = NodePort::from_env()?;
        for path in [
            "/pods",
            "/metrics",
            "/healthz",
            "/exec/a/b/c?command=true&output=1",
            "/nowhere",
        ] {
            let answer = port.get(path, None).await?;
            ensure!(answer.status == 401, "{path}: {answer:?}");
            ensure!(answer.body == "Unauthorized", "{path}: {answer:?}");
            let answer = port.get(path, Some("not-a-token")).await?;
            ensure!(
                answer.status == 401,
                "{path} with a made-up token: {answer:?}"
            );
        }
        let token = token(&scope).await?;
        let answer = port.get("/pods", Some(&token)).await?;
        ensure!(answer.status == 403, "{answer:?}");
        ensure!(
            answer
                .body
                .starts_with("Forbidden (user=system:serviceaccount:")
                && answer
                    .body
                    .contains("verb=get, resource=nodes, subresource(s)=[pods proxy]"),
            "{answer:?}"
        );
        Ok(())
    });
}

#[test]
fn reading_rights_are_not_exec_rights() {
    Scope::run(|scope| async move {
        let port = NodePort::from_env()?;
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        let token = token(&scope).await?;
        // A role that may `get` every node subresource, but not `create`.
        let roles: Api<k8s_openapi::api::rbac::v1::ClusterRole> = Api::all(scope.client.clone());
        let name = format!("{}-reader", scope.namespace);
        let role = serde_json::from_value(serde_json::json!({
            "metadata": {"name": name},
            "rules": [{"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get"]}],
        }))?;
        roles.create(&PostParams::default(), &role).await?;
        let outcome = with_role(&scope, &name, || async {
            let path = format!("/exec/{}/box/main?command=true&output=1", scope.namespace);
            let answer = port.get(&path, Some(&token)).await?;
            ensure!(answer.status == 403, "{answer:?}");
            ensure!(answer.body.contains("verb=create"), "{answer:?}");
            Ok(())
        })
        .await;
        roles.delete(&name, &DeleteParams::default()).await?;
        outcome
    });
}

#[test]
fn its_documents_are_served() {
    Scope::run(|scope| async move {
        let port = NodePort::from_env()?;
        let pod = scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "box").build())
            .await?;
        let token = token(&scope).await?;
        with_role(&scope, "system:kubelet-api-admin", || async {
            let answer = port.get("/healthz", Some(&token)).await?;
            ensure!(answer.status == 200 && answer.body == "ok", "{answer:?}");

            let answer = port.get("/pods", Some(&token)).await?;
            let list: serde_json::Value = serde_json::from_str(&answer.body)?;
            ensure!(list["kind"] == "PodList", "{list}");
            let uid = pod.metadata.uid.as_deref().context("uid")?;
            ensure!(
                list["items"]
                    .as_array()
                    .context("items")?
                    .iter()
                    .any(|p| p["metadata"]["uid"] == uid),
                "the pod is not in /pods"
            );

            let answer = port.get("/metrics/resource", Some(&token)).await?;
            for family in [
                "node_cpu_usage_seconds_total ",
                "node_memory_working_set_bytes ",
                "container_cpu_usage_seconds_total{",
                "container_memory_working_set_bytes{",
                "container_start_time_seconds{",
                "pod_cpu_usage_seconds_total{",
                "pod_memory_working_set_bytes{",
                "resource_scrape_error ",
            ] {
                ensure!(
                    answer.body.lines().any(|line| line.starts_with(family)),
                    "{family} is not in /metrics/resource:\n{}",
                    answer.body
                );
            }
            let ours = format!(
                "container=\"main\",namespace=\"{}\",pod=\"box\"",
                scope.namespace
            );
            let line = answer
                .body
                .lines()
                .find(|line| {
                    line.starts_with("container_memory_working_set_bytes{") && line.contains(&ours)
                })
                .with_context(|| format!("no series with {ours}"))?;
            let value: f64 = line.split(' ').nth(1).context("value")?.parse()?;
            ensure!(value > 0.0, "{line}");

            let answer = port.get("/nowhere", Some(&token)).await?;
            ensure!(answer.status == 404, "{answer:?}");
            let answer = port
                .get("/exec/none/none/none?command=true&output=1", Some(&token))
                .await?;
            ensure!(
                answer.status == 404 && answer.body.contains("pod does not exist"),
                "{answer:?}"
            );
            Ok(())
        })
        .await
    });
}

/// A pod that has used its processor, its network and its log, for sure.
async fn busy_pod(scope: &Scope) -> Result<()> {
    let script = "echo started; head -c 3000000 /dev/urandom | sha256sum; exec sleep 1000000";
    let pod = PodBuilder::new("box")
        .container(container(&scope.cluster, "main", script))
        .build();
    scope.ready_pod(&pod).await?;
    let logs = scope.kubectl().spawn(&["logs", "-f", "box"])?;
    let mut lines = BufReader::new(logs.stdout.context("stdout")?).lines();
    while let Some(line) = lines.next_line().await? {
        if line.ends_with('-') {
            return Ok(());
        }
    }
    anyhow::bail!("the log ended without the digest")
}

#[test]
fn usage_is_measured() {
    Scope::run(|scope| async move {
        let port = NodePort::from_env()?;
        busy_pod(&scope).await?;
        let token = token(&scope).await?;
        with_role(&scope, "system:kubelet-api-admin", || async {
            let answer = port.get("/stats/summary", Some(&token)).await?;
            let summary: serde_json::Value = serde_json::from_str(&answer.body)?;
            let pod = summary["pods"]
                .as_array()
                .context("pods")?
                .iter()
                .find(|pod| pod["podRef"]["namespace"] == scope.namespace.as_str())
                .context("the pod is not in the summary")?;
            for (what, figure) in [
                ("node fs", &summary["node"]["fs"]["capacityBytes"]),
                ("cpu", &pod["containers"][0]["cpu"]["usageCoreNanoSeconds"]),
                ("memory", &pod["containers"][0]["memory"]["workingSetBytes"]),
                ("logs", &pod["containers"][0]["logs"]["usedBytes"]),
                ("processes", &pod["process_stats"]["process_count"]),
            ] {
                ensure!(figure.as_u64() > Some(0), "{what}: {pod:#}");
            }
            ensure!(pod["network"]["name"] == "eth0", "{pod:#}");
            ensure!(pod["network"]["rxBytes"].is_u64(), "{pod:#}");

            let answer = port.get("/metrics/cadvisor", Some(&token)).await?;
            let ours = format!("namespace=\"{}\",pod=\"box\"", scope.namespace);
            for family in [
                "container_cpu_usage_seconds_total{",
                "container_cpu_user_seconds_total{",
                "container_memory_working_set_bytes{",
                "container_memory_failures_total{",
                "container_processes{",
                "container_spec_memory_limit_bytes{",
                "container_start_time_seconds{",
                "container_network_receive_bytes_total{",
                "container_network_transmit_packets_total{",
            ] {
                let found = answer
                    .body
                    .lines()
                    .any(|line| line.starts_with(family) && line.contains(&ours));
                ensure!(found, "no {family} of the pod:\n{}", answer.body);
            }
            Ok(())
        })
        .await
    });
}

/// A sample as metrics-server's decoder takes it: labels, value, milliseconds.
fn samples<'a>(text: &'a str, family: &str) -> Vec<(&'a str, f64, i64)> {
    text.lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(family)?;
            let (labels, rest) = match rest.strip_prefix('{') {
                Some(rest) => rest.split_once("} ")?,
                None => ("", rest.strip_prefix(' ')?),
            };
            let mut words = rest.split(' ');
            let value = words.next()?.parse().ok()?;
            let time = words.next().and_then(|time| time.parse().ok()).unwrap_or(0);
            Some((labels, value, time))
        })
        .collect()
}

#[test]
fn metrics_server_can_read_usage() {
    // Its rules (`pkg/scraper/client/resource/decode.go`): a node or a container without a
    // value, or with a zero, is dropped, the latter with its whole pod; each value needs a time,
    // and two of them a time apart, to make a rate.
    Scope::run(|scope| async move {
        let port = NodePort::from_env()?;
        busy_pod(&scope).await?;
        let token = token(&scope).await?;
        with_role(&scope, "system:kubelet-api-admin", || async {
            let first = port.get("/metrics/resource", Some(&token)).await?.body;
            let second = port.get("/metrics/resource", Some(&token)).await?.body;
            let ours = format!(
                "container=\"main\",namespace=\"{}\",pod=\"box\"",
                scope.namespace
            );
            let one = |text: &str, family: &str, labels: &str| {
                let found: Vec<_> = samples(text, family)
                    .into_iter()
                    .filter(|sample| sample.0 == labels)
                    .map(|(_, value, time)| (value, time))
                    .collect();
                ensure!(found.len() == 1, "{family}{{{labels}}}: {found:?}");
                ensure!(found[0].0 > 0.0, "{family}{{{labels}}}: {found:?}");
                Ok(found[0])
            };
            for (family, labels) in [
                ("node_cpu_usage_seconds_total", ""),
                ("node_memory_working_set_bytes", ""),
                ("container_cpu_usage_seconds_total", &*ours),
                ("container_memory_working_set_bytes", &*ours),
            ] {
                let (before, after) = (one(&first, family, labels)?, one(&second, family, labels)?);
                ensure!(
                    before.1 > 0 && after.1 >= before.1,
                    "{family}: {before:?} {after:?}"
                );
                let counts = family.contains("cpu");
                ensure!(
                    !counts || after.0 >= before.0,
                    "{family}: {before:?} {after:?}"
                );
            }
            let (started, _) = one(&second, "container_start_time_seconds", &ours)?;
            let now = jiff::Timestamp::now().as_second() as f64;
            ensure!(
                started <= now && now - started < 3600.0,
                "started at {started}"
            );
            Ok(())
        })
        .await
    });
}

#[test]
fn the_node_tells_of_itself() {
    Scope::run(|scope| async move {
        let events: Api<Event> = Api::namespaced(scope.client.clone(), "default");
        let node = &scope.cluster.node;
        wait_event(&events, node, "Starting", "Starting kubelet.").await?;
        Ok(())
    });
}
