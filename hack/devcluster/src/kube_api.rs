//! What the dev cluster itself does at the API server: applies the manifests, issues tokens, and
//! waits for the node.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::api::{Api, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, TypeMeta};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{Condition, await_condition};
use kube::{Client, Config, ResourceExt};
use serde::Deserialize;

/// Who owns the fields that we apply.
const FIELD_MANAGER: &str = "sandman-devcluster";
/// Life of a ServiceAccount's token; a restart of the cluster renews it.
const TOKEN_SECONDS: i64 = 30 * 24 * 3600;

/// A client with the credentials of a kubeconfig file.
pub(crate) async fn client(kubeconfig: &Path) -> anyhow::Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Applies every object below a kustomization by server-side apply; gives their number.
pub(crate) async fn apply_manifests(client: &Client, dir: &Path) -> anyhow::Result<usize> {
    let mut objects = Vec::new();
    for file in resources(dir)? {
        let text = fs::read_to_string(&file)?;
        for document in serde_yaml_ng::Deserializer::from_str(&text) {
            let value = serde_json::Value::deserialize(document)
                .with_context(|| format!("{} is not YAML", file.display()))?;
            if !value.is_null() {
                let object: DynamicObject = serde_json::from_value(value)
                    .with_context(|| format!("{} holds no object", file.display()))?;
                objects.push((file.clone(), object));
            }
        }
    }
    // Others live in namespaces or are of kinds that these define.
    objects.sort_by_key(|(_, object)| match kind(object) {
        "Namespace" => 0,
        "CustomResourceDefinition" => 1,
        _ => 2,
    });
    for (file, object) in &objects {
        apply(client, object)
            .await
            .with_context(|| format!("cannot apply {} of {}", kind(object), file.display()))?;
    }
    Ok(objects.len())
}

fn kind(object: &DynamicObject) -> &str {
    object
        .types
        .as_ref()
        .map_or("", |types| types.kind.as_str())
}

async fn apply(client: &Client, object: &DynamicObject) -> anyhow::Result<()> {
    let types: &TypeMeta = object
        .types
        .as_ref()
        .context("apiVersion or kind is missing")?;
    let gvk = GroupVersionKind::try_from(types)?;
    let (resource, capabilities) = kube::discovery::pinned_kind(client, &gvk).await?;
    let api: Api<DynamicObject> = match object.namespace() {
        Some(namespace) if capabilities.scope == kube::discovery::Scope::Namespaced => {
            Api::namespaced_with(client.clone(), &namespace, &resource)
        }
        _ => Api::all_with(client.clone(), &resource),
    };
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(&object.name_any(), &parameters, &Patch::Apply(object))
        .await?;
    Ok(())
}

/// Files named by a kustomization, in order. Only `resources` is understood: what the dev cluster
/// applies needs no patches.
fn resources(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Kustomization {
        #[serde(default)]
        resources: Vec<PathBuf>,
    }

    let path = dir.join("kustomization.yaml");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let kustomization: Kustomization = serde_yaml_ng::from_str(&text)
        .with_context(|| format!("{} is not a kustomization", path.display()))?;
    let mut files = Vec::new();
    for resource in kustomization.resources {
        let resource = dir.join(resource);
        if resource.is_dir() {
            files.extend(resources(&resource)?);
        } else {
            files.push(resource);
        }
    }
    Ok(files)
}

/// A token of a ServiceAccount.
pub(crate) async fn service_account_token(
    client: &Client,
    namespace: &str,
    name: &str,
) -> anyhow::Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            expiration_seconds: Some(TOKEN_SECONDS),
            ..TokenRequestSpec::default()
        }),
        ..TokenRequest::default()
    };
    let issued = accounts
        .create_token_request(name, &PostParams::default(), &request)
        .await
        .with_context(|| format!("no token for ServiceAccount {namespace}/{name}"))?;
    issued
        .status
        .and_then(|status| status.token)
        .context("the API server issued no token")
}

/// Waits until pods can be created: the controller manager makes the account that they run as.
pub(crate) async fn wait_default_account(client: &Client, within: Duration) -> anyhow::Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    let exists = |account: Option<&ServiceAccount>| account.is_some();
    wait(accounts, "default", exists, within).await
}

/// Waits until the node is Ready.
pub(crate) async fn wait_node_ready(
    client: &Client,
    node: &str,
    within: Duration,
) -> anyhow::Result<()> {
    wait(
        Api::all(client.clone()),
        node,
        |node: Option<&Node>| node.is_some_and(is_ready),
        within,
    )
    .await
}

/// The node's condition Ready.
pub(crate) fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|list| {
        list.iter()
            .any(|c| c.type_ == "Ready" && c.status == "True")
    })
}

/// The node's conditions that keep pods away, as `Name (message)`.
pub(crate) fn pressures(node: &Node) -> Vec<String> {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .filter(|c| c.type_.ends_with("Pressure") && c.status == "True")
        .map(|c| {
            let message = c.message.as_deref().unwrap_or_default();
            format!("{} ({message})", c.type_)
        })
        .collect()
}

async fn wait<K>(
    api: Api<K>,
    name: &str,
    condition: impl Condition<K>,
    within: Duration,
) -> anyhow::Result<()>
where
    K: kube::Resource + Clone + std::fmt::Debug + Send + serde::de::DeserializeOwned + 'static,
{
    match tokio::time::timeout(within, await_condition(api, name, condition)).await {
        Ok(done) => {
            done?;
            Ok(())
        }
        Err(_) => bail!("{name} is not ready after {within:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kustomizations_are_followed_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("kustomization.yaml", "resources: [b.yaml, sub]\n");
        write("sub/kustomization.yaml", "resources:\n- a.yaml\n");
        assert_eq!(
            resources(dir.path()).unwrap(),
            [dir.path().join("b.yaml"), dir.path().join("sub/a.yaml")]
        );
    }
}
