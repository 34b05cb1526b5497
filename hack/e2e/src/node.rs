//! The node that is judged. The tests' pods tolerate no taint and the tests want all nodes
//! schedulable but those whose taints they are told of, so for the time of a run the judged node
//! is the only one without its taint.

use anyhow::Context;
use serde::Deserialize;

use crate::dev::{Dev, Variables};

/// Longest time that a node takes to become Ready.
const READY_WITHIN: &str = "120s";

/// A node of the dev cluster.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// As it is called in reports.
    pub(crate) label: &'static str,
    name: String,
    /// Keeps ordinary pods away: key, value and effect.
    taint: [&'static str; 3],
    /// What to start and stop around a run, unless `hack/dev up` does.
    component: Option<&'static str>,
}

#[derive(Debug, Deserialize)]
struct Object {
    spec: Spec,
}

#[derive(Debug, Deserialize)]
struct Spec {
    #[serde(default)]
    taints: Vec<Taint>,
}

#[derive(Debug, Deserialize)]
struct Taint {
    key: String,
}

impl Node {
    /// Ours.
    pub(crate) fn virtual_node(variables: &Variables) -> anyhow::Result<Self> {
        Ok(Self {
            label: "sandman",
            name: variables.get("SANDMAN_NODE")?.to_owned(),
            taint: ["virtual-kubelet.io/provider", "sandman", "NoSchedule"],
            component: None,
        })
    }

    /// A real kubelet.
    pub(crate) fn kubelet() -> Self {
        Self {
            label: "kubelet",
            name: "peer-0".to_owned(),
            taint: ["sandman.dev/peer", "kubelet", "NoSchedule"],
            component: Some("kubelet-peer"),
        }
    }

    /// Key of the taint, for runs on other nodes.
    pub(crate) fn taint_key(&self) -> &'static str {
        self.taint[0]
    }

    /// Lets ordinary pods in.
    pub(crate) async fn open(&self, dev: &Dev) -> anyhow::Result<()> {
        if let Some(component) = self.component {
            dev.run(&["start", component]).await?;
        }
        let node = format!("node/{}", self.name);
        let timeout = format!("--timeout={READY_WITHIN}");
        // A node that is about to register is not there yet.
        for condition in ["create", "condition=Ready"] {
            let condition = format!("--for={condition}");
            dev.run(&["kubectl", "wait", &condition, &node, &timeout])
                .await?;
        }
        let text = dev.run(&["kubectl", "get", &node, "-o", "json"]).await?;
        let object: Object = serde_json::from_str(&text).context("kubectl prints no JSON")?;
        let [key, _, effect] = self.taint;
        if object.spec.taints.iter().any(|taint| taint.key == key) {
            let taint = format!("{key}:{effect}-");
            dev.run(&["kubectl", "taint", "nodes", &self.name, &taint])
                .await?;
        }
        Ok(())
    }

    /// Keeps ordinary pods away again. A node that `open` has started is gone afterwards.
    pub(crate) async fn close(&self, dev: &Dev) -> anyhow::Result<()> {
        if let Some(component) = self.component {
            dev.run(&["stop", component]).await?;
            // One that is not ready would keep the next run from starting.
            dev.run(&[
                "kubectl",
                "delete",
                "node",
                &self.name,
                "--ignore-not-found",
            ])
            .await?;
            return Ok(());
        }
        let [key, value, effect] = self.taint;
        let taint = format!("{key}={value}:{effect}");
        dev.run(&[
            "kubectl",
            "taint",
            "nodes",
            &self.name,
            &taint,
            "--overwrite",
        ])
        .await?;
        Ok(())
    }
}
