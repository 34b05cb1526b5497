//! What the node's own credentials must not be able to do, verb by verb.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret};
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use sandman_integration::{Scope, variable};

async fn node_client(scope: &Scope) -> Result<Client> {
    let kubeconfig = variable("SANDMAN_NODE_KUBECONFIG")?;
    scope.cluster.client_from(kubeconfig.as_ref()).await
}

/// The call must be refused by authorization, nothing else.
fn forbidden<T: std::fmt::Debug>(what: &str, result: kube::Result<T>) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(()),
        other => anyhow::bail!("{what}: want 403, got {other:?}"),
    }
}

#[test]
fn other_peoples_objects_are_out_of_reach() {
    Scope::run(|scope| async move {
        let client = node_client(&scope).await?;
        let secrets: Api<Secret> = Api::namespaced(client.clone(), &scope.namespace);
        let config_maps: Api<ConfigMap> = Api::namespaced(client.clone(), &scope.namespace);
        let all = ListParams::default();
        forbidden("list secrets", secrets.list(&all).await)?;
        forbidden(
            "list secrets everywhere",
            Api::<Secret>::all(client.clone()).list(&all).await,
        )?;
        forbidden(
            "get a secret no pod of ours names",
            secrets.get("other").await,
        )?;
        forbidden("list configMaps", config_maps.list(&all).await)?;
        forbidden(
            "get a configMap no pod of ours names",
            config_maps.get("other").await,
        )?;
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some("mine".to_owned()),
                ..Default::default()
            },
            ..Default::default()
        };
        forbidden(
            "create a secret",
            secrets.create(&PostParams::default(), &secret).await,
        )?;
        let label = Patch::Merge(serde_json::json!({"metadata": {"labels": {"a": "b"}}}));
        forbidden(
            "patch a secret",
            secrets
                .patch("other", &PatchParams::default(), &label)
                .await,
        )?;
        forbidden(
            "delete a secret",
            secrets.delete("other", &DeleteParams::default()).await,
        )?;
        Ok(())
    });
}

#[test]
fn pods_of_other_nodes_are_out_of_reach() {
    Scope::run(|scope| async move {
        let client = node_client(&scope).await?;
        let everywhere: Api<Pod> = Api::all(client.clone());
        forbidden(
            "list all pods",
            everywhere.list(&ListParams::default()).await,
        )?;
        let other = ListParams::default().fields("spec.nodeName=another-node");
        forbidden("list another node's pods", everywhere.list(&other).await)?;

        let pods: Api<Pod> = Api::namespaced(client.clone(), &scope.namespace);
        // A pod that no node has: nobody's but the administrator's.
        let pod = sandman_integration::PodBuilder::sleeper(&scope.cluster, "unbound")
            .spec(|spec| {
                spec.scheduling_gates = Some(vec![k8s_openapi::api::core::v1::PodSchedulingGate {
                    name: "sandman.dev/test".to_owned(),
                }]);
            })
            .build();
        scope.create_pod(&pod).await?;
        forbidden(
            "create a pod",
            pods.create(&PostParams::default(), &pod).await,
        )?;
        forbidden(
            "delete a pod",
            pods.delete("unbound", &DeleteParams::default()).await,
        )?;
        let status = Patch::Merge(serde_json::json!({"status": {"phase": "Failed"}}));
        forbidden(
            "patch a status",
            pods.patch_status("unbound", &PatchParams::default(), &status)
                .await,
        )?;
        let label = Patch::Merge(serde_json::json!({"metadata": {"labels": {"a": "b"}}}));
        forbidden(
            "patch a pod",
            pods.patch("unbound", &PatchParams::default(), &label).await,
        )?;
        Ok(())
    });
}

#[test]
fn nodes_and_leases_of_others_are_out_of_reach() {
    Scope::run(|scope| async move {
        use k8s_openapi::api::coordination::v1::Lease;
        let client = node_client(&scope).await?;
        let nodes: Api<Node> = Api::all(client.clone());
        let node = Node {
            metadata: ObjectMeta {
                name: Some("another-node".to_owned()),
                ..Default::default()
            },
            ..Default::default()
        };
        forbidden(
            "create another node",
            nodes.create(&PostParams::default(), &node).await,
        )?;
        forbidden(
            "delete a node",
            nodes
                .delete(&scope.cluster.node, &DeleteParams::default())
                .await,
        )?;
        let taints = Patch::Merge(serde_json::json!({"spec": {"taints": []}}));
        forbidden(
            "change its own taints",
            nodes
                .patch(&scope.cluster.node, &PatchParams::default(), &taints)
                .await,
        )?;
        let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some("another-node".to_owned()),
                ..Default::default()
            },
            ..Default::default()
        };
        forbidden(
            "create another node's lease",
            leases.create(&PostParams::default(), &lease).await,
        )?;
        let system: Api<Lease> = Api::namespaced(client.clone(), "sandman-system");
        forbidden("read the election lease", system.get("sandman-vnode").await)?;
        Ok(())
    });
}

#[test]
fn tokens_only_for_accounts_of_its_own_pods() {
    Scope::run(|scope| async move {
        use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
        use k8s_openapi::api::core::v1::ServiceAccount;
        let client = node_client(&scope).await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client, &scope.namespace);
        let request = TokenRequest {
            spec: Some(TokenRequestSpec::default()),
            ..Default::default()
        };
        forbidden(
            "a token that is bound to no pod",
            accounts
                .create_token_request("default", &PostParams::default(), &request)
                .await,
        )?;
        ensure!(!scope.namespace.is_empty());
        Ok(())
    });
}
