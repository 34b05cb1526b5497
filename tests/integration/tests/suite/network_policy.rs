//! NetworkPolicies between sandboxes, on one host and across hosts.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, PostParams};
use sandman_integration::{PodBuilder, Scope, container};
use serde_json::{Value, json};

async fn shell(scope: &Scope, pod: &str, script: &str) -> Result<String> {
    let arguments = ["exec", pod, "--", "sh", "-c", script];
    let output = scope.kubectl().run(&arguments).await?.ok()?;
    Ok(output.text().trim().to_owned())
}

/// A pod with a label `role` that answers on port 8080.
fn build(scope: &Scope, name: &str, role: &str) -> Pod {
    let serve = format!(
        "mkdir -p /tmp/www && echo {name} > /tmp/www/index.html && exec busybox httpd -f -p 8080 -h /tmp/www"
    );
    PodBuilder::new(name)
        .container(container(&scope.cluster, "main", &serve))
        .metadata(|meta| {
            meta.labels = Some(BTreeMap::from([("role".to_owned(), role.to_owned())]));
        })
        .build()
}

/// A pod on each host; by host, name and address.
async fn one_a_host(scope: &Scope, role: &str) -> Result<BTreeMap<String, (String, String)>> {
    let mut by_host = BTreeMap::new();
    for index in 0..8 * scope.cluster.hosts {
        let name = format!("{role}-{index}");
        let pod = scope.ready_pod(&build(scope, &name, role)).await?;
        let status = pod.status.context("status")?;
        let ip = status.pod_ip.context("podIP")?;
        by_host.insert(status.host_ip.context("hostIP")?, (name, ip));
        if by_host.len() == scope.cluster.hosts as usize {
            return Ok(by_host);
        }
    }
    anyhow::bail!("pods came to {} hosts only", by_host.len())
}

async fn policy(scope: &Scope, name: &str, spec: Value) -> Result<()> {
    let object = json!({"metadata": {"name": name}, "spec": spec});
    let policies = scope.api::<NetworkPolicy>();
    let object = serde_json::from_value(object)?;
    policies.create(&PostParams::default(), &object).await?;
    Ok(())
}

/// Waits until a pod reaches an address, or does not any more. A policy is not in force at once.
async fn becomes(scope: &Scope, from: &str, to: &str, reached: bool) -> Result<()> {
    let ask =
        format!(r"printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 2 {to} 8080 2>/dev/null | grep -q 200");
    let until = if reached { "until" } else { "while" };
    let script = format!("{until} {ask}; do sleep 0.2; done; echo done");
    ensure!(shell(scope, from, &script).await? == "done");
    Ok(())
}

#[test]
fn ingress_is_what_policies_allow_and_open_without_any() {
    Scope::run(|scope| async move {
        let servers = one_a_host(&scope, "server").await?;
        let friends = one_a_host(&scope, "friend").await?;
        let strangers = one_a_host(&scope, "stranger").await?;
        let everyone = async |clients: &BTreeMap<String, (String, String)>, reached| {
            for (client, _) in clients.values() {
                for (_, server) in servers.values() {
                    becomes(&scope, client, server, reached).await?;
                }
            }
            anyhow::Ok(())
        };
        everyone(&strangers, true).await?;
        let server = json!({"matchLabels": {"role": "server"}});
        policy(&scope, "deny", json!({"podSelector": server})).await?;
        everyone(&strangers, false).await?;
        everyone(&friends, false).await?;
        let allow = json!({"podSelector": server, "ingress": [{
            "from": [{"podSelector": {"matchLabels": {"role": "friend"}}}],
            "ports": [{"port": 8080}]}]});
        policy(&scope, "allow", allow).await?;
        everyone(&friends, true).await?;
        everyone(&strangers, false).await?;

        // A new pod is under the policies from its start; one that is a friend is let in.
        let late = build(&scope, "late", "friend");
        scope.ready_pod(&late).await?;
        let (_, address) = servers.values().next().context("a server")?;
        becomes(&scope, "late", address, true).await?;

        let gone = DeleteParams::default();
        let policies = scope.api::<NetworkPolicy>();
        for name in ["deny", "allow"] {
            policies.delete(name, &gone).await?;
        }
        everyone(&strangers, true).await
    });
}

#[test]
fn egress_is_what_policies_allow() {
    Scope::run(|scope| async move {
        let servers = one_a_host(&scope, "server").await?;
        let others = one_a_host(&scope, "other").await?;
        scope.ready_pod(&build(&scope, "caged", "caged")).await?;
        let spec = json!({
            "podSelector": {"matchLabels": {"role": "caged"}},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"podSelector": {"matchLabels": {"role": "server"}}}]}],
        });
        policy(&scope, "cage", spec).await?;
        for (_, address) in others.values() {
            becomes(&scope, "caged", address, false).await?;
        }
        for (name, address) in servers.values() {
            becomes(&scope, "caged", address, true).await?;
            // It is free to be called.
            let caged = scope.api::<Pod>().get("caged").await?;
            let own = caged.status.and_then(|status| status.pod_ip);
            becomes(&scope, name, &own.context("podIP")?, true).await?;
        }
        // The block that is allowed has exceptions.
        let (_, except) = servers.values().next().context("a server")?;
        let spec = json!({
            "podSelector": {"matchLabels": {"role": "caged"}},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": [format!("{except}/32")]}}]}],
        });
        policy(&scope, "block", spec).await?;
        scope
            .api::<NetworkPolicy>()
            .delete("cage", &DeleteParams::default())
            .await?;
        becomes(&scope, "caged", except, false).await?;
        for (_, address) in others.values() {
            becomes(&scope, "caged", address, true).await?;
        }
        Ok(())
    });
}

#[test]
fn a_pods_first_packets_are_under_its_policies() {
    Scope::run(|scope| async move {
        let server = scope.ready_pod(&build(&scope, "server", "server")).await?;
        let address = server.status.and_then(|status| status.pod_ip);
        let address = address.context("podIP")?;
        let deny = json!({"podSelector": {}, "policyTypes": ["Egress"]});
        policy(&scope, "deny", deny).await?;
        becomes(&scope, "server", &address, true).await?;
        // It tries from its first moment, and tells if it ever gets through.
        let script = format!(
            "for i in $(seq 20); do nc -w 1 {address} 8080 < /dev/null 2>/dev/null && echo through; done; echo over; exec sleep 1000000"
        );
        let pod = PodBuilder::new("eager").container(container(&scope.cluster, "main", &script));
        scope.ready_pod(&pod.build()).await?;
        let log = scope.kubectl().spawn(&["logs", "-f", "eager"])?;
        let output = tokio::time::timeout(sandman_integration::DEADLINE, async {
            use tokio::io::{AsyncBufReadExt as _, BufReader};
            let mut lines = BufReader::new(log.stdout.context("piped")?).lines();
            let mut seen = Vec::new();
            while let Some(line) = lines.next_line().await? {
                let over = line == "over";
                seen.push(line);
                if over {
                    break;
                }
            }
            anyhow::Ok(seen)
        });
        let seen = output.await??;
        ensure!(seen == ["over"], "{seen:?}");
        Ok(())
    });
}
