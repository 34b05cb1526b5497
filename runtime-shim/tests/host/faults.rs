//! Deaths of this service and of containerd: nothing is lost, doubled or left over.

use sandman_protocol::v1;
use v1::container_report::State;

use crate::support::on_a_host;

fn logs(uid: &str) -> v1::LogsRequest {
    v1::LogsRequest {
        uid: uid.into(),
        container: "main".into(),
        ..Default::default()
    }
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn sandboxes_outlive_the_service() {
    on_a_host(|mut host| async move {
        let node = host.node().await;
        let stays = node.pod(
            "stays",
            "echo before; while ! test -e /go; do sleep 1; done; \
                                       echo after; sleep 1000",
        );
        let ends = node.pod("ends", "while ! test -e /go; do sleep 1; done; exit 7");
        let goes = node.pod("goes", "sleep 1000");
        for spec in [&stays, &ends, &goes] {
            node.apply(spec).await;
        }
        let before = node.wait_running(&stays.uid).await;
        node.wait_running(&ends.uid).await;
        node.wait_running(&goes.uid).await;
        // The exit happens while nobody looks, and so does a removal in part.
        let begin = v1::ExecStart {
            uid: ends.uid.clone(),
            container: "main".into(),
            command: ["sh", "-c", "sleep 3; touch /go"]
                .map(str::to_owned)
                .to_vec(),
            stdout: true,
            ..Default::default()
        };
        let _exec = node.start_exec(begin).await;
        node.exec(
            &stays.uid,
            &["sh", "-c", "(sleep 3; touch /go) >/dev/null 2>&1 &"],
        )
        .await;
        node.remove(&goes.uid, 2).await;
        node.wait_event(&goes.uid, "Killing").await;
        host.kill_shim();
        std::thread::sleep(std::time::Duration::from_secs(6));
        host.start_shim();

        let node = host.node().await;
        let report = node.wait_running(&stays.uid).await;
        assert_eq!(report.containers[0], before.containers[0]);
        assert_eq!(report.pod_ip, before.pod_ip);
        assert_eq!(node.exec(&stays.uid, &["echo", "hi"]).await.text(), "hi\n");
        assert_eq!(
            node.logs(logs(&stays.uid)).await.unwrap(),
            "before\nafter\n"
        );
        node.wait_report(&goes.uid, "its removal", |report| {
            report.lifecycle() == v1::Lifecycle::Removed
        })
        .await;
        let report = node.wait_report(&ends.uid, "the end", |report| {
            matches!(report.containers[0].state, Some(State::Terminated(_)))
        });
        let report = report.await;
        let state = &report.containers[0].state;
        assert!(
            matches!(state, Some(State::Terminated(end)) if end.exit_code == 7),
            "{state:?}"
        );
        // Wishes go on as if nothing had been.
        node.apply(&stays).await;
        for spec in [&stays, &ends] {
            node.remove_and_wait(&spec.uid).await;
        }
        assert_eq!(host.leftovers(), Vec::<String>::new());
        assert_eq!(host.cgroups(), Vec::<std::path::PathBuf>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn sandboxes_outlive_containerd() {
    on_a_host(|mut host| async move {
        let node = host.node().await;
        let stays = node.pod("stays", "sleep 1000");
        let ends = node.pod("ends", "while ! test -e /go; do sleep 1; done; exit 7");
        for spec in [&stays, &ends] {
            node.apply(spec).await;
            node.wait_running(&spec.uid).await;
        }
        node.exec(
            &ends.uid,
            &["sh", "-c", "(sleep 2; touch /go) >/dev/null 2>&1 &"],
        )
        .await;
        host.kill_containerd();
        let meanwhile = node.pod("meanwhile", "sleep 1000");
        node.apply(&meanwhile).await;
        std::thread::sleep(std::time::Duration::from_secs(5));
        host.start_containerd();
        let report = node.wait_finished(&ends.uid).await;
        assert!(matches!(
            &report.containers[0].state,
            Some(State::Terminated(end)) if end.exit_code == 7
        ));
        node.wait_running(&meanwhile.uid).await;
        assert_eq!(node.exec(&stays.uid, &["echo", "hi"]).await.text(), "hi\n");
        for spec in [&stays, &ends, &meanwhile] {
            node.remove_and_wait(&spec.uid).await;
        }
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_sandbox_without_a_record_is_found_by_its_labels() {
    on_a_host(|mut host| async move {
        let node = host.node().await;
        let spec = node.pod("orphan", "sleep 1000");
        node.apply(&spec).await;
        let before = node.wait_running(&spec.uid).await;
        host.kill_shim();
        std::fs::remove_dir_all(host.path("state/sandboxes")).unwrap();
        host.start_shim();
        let node = host.node().await;
        let report = node.wait_running(&spec.uid).await;
        assert_eq!(
            (report.namespace.as_str(), report.name.as_str()),
            ("default", "orphan")
        );
        assert_eq!(
            report.containers[0].container_id,
            before.containers[0].container_id
        );
        // The virtual node says again what it should be: it goes on with the same container.
        node.apply(&spec).await;
        let report = node.wait_report(&spec.uid, "its generation", |report| {
            report.observed_generation == 1
        });
        assert_eq!(report.await.containers[0].restart_count, 0);
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
        assert_eq!(host.cgroups(), Vec::<std::path::PathBuf>::new());
    });
}
