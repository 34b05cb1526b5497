//! Finds the pod and container that a request names, and says in the kubelet's
//! words why one cannot be used. Pure: reads pods, touches nothing.

use std::sync::Arc;

use http::StatusCode;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};

use super::route::{ContainerRef, PodRef};
use crate::view::PodView;

/// A refusal before anything was started: code and plain text body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) status: StatusCode,
    pub(super) body: String,
}

impl Refused {
    fn new(status: StatusCode, body: impl Into<String>) -> Self {
        Self {
            status,
            body: body.into(),
        }
    }
}

/// The pod of an exec, attach or run request.
fn pod(view: &dyn PodView, wanted: &PodRef) -> Result<Arc<Pod>, Refused> {
    view.find(&wanted.namespace, &wanted.name)
        .ok_or_else(|| Refused::new(StatusCode::NOT_FOUND, "pod does not exist"))
}

/// The pod of a request, if the named container of it runs. A UID in the path
/// must be the pod's own: a successor of the same name is another pod.
pub(super) fn running_container(
    view: &dyn PodView,
    wanted: &ContainerRef,
) -> Result<Arc<Pod>, Refused> {
    let pod = pod(view, &wanted.pod)?;
    if is_that_one(&pod, &wanted.pod) && runs(&pod, &wanted.container) {
        Ok(pod)
    } else {
        Err(Refused::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("container not found ({:?})", wanted.container),
        ))
    }
}

/// The pod of an attach request, if the named container of it runs.
pub(super) fn attached_container(
    view: &dyn PodView,
    wanted: &ContainerRef,
) -> Result<Arc<Pod>, Refused> {
    let pod = pod(view, &wanted.pod)?;
    if is_that_one(&pod, &wanted.pod) && runs(&pod, &wanted.container) {
        return Ok(pod);
    }
    let PodRef {
        namespace, name, ..
    } = &wanted.pod;
    let container = &wanted.container;
    Err(Refused::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("container {container} not found in pod {name}_{namespace}"),
    ))
}

/// The pod of a checkpoint request, if it has the named container.
pub(super) fn known_container(
    view: &dyn PodView,
    wanted: &ContainerRef,
) -> Result<Arc<Pod>, Refused> {
    let pod = pod(view, &wanted.pod)?;
    if in_spec(&pod, &wanted.container) {
        return Ok(pod);
    }
    let container = &wanted.container;
    Err(Refused::new(
        StatusCode::NOT_FOUND,
        format!("container {container} does not exist"),
    ))
}

/// The pod of a port-forward request, if it is not over.
pub(super) fn forwarded_pod(view: &dyn PodView, wanted: &PodRef) -> Result<Arc<Pod>, Refused> {
    let pod = pod(view, wanted)?;
    if !is_that_one(&pod, wanted) {
        return Err(Refused::new(StatusCode::NOT_FOUND, "pod not found"));
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_ref());
    if phase.is_some_and(|phase| phase == "Succeeded" || phase == "Failed") {
        let PodRef {
            namespace, name, ..
        } = wanted;
        return Err(Refused::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("pod not found (\"{name}_{namespace}\")"),
        ));
    }
    Ok(pod)
}

/// Whether a container has a terminal from its start.
pub(super) fn has_terminal(pod: &Pod, container: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let inits = spec.init_containers.iter().flatten();
    let ephemerals = spec.ephemeral_containers.iter().flatten();
    spec.containers
        .iter()
        .chain(inits)
        .map(|known| (&known.name, known.tty))
        .chain(ephemerals.map(|known| (&known.name, known.tty)))
        .any(|(name, tty)| name == container && tty == Some(true))
}

/// A UID in the path must be the pod's own.
fn is_that_one(pod: &Pod, wanted: &PodRef) -> bool {
    let wanted = wanted.uid.as_ref();
    wanted.is_none_or(|uid| pod.metadata.uid.as_ref() == Some(uid))
}

fn runs(pod: &Pod, container: &str) -> bool {
    pod.status
        .as_ref()
        .and_then(|status| container_status(status, container))
        .is_some_and(may_run)
}

/// Whether a container runs, as far as its status tells. One whose postStart hook is not over shows
/// that it waits, and its host knows better.
fn may_run(status: &ContainerStatus) -> bool {
    let Some(state) = &status.state else {
        return false;
    };
    let reason = state.waiting.as_ref().and_then(|w| w.reason.as_deref());
    let hooked = matches!(reason, Some("ContainerCreating" | "PodInitializing"));
    let made = status
        .container_id
        .as_ref()
        .is_some_and(|id| !id.is_empty());
    state.running.is_some() || (hooked && made)
}

