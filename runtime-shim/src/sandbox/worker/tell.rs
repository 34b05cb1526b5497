//! Tells the rest of the process, and through it the virtual node, how the sandbox is.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;
use tokio::sync::watch;

use super::Worker;
use crate::sandbox::jobs::About;
use crate::sandbox::live::{Step, Waiting};
use crate::sandbox::plan::members;
use crate::sandbox::report::report;
use crate::sandbox::view::{ContainerView, View};
use crate::spec::sandbox_cgroup;

/// How long a failed pull shows its own reason before the back-off's (the kubelet: until its
/// next sync).
const SHOW_ERROR: SignedDuration = SignedDuration::from_secs(2);

impl Worker {
    /// Turns failed pulls that wait into the kubelet's ImagePullBackOff; when to look next.
    pub(super) fn note_backoff(&mut self, now: Timestamp) -> Option<Timestamp> {
        let mut next = None;
        let mut noted = vec![];
        for (name, live) in &mut self.live.containers {
            let Step::Retry(retry) = &mut live.image else {
                continue;
            };
            if !matches!(
                retry.waiting.reason.as_str(),
                "ErrImagePull" | "RegistryUnavailable"
            ) {
                continue;
            }
            let due = retry.since.saturating_add(SHOW_ERROR).unwrap_or(now);
            if due > now {
                next = Some(next.map_or(due, |next: Timestamp| next.min(due)));
                continue;
            }
            noted.push((name.clone(), std::mem::take(&mut retry.waiting.message)));
        }
        for (name, error) in noted {
            let Some((container, kind)) = self.member(&name) else {
                continue;
            };
            let message = format!("Back-off pulling image {:?}", container.image);
            self.host.event(
                &self.spec,
                About::container(&name, kind),
                "BackOff",
                &message,
            );
            let about = About::trouble(&name, kind);
            self.host
                .event(&self.spec, about, "Failed", "Error: ImagePullBackOff");
            if let Some(Step::Retry(retry)) = self
                .live
                .containers
                .get_mut(&name)
                .map(|live| &mut live.image)
            {
                let message = format!("{message}: {}: {error}", retry.waiting.reason);
                retry.waiting = Waiting {
                    reason: "ImagePullBackOff".to_owned(),
                    message,
                };
            }
        }
        next
    }

    pub(super) fn publish(&self) {
        let report = report(&self.spec, &self.facts, &self.live, Timestamp::now());
        let containers = members(&self.spec)
            .map(|member| {
                let name = &member.spec.name;
                let waiting = report
                    .init_containers
                    .iter()
                    .chain(&report.containers)
                    .find(|c| c.name == *name)
                    .and_then(|c| match &c.state {
                        Some(v1::container_report::State::Waiting(w)) => Some(w.reason.clone()),
                        _ => None,
                    });
                let output = self.outputs.get(name);
                let running = output
                    .map(|output| output.running.subscribe())
                    .unwrap_or_else(|| watch::channel(false).1);
                let process = output
                    .map(|output| output.process.clone())
                    .unwrap_or_default();
                let listeners = output
                    .and_then(|output| output.log.as_ref())
                    .map(|log| log.listeners().clone());
                let attempt = self.facts.attempt(name).cloned();
                (
                    name.clone(),
                    ContainerView {
                        attempt,
                        waiting,
                        running,
                        process,
                        listeners,
                        streams: member.spec.into(),
                    },
                )
            })
            .collect::<BTreeMap<_, _>>();
        let view = View {
            namespace: self.spec.namespace.clone(),
            name: self.spec.name.clone(),
            cgroup: sandbox_cgroup(&self.host.limits.cgroup_parent, &self.spec),
            lifecycle: report.lifecycle(),
            containers,
        };
        *self
            .shared
            .view
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        self.host.board.publish(report);
    }
}
