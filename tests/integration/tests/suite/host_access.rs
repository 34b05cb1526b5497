//! Pods that reach their host, as the cluster's administrator allows it.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{
    ContainerPort, Event, HostPathVolumeSource, Pod, SecurityContext, Volume, VolumeMount,
};
use sandman_integration::{PodBuilder, Scope, container, is_phase, wait_event, wait_pod};

async fn shell(scope: &Scope, pod: &str, script: &str) -> Result<String> {
    let output = scope
        .kubectl()
        .run(&["exec", pod, "--", "sh", "-c", script])
        .await?
        .ok()?;
    Ok(output.text().trim_end().to_owned())
}

fn with_host_path(builder: PodBuilder, path: &str, kind: &str) -> PodBuilder {
    builder
        .volume(Volume {
            name: "host".to_owned(),
            host_path: Some(HostPathVolumeSource {
                path: path.to_owned(),
                type_: (!kind.is_empty()).then(|| kind.to_owned()),
            }),
            ..Default::default()
        })
        .spec(|spec| {
            let mount = VolumeMount {
                name: "host".to_owned(),
                mount_path: "/host".to_owned(),
                ..Default::default()
            };
            spec.containers[0].volume_mounts = Some(vec![mount]);
        })
}

#[test]
fn a_pod_in_the_hosts_network_has_the_hosts_address() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "on-host")
            .spec(|spec| spec.host_network = Some(true))
            .build();
        let pod = scope.ready_pod(&pod).await?;
        let status = pod.status.context("status")?;
        let host = status.host_ip.context("hostIP")?;
        ensure!(status.pod_ip.as_deref() == Some(&*host), "{host}");
        let addresses = shell(&scope, "on-host", "ip -4 addr").await?;
        ensure!(addresses.contains(&format!("inet {host}/")), "{addresses}");
        let hosts = shell(&scope, "on-host", "cat /etc/hosts").await?;
        ensure!(
            hosts.starts_with("# Kubernetes-managed hosts file (host network)."),
            "{hosts}"
        );

        // A pod on the same cluster reaches what listens there by the host's address.
        let ready = "while true; do echo from the host | nc -l -p 18399; done";
        let server = PodBuilder::new("server")
            .container(container(&scope.cluster, "main", ready))
            .spec(|spec| spec.host_network = Some(true))
            .build();
        let server = scope.ready_pod(&server).await?;
        let address = server.status.and_then(|s| s.host_ip).context("hostIP")?;
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "client").build())
            .await?;
        let script =
            format!("until nc {address} 18399 < /dev/null | grep host; do sleep 0.2; done");
        let heard = shell(&scope, "client", &script).await?;
        ensure!(heard == "from the host", "{heard}");
        Ok(())
    });
}

#[test]
fn a_port_of_the_host_leads_to_its_pod() {
    Scope::run(|scope| async move {
        let serve = "while true; do echo from the pod | nc -l -p 8080; done";
        let with_port = |name: &str| {
            PodBuilder::new(name)
                .container(container(&scope.cluster, "main", serve))
                .spec(|spec| {
                    spec.node_name = Some(scope.cluster.node.clone());
                    spec.containers[0].ports = Some(vec![ContainerPort {
                        container_port: 8080,
                        host_port: Some(18398),
                        ..Default::default()
                    }]);
                })
                .build()
        };
        let pod = scope.ready_pod(&with_port("server")).await?;
        let host = pod.status.and_then(|s| s.host_ip).context("hostIP")?;
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "client").build())
            .await?;
        let script = format!("until nc {host} 18398 < /dev/null | grep pod; do sleep 0.2; done");
        let heard = shell(&scope, "client", &script).await?;
        ensure!(heard == "from the pod", "{heard}");
        // One host has the port once. With more hosts the second pod finds another.
        if scope.cluster.hosts == 1 {
            scope.create_pod(&with_port("second")).await?;
            let pod = wait_pod(&scope.api(), "second", "refused", |pod: &Pod| {
                is_phase(pod, "Failed")
            })
            .await?;
            let message = pod.status.and_then(|status| status.message);
            let message = message.context("message")?;
            ensure!(message.contains("hostPort: TCP 18398"), "{message}");
            ensure!(message.contains("/server"), "{message}");
        }
        Ok(())
    });
}

