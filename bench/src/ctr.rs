//! What a host's containerd says, by its own client.

use std::path::Path;

use anyhow::{Context, ensure};
use tokio::process::Command;

/// containerd's namespace of the sandboxes.
const NAMESPACE: &str = "sandman";

/// Ids of the tasks that run.
pub(crate) async fn running_tasks(program: &Path, socket: &Path) -> anyhow::Result<Vec<String>> {
    let table = run(program, socket, &["tasks", "ls"]).await?;
    Ok(running(&table))
}

/// Kinds of records, how to list them, and lines of the list that are no record.
const RECORDS: [(&str, &[&str], usize); 4] = [
    ("containers", &["containers", "ls", "-q"], 0),
    ("tasks", &["tasks", "ls", "-q"], 0),
    ("leases", &["leases", "ls", "-q"], 0),
    ("snapshots", &["snapshots", "ls"], 1),
];

/// How many records of each kind there are.
pub(crate) async fn records(
    program: &Path,
    socket: &Path,
) -> anyhow::Result<Vec<(&'static str, u64)>> {
    let mut counts = Vec::with_capacity(RECORDS.len());
    for (kind, arguments, heading) in RECORDS {
        let lines = run(program, socket, arguments).await?.lines().count();
        counts.push((kind, lines.saturating_sub(heading) as u64));
    }
    Ok(counts)
}

/// The snapshot of an image that a container's own one lies on.
pub(crate) async fn parent_of_snapshot(
    program: &Path,
    socket: &Path,
    key: &str,
) -> anyhow::Result<String> {
    let text = run(program, socket, &["snapshots", "info", key]).await?;
    let info: serde_json::Value = serde_json::from_str(&text).context("ctr snapshots info")?;
    let parent = info["Parent"].as_str().filter(|parent| !parent.is_empty());
    Ok(parent
        .with_context(|| format!("snapshot {key} has no parent"))?
        .to_owned())
}

async fn run(program: &Path, socket: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .arg("--address")
        .arg(socket)
        .args(["--namespace", NAMESPACE])
        .args(arguments)
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(
        output.status.success(),
        "ctr {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).context("output of ctr")
}

/// Ids of the running ones in the table `TASK PID STATUS`.
fn running(table: &str) -> Vec<String> {
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut columns = line.split_whitespace();
            let id = columns.next()?;
            (columns.nth(1)? == "RUNNING").then(|| id.to_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_tasks_are_read_from_the_table() {
        let table = "TASK    PID    STATUS    \na-main-0    12    RUNNING\nb    0    STOPPED\n\n";
        assert_eq!(running(table), ["a-main-0"]);
    }
}
