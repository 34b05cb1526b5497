//! What a sandbox has gone through, written down so that it outlives this process.
//!
//! Facts are only ever added from observation. What can be asked of containerd or the kernel at
//! any time is not kept here, and neither is any secret.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use jiff::Timestamp;
use sandman_protocol::v1;
use serde::{Deserialize, Serialize};

use super::backoff::Backoff;
use super::identity::{Identity, Kind};
use super::resize::{Pending, Size};
use crate::spec::resources::PodLimits;
use crate::users::UserRange;

/// The durable part of a sandbox's state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// When the network was there for the first time.
    pub started_at: Option<Timestamp>,
    /// Address of the sandbox.
    pub pod_ip: Option<IpAddr>,
    /// Host paths of its volumes and managed files, once they are complete.
    pub volumes: Option<VolumePaths>,
    /// Set when the sandbox is to be removed.
    pub removal: Option<Removal>,
    /// Set when the host itself ended the sandbox.
    pub ended: Option<Ended>,
    /// The ids of its user namespace.
    pub users: Option<UserRange>,
    /// What its cgroup is set to.
    pub bounds: Option<PodLimits>,
    /// A resize that was asked for and is not given.
    pub pending: Option<Pending>,
    /// Nothing is left of it but this record.
    pub removed: bool,
    /// By container name, init containers included.
    pub containers: BTreeMap<String, ContainerFacts>,
}

/// Where the sandbox's files are on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumePaths {
    /// By volume name.
    pub volumes: BTreeMap<String, PathBuf>,
    /// For `/etc/hosts`.
    pub hosts: PathBuf,
    /// For `/etc/hostname`.
    pub hostname: PathBuf,
    /// For `/etc/resolv.conf`.
    pub resolv_conf: PathBuf,
}

/// A wish to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// When processes that still run are killed. Only ever moves closer.
    pub deadline: Timestamp,
    /// Who asked.
    pub reason: String,
}

/// An end that the host decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// For example DeadlineExceeded.
    pub reason: String,
    /// For people.
    pub message: String,
    /// When processes that still run are killed.
    pub deadline: Timestamp,
}

/// The history of one container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerFacts {
    /// The newest attempt.
    pub current: Option<Attempt>,
    /// How the attempt before it ended.
    pub last: Option<Termination>,
    /// Delay of restarts.
    pub crash: Backoff,
}

/// One run of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// Counts from 0.
    pub number: u32,
    /// containerd id.
    pub id: String,
    /// Image as the pod named it.
    pub image: String,
    /// Digest reference of the image.
    pub image_id: String,
    /// See [`super::identity::spec_hash`].
    pub spec_hash: String,
    /// Signal that asks the process to end.
    pub stop_signal: u32,
    /// It was asked to end only so that one with another image takes its place, which then happens
    /// whatever the restart policy (kuberuntime `computePodActions`).
    #[serde(default)]
    pub replaced: bool,
    /// What its hook and probes have shown.
    #[serde(default)]
    pub health: Health,
    /// Set when it must end although its sandbox goes on.
    #[serde(default)]
    pub doom: Option<Doom>,
    /// The size that its process has; unknown of one that an older version started.
    #[serde(default)]
    pub size: Option<Size>,
    /// Whom its first process runs as.
    #[serde(default)]
    pub user: Option<User>,
    /// How far it is.
    pub phase: Phase,
}

/// What the hook and the probes of an attempt have shown so far. On record, so that a container
/// that was ready stays so while this process is replaced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    /// Its postStart hook is over.
    pub hooked: bool,
    /// Its startup probe has succeeded.
    pub started: bool,
    /// What its readiness probe says.
    pub ready: bool,
}

/// Identity of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Further groups, as the spec lists them.
    pub groups: Vec<u32>,
}

/// Why one container must end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doom {
    /// Since when.
    pub since: Timestamp,
    /// For the Killing event.
    pub message: String,
    /// Instead of the sandbox's own grace period.
    pub grace_seconds: Option<u32>,
}

/// How far an attempt is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// The process runs.
    Running {
        /// Since when.
        since: Timestamp,
    },
    /// The process has ended; its last words are not collected yet. Written before the runtime
    /// forgets the exit, so that it is never lost.
    Exited {
        /// When it started.
        since: Timestamp,
        /// Exit code.
        code: i32,
        /// When it ended.
        at: Timestamp,
        /// Nobody saw the end; code and time are assumed.
        lost: bool,
    },
    /// All is known.
    Ended(Termination),
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Termination {
    /// Exit code; 128+n for signal n.
    pub exit_code: i32,
    /// Completed, Error, OOMKilled, StartError, ContainerStatusUnknown.
    pub reason: String,
    /// The container's last words, or why it did not start.
    pub message: String,
    /// When the process started, if it did.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Timestamp,
    /// containerd id of the attempt.
    pub container_id: String,
}