#[test]
fn a_pod_may_see_the_hosts_processes_and_ipc() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "seer")
            .spec(|spec| {
                spec.host_pid = Some(true);
                spec.host_ipc = Some(true);
            })
            .build();
        scope.ready_pod(&pod).await?;
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "blind").build())
            .await?;
        let count = "ls -d /proc/[0-9]* | wc -l";
        let [seen, own] = [
            shell(&scope, "seer", count).await?.parse::<u32>()?,
            shell(&scope, "blind", count).await?.parse::<u32>()?,
        ];
        ensure!(own < 10 && seen > own, "{seen} and {own} processes");
        let namespace = "readlink /proc/self/ns/ipc";
        let [shared, private] = [
            shell(&scope, "seer", namespace).await?,
            shell(&scope, "blind", namespace).await?,
        ];
        let machine = std::fs::read_link("/proc/self/ns/ipc")?;
        ensure!(machine.to_string_lossy() == shared, "{shared}");
        ensure!(shared != private, "{shared}");
        // Ends although nothing in it is PID 1.
        let kubectl = scope.kubectl();
        kubectl
            .run(&["delete", "pod", "seer", "--wait", "--timeout=60s"])
            .await?
            .ok()?;
        Ok(())
    });
}

#[test]
fn a_privileged_container_has_the_hosts_devices() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::sleeper(&scope.cluster, "master")
            .spec(|spec| {
                spec.containers[0].security_context = Some(SecurityContext {
                    privileged: Some(true),
                    ..Default::default()
                });
            })
            .build();
        scope.ready_pod(&pod).await?;
        let kmsg = shell(&scope, "master", "test -c /dev/kmsg && echo there").await?;
        ensure!(kmsg == "there", "{kmsg}");
        // Not even root can do this without the privilege.
        let mount = "mkdir /m && mount -t tmpfs none /m && touch /m/x && ls /m";
        let listed = shell(&scope, "master", mount).await?;
        ensure!(listed == "x", "{listed}");
        let seccomp = shell(&scope, "master", "grep Seccomp: /proc/self/status").await?;
        ensure!(seccomp.ends_with('0'), "{seccomp}");
        Ok(())
    });
}

#[test]
fn a_path_of_the_host_is_shared_by_pods_and_kept() {
    Scope::run(|scope| async move {
        let path = format!("/tmp/sandman-{}", scope.namespace);
        let build = |name: &str| {
            with_host_path(
                PodBuilder::sleeper(&scope.cluster, name),
                &path,
                "DirectoryOrCreate",
            )
            .build()
        };
        let outcome = async {
            scope.ready_pod(&build("writer")).await?;
            shell(&scope, "writer", "echo kept > /host/file").await?;
            let kubectl = scope.kubectl();
            kubectl
                .run(&["delete", "pod", "writer", "--wait", "--timeout=60s"])
                .await?
                .ok()?;
            scope.ready_pod(&build("reader")).await?;
            let text = shell(&scope, "reader", "cat /host/file").await?;
            ensure!(text == "kept", "{text}");

            let wrong = with_host_path(
                PodBuilder::sleeper(&scope.cluster, "wrong"),
                &format!("{path}/file"),
                "Directory",
            )
            .build();
            scope.create_pod(&wrong).await?;
            let text = format!("hostPath type check failed: {path}/file is not a directory");
            wait_event(&scope.api::<Event>(), "wrong", "FailedMount", &text).await?;
            let pod = scope.api::<Pod>().get("wrong").await?;
            let phase = pod.status.and_then(|status| status.phase);
            ensure!(phase.as_deref() == Some("Pending"), "{phase:?}");
            Ok(())
        };
        let outcome = outcome.await;
        // Hosts of the dev cluster share the machine's file system.
        match std::fs::remove_dir_all(&path) {
            Err(error) if outcome.is_ok() => Err(error.into()),
            _ => outcome,
        }
    });
}
