//! The node's own HTTPS port, called directly: who gets in and what is served.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleRef, Subject};
use kube::api::{Api, DeleteParams, ObjectMeta, PostParams};
use sandman_integration::{NodePort, PodBuilder, Scope};

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