/// Exit code of a container whose end nobody saw (kubelet_pods.go).
pub const UNKNOWN_EXIT_CODE: i32 = 137;
/// Exit code of a container whose process never started (containerd's CRI plugin).
pub const START_ERROR_EXIT_CODE: i32 = 128;

impl Facts {
    /// A container's newest attempt.
    #[must_use]
    pub fn attempt(&self, container: &str) -> Option<&Attempt> {
        self.containers.get(container)?.current.as_ref()
    }

    /// Whether any container's process may exist.
    #[must_use]
    pub fn any_running(&self) -> bool {
        self.containers
            .values()
            .any(|c| c.current.as_ref().is_some_and(Attempt::is_live))
    }
}

impl Attempt {
    /// A started attempt.
    #[must_use]
    pub fn running(identity: &Identity, since: Timestamp) -> Self {
        Self {
            number: identity.attempt,
            id: identity.container_id(),
            image: identity.image.clone(),
            image_id: identity.image_id.clone(),
            spec_hash: identity.spec_hash.clone(),
            stop_signal: identity.stop_signal,
            replaced: false,
            health: Health::default(),
            doom: None,
            size: None,
            user: None,
            phase: Phase::Running { since },
        }
    }

    /// Whether its process runs, as far as is known.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// Whether it counts as what the container is: it is not over, or makes room for the next.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.is_live() || self.replaced
    }

    /// Whether it is not over: running, or ended but not collected.
    #[must_use]
    pub fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ended(_))
    }

    /// Whether its hook and its startup probe let the pod go on, as far as it runs at all.
    #[must_use]
    pub fn is_started(&self, container: &v1::Container) -> bool {
        (container.post_start.is_none() || self.health.hooked)
            && (container.startup_probe.is_none() || self.health.started)
    }

    /// Whether it serves, as far as it runs at all.
    #[must_use]
    pub fn is_ready(&self, container: &v1::Container) -> bool {
        self.is_started(container) && (container.readiness_probe.is_none() || self.health.ready)
    }

    /// Whether it has ended and another attempt follows it.
    #[must_use]
    pub fn is_followed(
        &self,
        policy: v1::RestartPolicy,
        kind: Kind,
        container: &v1::Container,
    ) -> bool {
        self.termination()
            .is_some_and(|end| self.replaced || restarts(policy, kind, container, end.exit_code))
    }

    /// How it ended, when all is known.
    #[must_use]
    pub fn termination(&self) -> Option<&Termination> {
        match &self.phase {
            Phase::Ended(termination) => Some(termination),
            Phase::Running { .. } | Phase::Exited { .. } => None,
        }
    }
}

impl ContainerFacts {
    /// Number of the attempt that comes next.
    #[must_use]
    pub fn next_attempt(&self) -> u32 {
        self.current
            .as_ref()
            .map_or(0, |attempt| attempt.number.saturating_add(1))
    }

    /// When the attempt after one that ended so may begin.
    #[must_use]
    pub fn due(&self, end: &Termination) -> Timestamp {
        if self.is_replaced() {
            return end.finished_at;
        }
        self.crash.due(end.finished_at)
    }

    /// Whether the newest attempt ends, or ended, to make room for another image.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.current
            .as_ref()
            .is_some_and(|attempt| attempt.replaced)
    }

    /// Puts a new attempt in the place of the ended one, whose end it makes the next wait
    /// longer for. Another image has not crashed yet.
    pub fn begin(&mut self, attempt: Attempt, now: Timestamp) {
        if let Some(old) = self.current.replace(attempt)
            && let Phase::Ended(termination) = old.phase
        {
            if old.replaced {
                self.crash = Backoff::default();
            } else {
                self.crash.advance(termination.finished_at, now);
            }
            self.last = Some(termination);
        }
    }
}

/// Whether a container that ended runs again (`ContainerShouldRestart` of pkg/api/v1/pod). Its own
/// rules come first, then its own policy, then the sandbox's.
#[must_use]
pub fn restarts(
    policy: v1::RestartPolicy,
    kind: Kind,
    container: &v1::Container,
    exit_code: i32,
) -> bool {
    if kind == Kind::Ephemeral {
        return false;
    }
    if container.sidecar
        || container
            .restart_rules
            .iter()
            .any(|rule| matches(rule, exit_code))
    {
        return true;
    }
    let policy = match container.restart_policy() {
        v1::RestartPolicy::Unspecified => policy,
        own => own,
    };
    let failed = exit_code != 0;
    match policy {
        v1::RestartPolicy::Never => false,
        v1::RestartPolicy::OnFailure => failed,
        // An init container that succeeded is done, whatever the policy.
        v1::RestartPolicy::Always | v1::RestartPolicy::Unspecified => {
            kind == Kind::Regular || failed
        }
    }
}

