//! Probes, hooks, ephemeral containers: on a real host, with real commands and servers.

use sandman_protocol::v1;
use v1::container_report::State;
use v1::handler::Action;

use crate::support::on_a_host;

fn exec(command: &[&str]) -> v1::Handler {
    let command = command.iter().map(ToString::to_string).collect();
    v1::Handler {
        action: Some(Action::Exec(v1::ExecAction { command })),
    }
}

fn probe(handler: v1::Handler, failures: u32) -> Option<v1::Probe> {
    Some(v1::Probe {
        handler: Some(handler),
        period_seconds: 1,
        timeout_seconds: 3,
        failure_threshold: failures,
        ..Default::default()
    })
}

fn port(number: u32) -> Option<v1::Port> {
    Some(v1::Port {
        number,
        ..Default::default()
    })
}

fn main_of(report: &v1::SandboxReport) -> &v1::ContainerReport {
    &report.containers[0]
}

fn is_running(report: &v1::ContainerReport) -> bool {
    matches!(report.state, Some(State::Running(_)))
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn readiness_is_asked_over_the_network_of_the_pod() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let script = "mkdir /www; echo ok > /www/up; exec httpd -f -p 8080 -h /www";
        let mut spec = node.pod("http", script);
        let get = v1::HttpGetAction {
            port: port(8080),
            path: "/up".into(),
            ..Default::default()
        };
        let handler = v1::Handler {
            action: Some(Action::HttpGet(get)),
        };
        spec.containers[0].readiness_probe = probe(handler, 1);
        let tcp = v1::TcpSocketAction {
            port: port(8080),
            ..Default::default()
        };
        let handler = v1::Handler {
            action: Some(Action::TcpSocket(tcp)),
        };
        spec.containers[0].startup_probe = probe(handler, 100);
        node.apply(&spec).await;
        let ready = |report: &v1::SandboxReport| main_of(report).ready;
        let report = node.wait_report(&spec.uid, "ready", ready).await;
        assert!(main_of(&report).started);
        node.exec(&spec.uid, &["mv", "/www/up", "/www/down"]).await;
        let report = node
            .wait_report(&spec.uid, "not ready", |report| !main_of(report).ready)
            .await;
        assert!(is_running(main_of(&report)) && main_of(&report).started);
        let event = node.wait_event(&spec.uid, "Unhealthy").await;
        assert!(event.warning && event.container == "main", "{event:?}");
        node.exec(&spec.uid, &["mv", "/www/down", "/www/up"]).await;
        node.wait_report(&spec.uid, "ready again", ready).await;
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_container_that_fails_its_liveness_probe_is_replaced() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("live", "touch /up; exec sleep 1000");
        spec.restart_policy = v1::RestartPolicy::Always as i32;
        spec.containers[0].liveness_probe = probe(exec(&["cat", "/up"]), 2);
        spec.containers[0].startup_probe = probe(exec(&["test", "-e", "/up"]), 100);
        node.apply(&spec).await;
        node.wait_report(&spec.uid, "started", |report| main_of(report).started)
            .await;
        node.exec(&spec.uid, &["rm", "/up"]).await;
        node.wait_report(&spec.uid, "restarted", |report| {
            main_of(report).restart_count == 1 && main_of(report).started
        })
        .await;
        let killing = node.wait_event(&spec.uid, "Killing").await;
        assert_eq!(
            killing.message,
            "Container main failed liveness probe, will be restarted"
        );
        node.remove_and_wait(&spec.uid).await;
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_probe_that_hangs_is_killed_with_what_it_started() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("hangs", "exec sleep 1000");
        let script = "sleep 4242 & sleep 4243";
        spec.containers[0].readiness_probe = probe(exec(&["sh", "-c", script]), 1);
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        let event = node.wait_event(&spec.uid, "Unhealthy").await;
        assert!(event.message.contains("timed out after 3s"), "{event:?}");
        // Killed at once: whatever this exec sees began with a later probe.
        let output = node.exec(&spec.uid, &["true"]).await;
        assert_eq!(output.code, Some(0), "{output:?}");
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn what_probes_found_outlives_the_service() {
    on_a_host(|mut host| async move {
        let node = host.node().await;
        let mut spec = node.pod("kept", "touch /up; exec sleep 1000");
        spec.containers[0].startup_probe = probe(exec(&["test", "-e", "/up"]), 100);
        spec.containers[0].readiness_probe = probe(exec(&["test", "-e", "/up"]), 1);
        node.apply(&spec).await;
        let ready = |report: &v1::SandboxReport| main_of(report).ready;
        node.wait_report(&spec.uid, "ready", ready).await;
        host.kill_shim();
        host.start_shim();
        let node = host.node().await;
        node.wait_report(&spec.uid, "ready", ready).await;
        let all = node.history(&spec.uid);
        assert!(all.iter().all(ready), "{all:#?}");
        // And it is asked again.
        node.apply(&spec).await;
        node.exec(&spec.uid, &["rm", "/up"]).await;
        node.wait_report(&spec.uid, "not ready", |report| !main_of(report).ready)
            .await;
        node.remove_and_wait(&spec.uid).await;
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn hooks_run_after_the_start_and_before_the_signal() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let script = "trap 'cat /stopped > /dev/termination-log; exit 0' TERM; \
                      while :; do sleep 0.1; done";
        let mut spec = node.pod("hooks", script);
        let container = &mut spec.containers[0];
        container.termination_message_path = "/dev/termination-log".into();
        container.post_start = Some(exec(&["touch", "/started"]));
        let script = "test -e /started && sleep 1 && echo hook > /stopped";
        container.pre_stop = Some(exec(&["sh", "-c", script]));
        node.apply(&spec).await;
        node.wait_report(&spec.uid, "started", |report| main_of(report).started)
            .await;
        let removed = node.remove_and_wait(&spec.uid).await;
        let Some(State::Terminated(end)) = &main_of(&removed).state else {
            panic!("{removed:#?}")
        };
        assert_eq!((end.exit_code, end.message.trim()), (0, "hook"));
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_failed_hook_ends_its_container() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("failed", "exec sleep 1000");
        spec.restart_policy = v1::RestartPolicy::Never as i32;
        spec.containers[0].post_start = Some(exec(&["false"]));
        node.apply(&spec).await;
        node.wait_finished(&spec.uid).await;
        let event = node.wait_event(&spec.uid, "FailedPostStartHook").await;
        assert_eq!(event.message, "PostStartHook failed");
        node.remove_and_wait(&spec.uid).await;
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn an_ephemeral_container_joins_the_processes_of_its_target() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("debug", "exec sleep 1000");
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        let script = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' > /dev/termination-log";
        for (name, target) in [("alone", ""), ("joined", "main")] {
            let mut container = node.container(name, script);
            container.target = target.into();
            container.termination_message_path = "/dev/termination-log".into();
            spec.ephemeral_containers.push(container);
        }
        spec.generation = 2;
        node.apply(&spec).await;
        let over = |report: &v1::SandboxReport| {
            let all = &report.ephemeral_containers;
            let ended = |c: &v1::ContainerReport| matches!(c.state, Some(State::Terminated(_)));
            all.len() == 2 && all.iter().all(ended)
        };
        let report = node.wait_report(&spec.uid, "debugged", over).await;
        assert_eq!(report.lifecycle(), v1::Lifecycle::Active);
        assert!(is_running(main_of(&report)));
        for (container, sees) in report.ephemeral_containers.iter().zip([false, true]) {
            let Some(State::Terminated(end)) = &container.state else {
                panic!("{container:#?}")
            };
            assert_eq!(end.message.contains("sleep 1000"), sees, "{end:?}");
        }
        let started = node.wait_event(&spec.uid, "Started").await;
        assert!(!started.warning);
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

/// What the kernel lets a container use: its quota of processor time per period.
fn quotas(host: &crate::support::TestHost, container_id: &str) -> Vec<String> {
    let id = container_id.trim_start_matches("containerd://");
    let files = host
        .cgroups()
        .into_iter()
        .flat_map(|pod| ["cpu.cfs_quota_us", "cpu.max"].map(|name| pod.join(id).join(name)));
    let read = files.filter_map(|file| std::fs::read_to_string(file).ok());
    read.filter_map(|text| Some(text.split_whitespace().next()?.to_owned()))
        .collect()
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_container_that_runs_gets_another_size() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("size", "exec sleep 1000");
        let size = |millis: u64, memory: u64| {
            Some(v1::ContainerResources {
                cpu_limit_millis: millis,
                memory_limit_bytes: memory,
                ..Default::default()
            })
        };
        spec.containers[0].resources = size(500, 64 << 20);
        spec.containers[0].restart_on_memory_resize = true;
        node.apply(&spec).await;
        let report = node.wait_running(&spec.uid).await;
        assert_eq!(quotas(&host, &main_of(&report).container_id), ["50000"]);

        spec.generation = 2;
        spec.containers[0].resources = size(1000, 64 << 20);
        node.apply(&spec).await;
        let done = |report: &v1::SandboxReport| {
            report.resize.is_none() && main_of(report).resources == main_of(report).allocated
        };
        let report = node
            .wait_report(&spec.uid, "resized", |report| {
                done(report) && main_of(report).resources == size(1000, 64 << 20)
            })
            .await;
        assert_eq!(quotas(&host, &main_of(&report).container_id), ["100000"]);
        assert_eq!(main_of(&report).restart_count, 0);

        spec.generation = 3;
        spec.containers[0].resources = size(1000, 128 << 20);
        node.apply(&spec).await;
        node.wait_report(&spec.uid, "restarted with its new size", |report| {
            done(report)
                && main_of(report).restart_count == 1
                && main_of(report).resources == size(1000, 128 << 20)
        })
        .await;

        spec.generation = 4;
        spec.containers[0].resources = size(1 << 40, 128 << 20);
        spec.requests = Some(v1::Resources {
            cpu_millis: 1 << 40,
            ..Default::default()
        });
        node.apply(&spec).await;
        let report = node
            .wait_report(&spec.uid, "refused", |report| report.resize.is_some())
            .await;
        let resize = report.resize.as_ref().unwrap();
        assert_eq!(resize.pending(), v1::resize::Pending::Infeasible);
        assert_eq!(main_of(&report).allocated, size(1000, 128 << 20));
        assert_eq!(report.observed_generation, 4);
        node.remove_and_wait(&spec.uid).await;
    });
}