/// The pod of a log request, if the named container has the wanted log.
pub(super) fn logged_container(
    view: &dyn PodView,
    wanted: &ContainerRef,
    previous: bool,
) -> Result<Arc<Pod>, Refused> {
    let (name, container) = (&wanted.pod.name, &wanted.container);
    let pod = view.find(&wanted.pod.namespace, name).ok_or_else(|| {
        Refused::new(
            StatusCode::NOT_FOUND,
            format!("pod {name:?} does not exist"),
        )
    })?;
    if !in_spec(&pod, container) {
        return Err(Refused::new(
            StatusCode::NOT_FOUND,
            format!("container {container:?} not found in pod {name:?}"),
        ));
    }
    log_exists(pod.status.as_ref(), name, container, previous)
        .map_err(|body| Refused::new(StatusCode::BAD_REQUEST, body))?;
    Ok(pod)
}

/// Whether a container has a log to read, judged by its status as the kubelet's
/// `validateContainerLogStatus` does; the error is the text that users see.
fn log_exists(
    status: Option<&PodStatus>,
    pod: &str,
    container: &str,
    previous: bool,
) -> Result<(), String> {
    let this = format!("container {container:?} in pod {pod:?}");
    let Some(status) = status.and_then(|status| container_status(status, container)) else {
        return Err(format!("{this} is not available"));
    };
    let ended_before = status
        .last_state
        .as_ref()
        .and_then(|state| state.terminated.as_ref());
    let has_id = |id: Option<&String>| id.is_some_and(|id| !id.is_empty());
    let logged_before = ended_before.is_some_and(|ended| has_id(ended.container_id.as_ref()));
    if previous {
        return if logged_before {
            Ok(())
        } else {
            Err(format!("previous terminated {this} not found"))
        };
    }
    let state = status.state.as_ref();
    if state.is_some_and(|state| state.running.is_some()) {
        return Ok(());
    }
    let terminated = state.and_then(|state| state.terminated.as_ref());
    if terminated.is_some_and(|ended| has_id(ended.container_id.as_ref())) || logged_before {
        return Ok(());
    }
    if terminated.is_some() || ended_before.is_some() {
        return Err(format!("{this} is terminated"));
    }
    let waiting = state.and_then(|state| state.waiting.as_ref());
    let reason = waiting.map(|waiting| waiting.reason.as_deref().unwrap_or_default());
    Err(match reason {
        Some("ErrImagePull") => format!("{this} is waiting to start: image can't be pulled"),
        Some("ImagePullBackOff") => {
            format!("{this} is waiting to start: trying and failing to pull image")
        }
        Some(reason) => format!("{this} is waiting to start: {reason}"),
        None => format!("{this} is waiting to start - no logs yet"),
    })
}

fn in_spec(pod: &Pod, container: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let inits = spec.init_containers.iter().flatten();
    let ephemerals = spec.ephemeral_containers.iter().flatten();
    spec.containers
        .iter()
        .chain(inits)
        .map(|container| &container.name)
        .chain(ephemerals.map(|container| &container.name))
        .any(|name| name == container)
}

