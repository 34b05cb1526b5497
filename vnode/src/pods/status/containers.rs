//! Container statuses (`convertToAPIContainerStatuses` of the kubelet), from
//! reports that are not trusted: texts are cut, times are whole seconds,
//! restart counts never go back.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, ContainerUser, LinuxContainerUser, PodSpec, PodStatus,
    VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use sandman_protocol::v1;
use sandman_protocol::v1::container_report::State;

use super::Observation;
use super::sizes::sized;
use crate::pods::ephemeral;
use crate::pods::resources::is_sidecar;
use crate::pods::spec::recursive_read_only;

/// Termination messages of all containers of a pod together, in bytes
/// (`MaxPodTerminationMessageLogLength`).
const MESSAGE_BUDGET: usize = 12 << 10;
/// Longest reason, image name and id of a report, in bytes.
const MAX_NAME: usize = 1024;
/// Most groups of a report; Linux has 65,536, and nobody means that.
const MAX_GROUPS: usize = 256;

/// Fills in the statuses of all containers.
pub(super) fn fill(new: &mut PodStatus, spec: &PodSpec, old: &PodStatus, seen: Observation<'_>) {
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let waiting = if init.is_empty() {
        "ContainerCreating"
    } else {
        "PodInitializing"
    };
    let message_limit = MESSAGE_BUDGET / (init.len() + spec.containers.len()).max(1);
    let context = Context {
        seen,
        default_waiting: waiting,
        message_limit,
    };
    let reports = |f: fn(&v1::SandboxReport) -> &Vec<v1::ContainerReport>| {
        let list = seen.report.map(f).map(Vec::as_slice).unwrap_or_default();
        list.iter()
            .map(|report| (report.name.as_str(), report))
            .collect::<BTreeMap<_, _>>()
    };
    let old_init = old.init_container_statuses.as_deref().unwrap_or_default();
    let old_regular = old.container_statuses.as_deref().unwrap_or_default();
    let init_reports = reports(|report| &report.init_containers);
    let statuses: Vec<_> = init
        .iter()
        .map(|c| {
            context.status(
                c,
                !is_sidecar(c),
                init_reports.get(c.name.as_str()),
                old_init,
            )
        })
        .collect();
    let initialized = statuses.iter().zip(init).all(|(status, container)| {
        if is_sidecar(container) {
            status.started == Some(true)
        } else {
            status.ready
        }
    });
    new.init_container_statuses = (!statuses.is_empty()).then_some(statuses);
    let regular_reports = reports(|report| &report.containers);
    let mut statuses: Vec<_> = spec
        .containers
        .iter()
        .map(|c| context.status(c, false, regular_reports.get(c.name.as_str()), old_regular))
        .collect();
    if seen.ended {
        // What never started because initialisation failed stays as it is.
        if initialized {
            statuses.iter_mut().for_each(end);
        }
        new.init_container_statuses
            .iter_mut()
            .flatten()
            .filter(|status| was_started(status))
            .for_each(end);
    }
    statuses.sort_by(|a, b| a.name.cmp(&b.name));
    new.container_statuses = Some(statuses);
    let old_ephemeral = old
        .ephemeral_container_statuses
        .as_deref()
        .unwrap_or_default();
    let ephemeral_reports = reports(|report| &report.ephemeral_containers);
    let mut statuses: Vec<_> = ephemeral::containers(spec)
        .map(|(_, c)| {
            let report = ephemeral_reports.get(c.name.as_str());
            let mut status = context.status(&c, false, report, old_ephemeral);
            // Nobody waits for one, and nobody is served by it (`convertStatusToAPIStatus`).
            status.ready = false;
            status.started = None;
            status
        })
        .collect();
    if seen.ended {
        statuses
            .iter_mut()
            .filter(|status| was_started(status))
            .for_each(|status| {
                end(status);
                status.started = None;
            });
    }
    new.ephemeral_container_statuses = (!statuses.is_empty()).then_some(statuses);
}

struct Context<'a> {
    seen: Observation<'a>,
    default_waiting: &'static str,
    message_limit: usize,
}

