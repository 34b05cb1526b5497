//! What runs, for people and for programs.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::ListParams;
use serde::Serialize;

use crate::components::Plan;
use crate::layout::Layout;
use crate::settings::Settings;
use crate::supervise::{Supervisor, resident_bytes};
use crate::{kube_api, pki};

/// An API server that does not answer is no reason to wait.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// One component as seen now.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    component: String,
    /// `running`, `dead` (it was started and is gone) or `stopped` (never started).
    state: &'static str,
    pid: Option<u32>,
    namespace: Option<String>,
    address: Option<String>,
    resident_bytes: Option<u64>,
}

/// Prints the components and the nodes. False unless all run and a node is Ready.
pub(crate) async fn print(layout: &Layout, json: bool) -> anyhow::Result<bool> {
    let Some(settings) = Settings::load(layout)? else {
        println!("{}", if json { "{}" } else { "no cluster" });
        return Ok(false);
    };
    let pki = pki::control_plane(layout)?;
    let rows = rows(
        layout,
        &Plan {
            layout,
            settings: &settings,
            pki: &pki,
        },
    )?;
    let nodes = tokio::time::timeout(ANSWER_WITHIN, nodes(layout)).await;
    let nodes = nodes.unwrap_or_else(|_| Ok(Vec::new())).unwrap_or_default();
    if json {
        let nodes: Vec<_> = nodes
            .iter()
            .map(|(name, ready)| serde_json::json!({"name": name, "ready": ready}))
            .collect();
        let all = serde_json::json!({"id": layout.id(), "components": rows, "nodes": nodes});
        println!("{all:#}");
    } else {
        print!("{}", table(&rows));
        for (name, ready) in &nodes {
            println!("node {name}: {}", if *ready { "Ready" } else { "NotReady" });
        }
    }
    let node_needed = settings.hosts > 0;
    Ok(rows.iter().all(|row| row.state == "running")
        && (!node_needed || nodes.iter().any(|(_, ready)| *ready)))
}

fn rows(layout: &Layout, plan: &Plan<'_>) -> anyhow::Result<Vec<Row>> {
    let supervisor = Supervisor::new(layout.clone());
    let row = |component: crate::components::Component| {
        let record = supervisor.record(&component.name);
        let pid = supervisor
            .running(&component.name)
            .map(|record| record.identity.pid());
        Row {
            state: match (pid, record) {
                (Some(_), _) => "running",
                (None, Some(_)) => "dead",
                (None, None) => "stopped",
            },
            pid,
            namespace: component.member.map(|member| layout.netns_name(member)),
            address: component
                .member
                .and_then(|member| member.address())
                .map(|address| address.to_string()),
            resident_bytes: pid.and_then(resident_bytes),
            component: component.name,
        }
    };
    Ok(plan.components()?.into_iter().map(row).collect())
}

async fn nodes(layout: &Layout) -> anyhow::Result<Vec<(String, bool)>> {
    let client = kube_api::client(&pki::admin_kubeconfig_path(layout)).await?;
    let nodes = Api::<Node>::all(client)
        .list(&ListParams::default())
        .await?;
    Ok(nodes
        .into_iter()
        .map(|node| {
            let ready = kube_api::is_ready(&node);
            (node.metadata.name.unwrap_or_default(), ready)
        })
        .collect())
}

fn table(rows: &[Row]) -> String {
    let dash = || "-".to_owned();
    let mut lines =
        vec![["COMPONENT", "STATE", "PID", "NAMESPACE", "ADDRESS", "RSS"].map(str::to_owned)];
    for row in rows {
        lines.push([
            row.component.clone(),
            row.state.to_owned(),
            row.pid.map_or_else(dash, |pid| pid.to_string()),
            row.namespace.clone().unwrap_or_else(dash),
            row.address.clone().unwrap_or_else(dash),
            row.resident_bytes
                .map_or_else(dash, |bytes| format!("{} MiB", bytes >> 20)),
        ]);
    }
    let width = |column: usize| {
        lines
            .iter()
            .map(|line| line[column].len())
            .max()
            .unwrap_or_default()
    };
    let widths: Vec<_> = (0..6).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<_> = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let row = |name: &str, pid| Row {
            component: name.into(),
            state: "running",
            pid: Some(pid),
            namespace: None,
            address: Some("10.0.0.1".into()),
            resident_bytes: Some(5 << 20),
        };
        let text = table(&[row("a", 1), row("longer-name", 100_000)]);
        let columns: Vec<_> = text.lines().map(|line| line.find("10.0.0.1")).collect();
        assert_eq!(columns[1], columns[2]);
        assert!(text.lines().all(|line| !line.ends_with(' ')));
    }
}
