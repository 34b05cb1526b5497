//! The API server's audit log of the dev cluster: who asked for what. It is written before a
//! request is answered, so what has been answered can be read.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Deserialize;

/// The ServiceAccount with which replicas of the virtual node elect their leader.
const ELECTION_USER: &str = "system:serviceaccount:sandman-system:sandman-vnode";

/// The log.
#[derive(Clone, Debug)]
pub(crate) struct AuditLog(PathBuf);

/// A place in the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(u64);

/// A line of the log, as far as it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Event {
    #[serde(rename = "auditID")]
    audit_id: String,
    stage: String,
    verb: String,
    user: User,
    object_ref: Object,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct User {
    username: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Object {
    resource: String,
    subresource: String,
    name: String,
}

/// What one node asked of the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Requests {
    /// Requests by the node itself.
    pub(crate) all: usize,
    /// Of these, what is not about the node: neither its Lease nor its Node object.
    pub(crate) for_pods: usize,
    /// Status writes by pod.
    pub(crate) status_writes: BTreeMap<String, usize>,
    /// Requests by replicas about who leads.
    pub(crate) election: usize,
}

impl AuditLog {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The end of the log as it is now.
    pub(crate) fn mark(&self) -> anyhow::Result<Mark> {
        match std::fs::metadata(&self.0) {
            Ok(meta) => Ok(Mark(meta.len())),
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "the API server writes no {}: the cluster is older than this bench; run \
                 `hack/dev down`",
                self.0.display()
            ),
            Err(error) => Err(error).with_context(|| self.0.display().to_string()),
        }
    }

    /// What a node asked for since.
    pub(crate) fn since(&self, mark: Mark, node: &str) -> anyhow::Result<Requests> {
        Ok(count(&read(&self.0, mark)?, node))
    }
}

fn read(path: &Path, Mark(offset): Mark) -> anyhow::Result<String> {
    let mut file = std::fs::File::open(path)?;
    if file.metadata()?.len() < offset {
        bail!(
            "{} was rotated meanwhile; measure fewer pods at once",
            path.display()
        );
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text)
}

/// Counts each request once, and a watch when it begins: one that ends now was asked for earlier.
fn count(log: &str, node: &str) -> Requests {
    let user = format!("system:node:{node}");
    let mut seen = std::collections::BTreeSet::new();
    let mut requests = Requests::default();
    // The last line may not be whole yet; then it does not parse.
    let events = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Event>(line).ok());
    for event in events {
        let ours = event.user.username == user;
        let election = event.user.username == ELECTION_USER;
        let ends = event.verb == "watch" && event.stage != "ResponseStarted";
        if !(ours || election) || ends || !seen.insert(event.audit_id.clone()) {
            continue;
        }
        if election {
            requests.election += 1;
            continue;
        }
        requests.all += 1;
        let object = event.object_ref;
        if !matches!(object.resource.as_str(), "leases" | "nodes") {
            requests.for_pods += 1;
        }
        if object.resource == "pods"
            && object.subresource == "status"
            && matches!(event.verb.as_str(), "patch" | "update")
        {
            *requests.status_writes.entry(object.name).or_default() += 1;
        }
    }
    requests
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(id: &str, user: &str, verb: &str, resource: &str, subresource: &str) -> String {
        line_at("ResponseComplete", id, user, verb, resource, subresource)
    }

    fn line_at(
        stage: &str,
        id: &str,
        user: &str,
        verb: &str,
        resource: &str,
        subresource: &str,
    ) -> String {
        let event = json!({
            "kind": "Event", "level": "Metadata", "auditID": id, "stage": stage,
            "verb": verb, "user": {"username": user, "groups": ["system:nodes"]},
            "objectRef": {"resource": resource, "subresource": subresource, "name": "a"},
        });
        format!("{event}\n")
    }

    #[test]
    fn a_request_counts_once_and_for_whom_made_it() {
        let node = "system:node:sandman";
        let log = [
            line_at("ResponseStarted", "1", node, "watch", "pods", ""),
            line("1", node, "watch", "pods", ""),
            // It began before.
            line("8", node, "watch", "nodes", ""),
            line("2", node, "update", "leases", ""),
            line("3", node, "patch", "pods", "status"),
            line("4", node, "get", "pods", "status"),
            line("5", "system:node:peer-0", "patch", "pods", "status"),
            line("6", ELECTION_USER, "update", "leases", ""),
            "{\"auditID\": \"7\", \"verb\"".to_owned(),
        ]
        .concat();
        let requests = count(&log, "sandman");
        assert_eq!(
            requests,
            Requests {
                all: 4,
                for_pods: 3,
                status_writes: [("a".to_owned(), 1)].into(),
                election: 1,
            }
        );
    }

    #[test]
    fn only_what_came_after_the_mark_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let log = AuditLog::new(&path);
        assert!(
            log.mark()
                .unwrap_err()
                .to_string()
                .contains("hack/dev down")
        );
        let first = line("1", "system:node:a", "get", "nodes", "");
        std::fs::write(&path, &first).unwrap();
        let mark = log.mark().unwrap();
        let second = line("2", "system:node:a", "get", "nodes", "");
        std::fs::write(&path, format!("{first}{second}")).unwrap();
        assert_eq!(log.since(mark, "a").unwrap().all, 1);
        std::fs::write(&path, "").unwrap();
        assert!(log.since(mark, "a").is_err());
    }
}