impl Context<'_> {
    /// The status of one container. `runs_to_end` is true for init containers
    /// that others wait for.
    fn status(
        &self,
        container: &Container,
        runs_to_end: bool,
        report: Option<&&v1::ContainerReport>,
        old: &[ContainerStatus],
    ) -> ContainerStatus {
        let old = old.iter().find(|status| status.name == container.name);
        match (report, old) {
            (Some(report), _) => self.reported(container, runs_to_end, report, old),
            // The host is silent, or has not got that far: the last status is
            // the best knowledge, if there is one.
            (None, Some(old)) if was_started(old) => old.clone(),
            (None, _) => self.unstarted(container),
        }
    }

    fn reported(
        &self,
        container: &Container,
        runs_to_end: bool,
        report: &v1::ContainerReport,
        old: Option<&ContainerStatus>,
    ) -> ContainerStatus {
        let state = match &report.state {
            Some(State::Running(running)) => ContainerState {
                running: Some(ContainerStateRunning {
                    started_at: time(running.started_at),
                }),
                ..ContainerState::default()
            },
            Some(State::Terminated(terminated)) => self.terminated(terminated),
            Some(State::Waiting(waiting)) => self.waiting(&waiting.reason, &waiting.message),
            None => self.waiting("", ""),
        };
        let ready = match &report.state {
            Some(State::Terminated(t)) => runs_to_end && t.exit_code == 0,
            Some(State::Running(_)) => !runs_to_end && report.ready,
            _ => false,
        };
        let wish = container.resources.as_ref();
        let last = old.and_then(|old| old.resources.as_ref());
        let last_state = report.last_termination.as_ref().map(|t| self.terminated(t));
        ContainerStatus {
            name: container.name.clone(),
            image: non_empty(
                &report.image,
                container.image.as_deref().unwrap_or_default(),
            ),
            image_id: clipped(&report.image_id, MAX_NAME),
            container_id: text(&report.container_id, MAX_NAME),
            restart_count: restart_count(report, old),
            ready,
            started: Some(report.started && state.running.is_some()),
            state: Some(state),
            last_state: last_state.or_else(|| old.and_then(|old| old.last_state.clone())),
            resources: sized(report.resources.or(report.allocated), wish, last),
            allocated_resources: sized(report.allocated, wish, last)
                .and_then(|allocated| allocated.requests),
            volume_mounts: mounts(container),
            user: report.user.as_ref().map(user),
            ..ContainerStatus::default()
        }
    }

    /// A container that the host knows nothing of.
    fn unstarted(&self, container: &Container) -> ContainerStatus {
        let report = self.seen.report;
        let (reason, message) = match self.seen.waiting {
            Some(waiting)
                if waiting
                    .container
                    .as_ref()
                    .is_none_or(|name| *name == container.name) =>
            {
                (waiting.reason, waiting.message.as_str())
            }
            _ => report.map_or(("", ""), |r| (&r.waiting_reason, &r.waiting_message)),
        };
        ContainerStatus {
            name: container.name.clone(),
            image: container.image.clone().unwrap_or_default(),
            started: Some(false),
            state: Some(self.waiting(reason, message)),
            ..ContainerStatus::default()
        }
    }

    fn waiting(&self, reason: &str, message: &str) -> ContainerState {
        ContainerState {
            waiting: Some(ContainerStateWaiting {
                reason: Some(non_empty(reason, self.default_waiting)),
                message: text(message, MAX_NAME),
            }),
            ..ContainerState::default()
        }
    }

    fn terminated(&self, terminated: &v1::Terminated) -> ContainerState {
        ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: terminated.exit_code,
                signal: (terminated.signal != 0).then_some(terminated.signal),
                reason: text(&terminated.reason, MAX_NAME),
                message: text(&terminated.message, self.message_limit),
                started_at: time(terminated.started_at),
                finished_at: time(terminated.finished_at),
                container_id: text(&terminated.container_id, MAX_NAME),
            }),
            ..ContainerState::default()
        }
    }
}

/// Counts on where the API server's copy stands: a host that lost its record
/// starts from zero.
fn restart_count(report: &v1::ContainerReport, old: Option<&ContainerStatus>) -> i32 {
    let reported = i32::try_from(report.restart_count).unwrap_or(i32::MAX);
    let Some(old) = old.filter(|old| old.restart_count > reported || was_started(old)) else {
        return reported;
    };
    let same = old.container_id.as_deref().unwrap_or_default() == report.container_id;
    if reported > old.restart_count || same || report.container_id.is_empty() {
        reported.max(old.restart_count)
    } else {
        old.restart_count.saturating_add(1)
    }
}

/// Whether a container has ever run.
fn was_started(status: &ContainerStatus) -> bool {
    let ran = |state: &ContainerState| state.running.is_some() || state.terminated.is_some();
    status.container_id.is_some()
        || status.state.as_ref().is_some_and(ran)
        || status.last_state.as_ref().is_some_and(ran)
}

/// A container of a pod that is over. If nobody knows how it ended, it counts
/// as failed; an init container that did its work stays ready.
fn end(status: &mut ContainerStatus) {
    let state = status.state.get_or_insert_default();
    status.started = Some(false);
    if state.terminated.is_none() {
        status.ready = false;
        *state = ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: 137,
                reason: Some("ContainerStatusUnknown".to_owned()),
                message: Some(
                    "The container could not be located when the pod was terminated".to_owned(),
                ),
                ..ContainerStateTerminated::default()
            }),
            ..ContainerState::default()
        };
    }
}

fn mounts(container: &Container) -> Option<Vec<VolumeMountStatus>> {
    let mounts = container.volume_mounts.as_ref()?;
    let status = mounts.iter().map(|mount| VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: mount.read_only.filter(|read_only| *read_only),
        recursive_read_only: (mount.read_only == Some(true)).then(|| {
            let recursive = recursive_read_only(mount);
            if recursive { "Enabled" } else { "Disabled" }.to_owned()
        }),
        ..VolumeMountStatus::default()
    });
    Some(status.collect())
}

fn user(user: &v1::LinuxUser) -> ContainerUser {
    let mut groups: Vec<i64> = user
        .supplemental_groups
        .iter()
        .copied()
        .map(i64::from)
        .collect();
    groups.truncate(MAX_GROUPS);
    // The runtime lists the main group among them (containerd's `toCRIContainerUser`).
    if !groups.contains(&i64::from(user.gid)) {
        groups.insert(0, i64::from(user.gid));
    }
    ContainerUser {
        linux: Some(LinuxContainerUser {
            uid: i64::from(user.uid),
            gid: i64::from(user.gid),
            supplemental_groups: Some(groups),
        }),
    }
}

/// Whole seconds, as the API server keeps them.
fn time(at: Option<prost_types::Timestamp>) -> Option<Time> {
    Timestamp::from_second(at?.seconds).ok().map(Time)
}

fn text(text: &str, limit: usize) -> Option<String> {
    (!text.is_empty()).then(|| clipped(text, limit))
}

fn non_empty(text: &str, default: &str) -> String {
    clipped(if text.is_empty() { default } else { text }, MAX_NAME)
}

/// The text up to `limit` bytes, cut between characters.
pub(super) fn clipped(text: &str, limit: usize) -> String {
    text[..text.floor_char_boundary(limit)].to_owned()
}