fn container_status<'a>(status: &'a PodStatus, container: &str) -> Option<&'a ContainerStatus> {
    [
        &status.container_statuses,
        &status.init_container_statuses,
        &status.ephemeral_container_statuses,
    ]
    .into_iter()
    .flatten()
    .flatten()
    .find(|status| status.name == container)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::view::HostName;

    struct One(Arc<Pod>);

    impl PodView for One {
        fn pods(&self) -> Vec<Arc<Pod>> {
            vec![Arc::clone(&self.0)]
        }
        fn find(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
            let metadata = &self.0.metadata;
            let same = metadata.namespace.as_deref() == Some(namespace)
                && metadata.name.as_deref() == Some(name);
            same.then(|| Arc::clone(&self.0))
        }
        fn find_by_uid(&self, _: &str) -> Option<Arc<Pod>> {
            None
        }
        fn host_of(&self, _: &str) -> Option<HostName> {
            None
        }
        fn running_pods(&self) -> Vec<Arc<Pod>> {
            self.pods()
        }
    }

    fn view(statuses: Value) -> One {
        let pod = json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": "u-1"},
            "spec": {
                "containers": [{"name": "c"}, {"name": "new"}],
                "initContainers": [{"name": "init"}],
                "ephemeralContainers": [{"name": "debug"}],
            },
            "status": statuses,
        });
        One(Arc::new(serde_json::from_value(pod).expect("a pod")))
    }

    fn status(name: &str, state: Value, last: Value) -> Value {
        json!({"name": name, "image": "i", "imageID": "i", "ready": false, "restartCount": 0,
               "state": state, "lastState": last})
    }

    fn wanted(name: &str, uid: Option<&str>, container: &str) -> ContainerRef {
        ContainerRef {
            pod: PodRef {
                namespace: "ns".into(),
                name: name.into(),
                uid: uid.map(Into::into),
            },
            container: container.into(),
        }
    }

    #[test]
    fn exec_needs_a_running_container() {
        let view = view(json!({
            "containerStatuses": [status("c", json!({"running": {}}), json!({}))],
            "initContainerStatuses": [
                status("init", json!({"terminated": {"exitCode": 0}}), json!({})),
            ],
            "ephemeralContainerStatuses": [status("debug", json!({"running": {}}), json!({}))],
        }));
        let missing = |name: &str| Some((500, format!("container not found (\"{name}\")")));
        for (pod, uid, container, want) in [
            ("p", None, "c", None),
            ("p", Some("u-1"), "c", None),
            ("p", None, "debug", None),
            ("p", Some("u-0"), "c", missing("c")),
            ("p", None, "init", missing("init")),
            ("p", None, "new", missing("new")),
            ("p", None, "absent", missing("absent")),
            ("q", None, "c", Some((404, "pod does not exist".into()))),
        ] {
            let found = running_container(&view, &wanted(pod, uid, container));
            let refused = found
                .err()
                .map(|refused| (refused.status.as_u16(), refused.body));
            assert_eq!(refused, want, "{pod} {uid:?} {container}");
        }
    }

    #[test]
    fn attach_and_port_forward_refuse_in_their_own_words() {
        let statuses = json!({
            "phase": "Running",
            "containerStatuses": [status("c", json!({"running": {}}), json!({}))],
        });
        let running = view(statuses);
        assert!(attached_container(&running, &wanted("p", None, "c")).is_ok());
        let refused = |found: Result<Arc<Pod>, Refused>| {
            let refused = found.expect_err("a refusal");
            (refused.status.as_u16(), refused.body)
        };
        for (uid, container) in [(Some("u-0"), "c"), (None, "new")] {
            assert_eq!(
                refused(attached_container(&running, &wanted("p", uid, container))),
                (500, format!("container {container} not found in pod p_ns"))
            );
        }
        let forward = |uid| wanted("p", uid, "").pod;
        assert!(forwarded_pod(&running, &forward(Some("u-1"))).is_ok());
        assert_eq!(
            refused(forwarded_pod(&running, &forward(Some("u-0")))),
            (404, "pod not found".into())
        );
        let over = view(json!({"phase": "Succeeded"}));
        assert_eq!(
            refused(forwarded_pod(&over, &forward(None))),
            (500, "pod not found (\"p_ns\")".into())
        );
    }

    #[test]
    fn logs_are_refused_in_the_kubelets_words() {
        let ended = json!({"terminated": {"exitCode": 1, "containerID": "containerd://1"}});
        let vanished = json!({"terminated": {"exitCode": 137}});
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        let none = json!({});
        let running = json!({"running": {}});
        for (state, last, previous, want) in [
            (&running, &none, false, None),
            (&ended, &none, false, None),
            (&waiting("CrashLoopBackOff"), &ended, false, None),
            (&running, &ended, true, None),
            (
                &running,
                &none,
                true,
                Some(r#"previous terminated container "c" in pod "p" not found"#),
            ),
            (
                &vanished,
                &none,
                false,
                Some(r#"container "c" in pod "p" is terminated"#),
            ),
            (&vanished, &ended, false, None),
            (
                &waiting("ContainerCreating"),
                &none,
                false,
                Some(r#"container "c" in pod "p" is waiting to start: ContainerCreating"#),
            ),
            (
                &waiting("ErrImagePull"),
                &none,
                false,
                Some(r#"container "c" in pod "p" is waiting to start: image can't be pulled"#),
            ),
            (
                &waiting("ImagePullBackOff"),
                &none,
                false,
                Some(
                    r#"container "c" in pod "p" is waiting to start: trying and failing to pull image"#,
                ),
            ),
            (
                &none,
                &none,
                false,
                Some(r#"container "c" in pod "p" is waiting to start - no logs yet"#),
            ),
        ] {
            let statuses = json!({
                "containerStatuses": [status("c", state.clone(), last.clone())],
            });
            let found = logged_container(&view(statuses), &wanted("p", None, "c"), previous);
            let refused = found.err().map(|refused| refused.body);
            assert_eq!(refused.as_deref(), want, "{state} {last} {previous}");
        }
    }

    #[test]
    fn logs_of_what_is_not_there() {
        let view = view(json!({}));
        for (pod, container, want) in [
            ("q", "c", (404, r#"pod "q" does not exist"#)),
            ("p", "x", (404, r#"container "x" not found in pod "p""#)),
            (
                "p",
                "debug",
                (400, r#"container "debug" in pod "p" is not available"#),
            ),
        ] {
            let refused = logged_container(&view, &wanted(pod, None, container), false)
                .expect_err("there is no log");
            assert_eq!((refused.status.as_u16(), refused.body.as_str()), want);
        }
    }
}