fn matches(rule: &v1::RestartRule, exit_code: i32) -> bool {
    rule.exit_codes.contains(&exit_code) != rule.not_in
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(exit_code: i32) -> Termination {
        Termination {
            exit_code,
            reason: String::new(),
            message: String::new(),
            started_at: None,
            finished_at: Timestamp::UNIX_EPOCH,
            container_id: String::new(),
        }
    }

    #[test]
    fn restart_policies() {
        use Kind::{Ephemeral, Init, Regular};
        use v1::RestartPolicy::{Always, Never, OnFailure};
        for (policy, kind, sidecar, code, expected) in [
            (Always, Regular, false, 0, true),
            (Always, Init, false, 0, false),
            (Always, Init, false, 1, true),
            (OnFailure, Regular, false, 0, false),
            (OnFailure, Regular, false, 1, true),
            (Never, Regular, false, 1, false),
            (Never, Init, false, 1, false),
            (Never, Init, true, 0, true),
            (Always, Ephemeral, false, 1, false),
        ] {
            let container = v1::Container {
                sidecar,
                ..Default::default()
            };
            assert_eq!(
                restarts(policy, kind, &container, code),
                expected,
                "{policy:?} {kind:?} {sidecar} {code}"
            );
        }
    }

    #[test]
    fn a_containers_own_rules_and_policy_come_first() {
        use v1::RestartPolicy::{Always, Never, OnFailure, Unspecified};
        let rule = |codes: &[i32], not_in| v1::RestartRule {
            exit_codes: codes.to_vec(),
            not_in,
        };
        for (own, rules, pod, code, expected) in [
            (Never, vec![rule(&[42], false)], Always, 42, true),
            (Never, vec![rule(&[42], false)], Always, 1, false),
            (Never, vec![rule(&[42], true)], Always, 1, true),
            (Always, vec![], Never, 0, true),
            (OnFailure, vec![], Never, 1, true),
            (OnFailure, vec![], Always, 0, false),
            (Unspecified, vec![], Never, 1, false),
        ] {
            let container = v1::Container {
                restart_policy: own as i32,
                restart_rules: rules,
                ..Default::default()
            };
            assert_eq!(
                restarts(pod, Kind::Regular, &container, code),
                expected,
                "{container:?} {code}"
            );
        }
    }

    #[test]
    fn a_new_attempt_keeps_how_the_old_one_ended() {
        let attempt = |number, phase| Attempt {
            number,
            id: String::new(),
            image: String::new(),
            image_id: String::new(),
            spec_hash: String::new(),
            stop_signal: 15,
            replaced: false,
            health: Health::default(),
            doom: None,
            size: None,
            user: None,
            phase,
        };
        let mut facts = ContainerFacts::default();
        assert_eq!(facts.next_attempt(), 0);
        facts.begin(attempt(0, Phase::Ended(ended(3))), Timestamp::UNIX_EPOCH);
        assert_eq!(facts.next_attempt(), 1);
        facts.begin(
            attempt(
                1,
                Phase::Running {
                    since: Timestamp::UNIX_EPOCH,
                },
            ),
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(facts.crash.delay(Timestamp::UNIX_EPOCH).as_secs(), 10);
        assert_eq!(facts.last, Some(ended(3)));
    }

    #[test]
    fn a_replaced_attempt_is_followed_at_once() {
        let mut attempt = Attempt {
            number: 0,
            id: String::new(),
            image: String::new(),
            image_id: String::new(),
            spec_hash: String::new(),
            stop_signal: 15,
            replaced: false,
            health: Health::default(),
            doom: None,
            size: None,
            user: None,
            phase: Phase::Ended(ended(143)),
        };
        let container = v1::Container::default();
        let followed = |attempt: &Attempt| {
            attempt.is_followed(v1::RestartPolicy::Never, Kind::Regular, &container)
        };
        assert!(!followed(&attempt));
        attempt.replaced = true;
        assert!(followed(&attempt));
        let mut facts = ContainerFacts::default();
        facts
            .crash
            .advance(Timestamp::UNIX_EPOCH, Timestamp::UNIX_EPOCH);
        facts.current = Some(attempt.clone());
        assert_eq!(facts.due(&ended(143)), Timestamp::UNIX_EPOCH);
        attempt.replaced = false;
        facts.begin(attempt, Timestamp::UNIX_EPOCH);
        assert_eq!(facts.crash, Backoff::default());
    }

    #[test]
    fn facts_round_trip_as_json() {
        let mut facts = Facts::default();
        let container = facts.containers.entry("c".into()).or_default();
        container
            .crash
            .advance(Timestamp::UNIX_EPOCH, Timestamp::UNIX_EPOCH);
        container.last = Some(ended(1));
        let text = serde_json::to_string(&facts).unwrap();
        assert_eq!(serde_json::from_str::<Facts>(&text).unwrap(), facts);
        // A record of an older version lacks fields.
        assert_eq!(
            serde_json::from_str::<Facts>("{}").unwrap(),
            Facts::default()
        );
    }
}
