//! The life of sandboxes on a real host: containerd, runc, the agent and the service as they are.
//!
//! `cargo test --workspace --test host -- --ignored` as root.

use std::collections::BTreeSet;
use std::time::Duration;

use sandman_protocol::v1;
use v1::container_report::State;

use crate::support::{client, on_a_host};

fn terminated(report: &v1::ContainerReport) -> &v1::Terminated {
    match &report.state {
        Some(State::Terminated(end)) => end,
        other => panic!("not terminated: {other:?}"),
    }
}

fn waits_with(report: &v1::SandboxReport, reason: &str) -> bool {
    report.containers.iter().any(|container| {
        matches!(&container.state, Some(State::Waiting(waiting)) if waiting.reason == reason)
    })
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_sandbox_runs_answers_and_leaves_nothing() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let inventory = node.wait_inventory().await;
        assert_eq!(inventory.host_name, "host-0");
        assert!(
            inventory.runtime_version.starts_with("containerd://"),
            "{inventory:?}"
        );

        let spec = node.pod("first", "echo hello; sleep 1000");
        node.apply(&spec).await;
        node.apply(&spec).await;
        let report = node.wait_running(&spec.uid).await;
        assert!(
            report.sandbox_ready && report.pod_ip.starts_with("10.64.0."),
            "{report:#?}"
        );
        let container = &report.containers[0];
        assert_eq!(
            container.container_id,
            format!("containerd://{}-main-0", spec.uid)
        );
        assert!(container.image_id.contains("@sha256:"), "{container:#?}");
        for reason in ["Pulling", "Pulled", "Created", "Started"] {
            node.wait_event(&spec.uid, reason).await;
        }
        // One report when the network is there, one when the container runs, at most one more.
        assert!(
            node.history(&spec.uid).len() <= 4,
            "{:#?}",
            node.history(&spec.uid)
        );

        let logs = v1::LogsRequest {
            uid: spec.uid.clone(),
            container: "main".into(),
            ..Default::default()
        };
        // Followed: the container may not have come to its first word yet.
        let follow = v1::LogsRequest {
            follow: true,
            ..logs.clone()
        };
        let mut following = node.client.clone().logs(follow).await.unwrap().into_inner();
        let first = tokio::time::timeout(Duration::from_secs(20), following.message()).await;
        assert_eq!(first.unwrap().unwrap().unwrap().data, b"hello\n"[..]);
        drop(following);
        assert_eq!(node.logs(logs).await.unwrap(), "hello\n");

        let stats = node
            .client
            .clone()
            .get_stats(v1::GetStatsRequest {})
            .await
            .unwrap();
        let stats = stats.into_inner();
        let usage = stats.sandboxes[0].containers[0].usage.unwrap();
        assert!(
            usage.memory_usage_bytes > 0 && usage.processes >= 2,
            "{usage:?}"
        );
        assert!(stats.host.unwrap().memory_usage_bytes > 0);

        let removed = node.remove_and_wait(&spec.uid).await;
        assert_eq!(terminated(&removed.containers[0]).exit_code, 143);
        assert_eq!(host.leftovers(), Vec::<String>::new());
        assert_eq!(host.cgroups(), Vec::<std::path::PathBuf>::new());

        let again = node.try_apply(client::TERM, &spec).await.unwrap_err();
        assert_eq!(again.code(), tonic::Code::AlreadyExists);
        let old = node
            .try_apply(0, &node.pod("late", "true"))
            .await
            .unwrap_err();
        assert_eq!(old.code(), tonic::Code::Aborted);
        let forget = v1::ForgetRequest {
            term: client::TERM,
            uid: spec.uid.clone(),
        };
        node.client.clone().forget(forget).await.unwrap();
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn containers_of_a_sandbox_share_what_they_should() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("several", "sleep 1000");
        let mut init = node.container(
            "init",
            "test ! -e /data/from-init && echo x >/data/from-init",
        );
        let mut sidecar = node.container("side", "touch /data/side; sleep 1000");
        sidecar.sidecar = true;
        let mut server = node.container(
            "server",
            "test -e /data/from-init && test -e /data/side || exit 9; \
             echo y >/dev/shm/shared; while true; do echo pong | nc -l -p 8080; done",
        );
        let mount = v1::Mount {
            volume: "data".into(),
            path: "/data".into(),
            ..Default::default()
        };
        for container in [&mut init, &mut sidecar, &mut server] {
            container.mounts.push(mount.clone());
        }
        spec.init_containers = vec![init, sidecar];
        spec.containers.push(server);
        spec.volumes.push(v1::Volume {
            name: "data".into(),
            source: Some(v1::volume::Source::EmptyDir(v1::EmptyDir::default())),
        });
        node.apply(&spec).await;
        let report = node.wait_running(&spec.uid).await;
        assert_eq!(terminated(&report.init_containers[0]).reason, "Completed");
        assert!(matches!(
            report.init_containers[1].state,
            Some(State::Running(_))
        ));

        let script = "for i in 1 2 3 4 5 6 7 8 9; do nc 127.0.0.1 8080 </dev/null && break; \
                      sleep 1; done; cat /dev/shm/shared; hostname";
        let output = node.exec(&spec.uid, &["sh", "-c", script]).await;
        assert_eq!(output.text(), "pong\ny\nseveral\n", "{output:?}");
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn ends_follow_the_restart_policy() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let never = node.pod("never", "echo words >/dev/termination-log; exit 3");
        let mut words = node.pod("words", "echo from the log; exit 4");
        words.containers[0].termination_message_policy =
            v1::TerminationMessagePolicy::FallbackToLogsOnError as i32;
        let mut crash = node.pod("crash", "echo attempt; exit 1");
        crash.restart_policy = v1::RestartPolicy::Always as i32;
        let mut once = node.pod("once", "true");
        once.restart_policy = v1::RestartPolicy::OnFailure as i32;
        let mut missing = node.pod("missing", "");
        missing.containers[0].command = vec!["no-such-command".into()];
        let mut late = node.pod("late", "sleep 1000");
        late.active_deadline = Some(prost_types::Duration {
            seconds: 2,
            nanos: 0,
        });
        let mut hungry = node.pod("hungry", "tail /dev/zero");
        hungry.containers[0].resources = Some(v1::ContainerResources {
            memory_limit_bytes: 32 << 20,
            ..Default::default()
        });
        for spec in [&never, &words, &crash, &once, &missing, &late, &hungry] {
            node.apply(spec).await;
        }

        let report = node.wait_finished(&never.uid).await;
        let end = terminated(&report.containers[0]);
        assert_eq!((end.exit_code, end.reason.as_str()), (3, "Error"));
        assert_eq!(end.message, "words\n");
        let report = node.wait_finished(&words.uid).await;
        assert_eq!(terminated(&report.containers[0]).message, "from the log\n");
        let report = node.wait_finished(&once.uid).await;
        assert_eq!(terminated(&report.containers[0]).reason, "Completed");
        let report = node.wait_finished(&missing.uid).await;
        let end = terminated(&report.containers[0]);
        assert_eq!((end.exit_code, end.reason.as_str()), (128, "StartError"));
        assert!(
            end.message.contains("executable file not found in $PATH"),
            "{end:?}"
        );
        let report = node.wait_finished(&late.uid).await;
        assert_eq!(report.reason, "DeadlineExceeded");
        let report = node.wait_finished(&hungry.uid).await;
        assert_eq!(terminated(&report.containers[0]).reason, "OOMKilled");

        let report = node
            .wait_report(&crash.uid, "a crash loop", |r| {
                waits_with(r, "CrashLoopBackOff")
            })
            .await;
        assert_eq!(report.containers[0].restart_count, 1);
        assert_eq!(
            report.containers[0]
                .last_termination
                .as_ref()
                .unwrap()
                .exit_code,
            1
        );
        node.wait_event(&crash.uid, "BackOff").await;
        let previous = v1::LogsRequest {
            uid: crash.uid.clone(),
            container: "main".into(),
            previous: true,
            ..Default::default()
        };
        assert_eq!(node.logs(previous).await.unwrap(), "attempt\n");
        for spec in [&never, &words, &crash, &once, &missing, &late, &hungry] {
            node.remove_and_wait(&spec.uid).await;
        }
        assert_eq!(host.leftovers(), Vec::<String>::new());
        assert_eq!(host.cgroups(), Vec::<std::path::PathBuf>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn trouble_is_told_in_the_kubelets_words() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut absent = node.pod("absent", "true");
        absent.containers[0].image = format!("{}/missing/image:1", node.registry);
        let mut root = node.pod("root", "true");
        root.containers[0].security = Some(v1::SecurityContext {
            run_as_non_root: true,
            ..Default::default()
        });
        let mut never = node.pod("never", "true");
        never.containers[0].image = format!("{}/other/image:1", node.registry);
        never.containers[0].pull_policy = v1::PullPolicy::Never as i32;
        for spec in [&absent, &root, &never] {
            node.apply(spec).await;
        }
        for reason in ["ErrImagePull", "ImagePullBackOff"] {
            node.wait_report(&absent.uid, reason, |r| waits_with(r, reason))
                .await;
        }
        let failed = node.wait_event(&absent.uid, "Failed").await;
        assert!(failed.warning && failed.container == "main", "{failed:?}");
        node.wait_report(&root.uid, "a refusal", |r| {
            waits_with(r, "CreateContainerConfigError")
        })
        .await;
        node.wait_report(&never.uid, "a missing image", |r| {
            waits_with(r, "ErrImageNeverPull")
        })
        .await;

        let mut strange = node.pod("strange", "true");
        strange.share_process_namespace = true;
        let refused = node.try_apply(client::TERM, &strange).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unimplemented);
        let mut huge = node.pod("huge", "true");
        huge.requests = Some(v1::Resources {
            memory_bytes: 1 << 60,
            ..Default::default()
        });
        let refused = node.try_apply(client::TERM, &huge).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        for spec in [&absent, &root, &never] {
            node.remove_and_wait(&spec.uid).await;
        }
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_sandbox_is_confined_and_gets_its_files() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("files", "sleep 1000");
        let file = |path: &str, data: &str| v1::File {
            path: path.into(),
            mode: 0o440,
            content: Some(v1::file::Content::Data(data.as_bytes().to_vec())),
        };
        let volume = |text: &str| v1::Volume {
            name: "conf".into(),
            source: Some(v1::volume::Source::Files(v1::Files {
                files: vec![file("key", text), file("dir/other", "o")],
                secret: true,
            })),
        };
        spec.volumes = vec![volume("one")];
        spec.fs_group = Some(2000);
        let container = &mut spec.containers[0];
        container.mounts = vec![
            v1::Mount {
                volume: "conf".into(),
                path: "/conf".into(),
                read_only: true,
                ..Default::default()
            },
            v1::Mount {
                volume: "conf".into(),
                path: "/single".into(),
                sub_path: "dir/other".into(),
                read_only: true,
                ..Default::default()
            },
        ];
        container.env = vec![
            v1::EnvVar {
                name: "IP".into(),
                value: Some(v1::env_var::Value::HostField(v1::HostField::PodIp as i32)),
            },
            v1::EnvVar {
                name: "URL".into(),
                value: Some(v1::env_var::Value::Literal("http://$(IP)".into())),
            },
        ];
        container.security = Some(v1::SecurityContext {
            run_as_user: Some(1000),
            run_as_non_root: true,
            read_only_root: true,
            no_new_privileges: true,
            drop_capabilities: vec!["ALL".into()],
            ..Default::default()
        });
        node.apply(&spec).await;
        let report = node.wait_running(&spec.uid).await;

        let run = async |script: &str| node.exec(&spec.uid, &["sh", "-c", script]).await;
        assert_eq!(run("cat /conf/key /single").await.text(), "oneo");
        assert_eq!(
            run("id -u; id -g; id -G").await.text(),
            "1000\n1001\n1001 50 2000\n"
        );
        assert_eq!(
            run("echo $URL $FROM_IMAGE $HOSTNAME").await.text(),
            format!("http://{} yes files\n", report.pod_ip)
        );
        for (script, why) in [
            ("touch /x", "read-only root"),
            ("touch /conf/x", "read-only volume"),
            ("mount -t tmpfs t /tmp", "no mounts"),
            ("unshare -U true", "no user namespaces"),
            ("echo x >/dev/sandman/daemon", "the agent is immutable"),
            ("echo 1 >/proc/sys/kernel/panic", "sysctls"),
        ] {
            assert_ne!(run(script).await.code, Some(0), "{why}: {script}");
        }
        let hosts = run("cat /etc/hosts /etc/hostname").await.text();
        assert!(
            hosts.contains(&report.pod_ip) && hosts.ends_with("files\n"),
            "{hosts}"
        );

        // New contents reach the running container, except by sub path.
        spec.volumes = vec![volume("two")];
        spec.generation = 2;
        node.apply(&spec).await;
        node.wait_report(&spec.uid, "generation 2", |r| r.observed_generation == 2)
            .await;
        let script = "for i in 1 2 3 4 5 6 7 8 9; do \
                      test $(cat /conf/key) = two && break; sleep 1; done; cat /conf/key";
        assert_eq!(run(script).await.text(), "two");
        node.remove_and_wait(&spec.uid).await;
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn removal_waits_for_grace_then_kills() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let stubborn = node.pod("stubborn", "trap '' TERM; while true; do sleep 1; done");
        node.apply(&stubborn).await;
        node.wait_running(&stubborn.uid).await;
        let begin = std::time::Instant::now();
        node.remove(&stubborn.uid, 600).await;
        node.wait_event(&stubborn.uid, "Killing").await;
        // A shorter grace period hastens the end.
        let removed = node.remove_and_wait(&stubborn.uid).await;
        assert!(begin.elapsed() >= std::time::Duration::from_secs(2));
        assert_eq!(terminated(&removed.containers[0]).exit_code, 137);

        node.remove("0b1d4f7e-6a37-4a53-9f0e-0d9a3c1f2b4c", 0).await;
        node.wait_report(
            "0b1d4f7e-6a37-4a53-9f0e-0d9a3c1f2b4c",
            "its removal",
            |report| report.lifecycle() == v1::Lifecycle::Removed,
        )
        .await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_burst_waits_and_nothing_fails() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let specs: Vec<_> = (0..40)
            .map(|n| node.pod(&format!("p{n}"), "sleep 1000"))
            .collect();
        for spec in &specs {
            node.apply(spec).await;
        }
        let mut addresses = BTreeSet::new();
        for spec in &specs {
            addresses.insert(node.wait_running(&spec.uid).await.pod_ip);
        }
        assert_eq!(addresses.len(), specs.len(), "addresses are unique");
        for spec in &specs {
            node.remove(&spec.uid, 2).await;
        }
        for spec in &specs {
            node.wait_report(&spec.uid, "its removal", |report| {
                report.lifecycle() == v1::Lifecycle::Removed
            })
            .await;
        }
        assert_eq!(host.leftovers(), Vec::<String>::new());
        assert_eq!(host.cgroups(), Vec::<std::path::PathBuf>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn only_an_empty_dir_can_be_written_to() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("writes", "sleep 1000");
        let file = v1::File {
            path: "key".into(),
            mode: 0o644,
            content: Some(v1::file::Content::Data(b"one".to_vec())),
        };
        let files = |secret| {
            v1::volume::Source::Files(v1::Files {
                files: vec![file.clone()],
                secret,
            })
        };
        let sources = [
            ("conf", files(false)),
            ("secret", files(true)),
            (
                "scratch",
                v1::volume::Source::EmptyDir(v1::EmptyDir::default()),
            ),
        ];
        for (name, source) in sources {
            spec.volumes.push(v1::Volume {
                name: name.into(),
                source: Some(source),
            });
            spec.containers[0].mounts.push(v1::Mount {
                volume: name.into(),
                path: format!("/{name}"),
                ..Default::default()
            });
        }
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        // As root, whom no mode stops.
        for (script, allowed) in [
            ("echo x >/scratch/key", true),
            ("echo x >/conf/key", false),
            ("touch /conf/new", false),
            ("rm /conf/..data", false),
            ("echo x >/secret/key", false),
        ] {
            let output = node.exec(&spec.uid, &["sh", "-c", script]).await;
            assert_eq!(output.code == Some(0), allowed, "{script}: {output:?}");
        }
        node.remove_and_wait(&spec.uid).await;
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn another_image_replaces_a_container_that_never_restarts() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("image", "sleep 1000");
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        spec.containers[0].image = format!("{}/test/busybox:2", node.registry);
        spec.generation = 2;
        node.apply(&spec).await;
        let replaced = node.wait_report(&spec.uid, "the new container", |report| {
            let container = &report.containers[0];
            container.restart_count == 1 && matches!(container.state, Some(State::Running(_)))
        });
        let replaced = replaced.await;
        assert_eq!(replaced.lifecycle(), v1::Lifecycle::Active);
        assert!(
            node.history(&spec.uid)
                .iter()
                .all(|report| report.lifecycle() == v1::Lifecycle::Active)
        );
        node.remove_and_wait(&spec.uid).await;
    });
}
