//! Ephemeral containers (`kubectl debug`), which the API keeps in a type of their own although they
//! are containers with one field more.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod, PodSpec};

/// The same as a container. What only an ephemeral one has is left out.
pub(super) fn as_container(ephemeral: &EphemeralContainer) -> Container {
    let e = ephemeral.clone();
    Container {
        args: e.args,
        command: e.command,
        env: e.env,
        env_from: e.env_from,
        image: e.image,
        image_pull_policy: e.image_pull_policy,
        name: e.name,
        security_context: e.security_context,
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path,
        termination_message_policy: e.termination_message_policy,
        tty: e.tty,
        volume_mounts: e.volume_mounts,
        working_dir: e.working_dir,
        ..Container::default()
    }
}

/// All of a pod's.
pub(super) fn containers(spec: &PodSpec) -> impl Iterator<Item = (&EphemeralContainer, Container)> {
    spec.ephemeral_containers
        .iter()
        .flatten()
        .map(|ephemeral| (ephemeral, as_container(ephemeral)))
}

/// Init containers, then regular, then ephemeral ones.
pub(super) fn all(pod: &Pod) -> impl Iterator<Item = Cow<'_, Container>> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let lasting = spec
            .init_containers
            .iter()
            .flatten()
            .chain(&spec.containers);
        lasting
            .map(Cow::Borrowed)
            .chain(containers(spec).map(|(_, container)| Cow::Owned(container)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nothing_but_the_target_is_lost() {
        let full = json!({
            "name": "d", "image": "i", "command": ["c"], "args": ["a"], "workingDir": "/w",
            "env": [{"name": "A", "value": "1"}], "envFrom": [{"prefix": "p"}],
            "imagePullPolicy": "Always", "securityContext": {"runAsUser": 1},
            "stdin": true, "stdinOnce": true, "tty": true,
            "terminationMessagePath": "/t", "terminationMessagePolicy": "File",
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        });
        let mut ephemeral = full.clone();
        ephemeral["targetContainerName"] = json!("c");
        let ephemeral = serde_json::from_value(ephemeral).unwrap();
        assert_eq!(
            serde_json::to_value(as_container(&ephemeral)).unwrap(),
            full
        );
    }
}
