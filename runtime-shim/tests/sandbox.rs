//! Sandboxes on a real host: containerd, runc, the agent and the service as they are.
//!
//! `cargo test -p sandman-runtime-shim --test sandbox -- --ignored` as root.

mod support;

use sandman_protocol::v1;
use support::on_a_host;
use v1::container_report::State;

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_sandbox_runs_answers_and_leaves_nothing() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let spec = node.pod("first", "echo hello; sleep 1000");
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

        let output = node
            .exec(&spec.uid, &["sh", "-c", "echo out; echo err >&2; exit 3"])
            .await;
        assert_eq!(output.text(), "out\n");
        assert_eq!(output.stderr, b"err\n");
        assert_eq!(output.code, Some(3));

        let removed = node.remove_and_wait(&spec.uid).await;
        assert!(matches!(
            removed.containers[0].state,
            Some(State::Terminated(ref t)) if t.exit_code == 143
        ));
        assert_eq!(host.leftovers(), Vec::<String>::new());
        assert_eq!(host.cgroups(), Vec::<std::path::PathBuf>::new());
    });
}
