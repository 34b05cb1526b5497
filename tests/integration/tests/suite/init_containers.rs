//! Init containers run one by one, before the others, and block on failure.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use sandman_integration::{
    PodBuilder, Scope, condition, container, container_state, is_phase, wait_pod,
};

#[test]
fn they_run_in_order_before_the_main_container() {
    Scope::run(|scope| async move {
        let cluster = &scope.cluster;
        let pod = PodBuilder::new("order")
            .restart_policy("Never")
            .init_container(container(cluster, "one", "sleep 1; echo one >> /data/log"))
            .init_container(container(cluster, "two", "echo two >> /data/log"))
            .container(container(
                cluster,
                "main",
                "echo main >> /data/log; cat /data/log",
            ))
            .shared_folder("/data")
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "order", "succeeded", |pod: &Pod| {
            is_phase(pod, "Succeeded")
        })
        .await?;
        ensure!(condition(&pod, "Initialized") == "True", "{:?}", pod.status);
        let log = scope.kubectl().run(&["logs", "order"]).await?.ok()?.text();
        ensure!(log == "one\ntwo\nmain\n", "{log:?}");
        Ok(())
    });
}

#[test]
fn a_failing_one_fails_the_pod_that_never_restarts() {
    Scope::run(|scope| async move {
        let cluster = &scope.cluster;
        let pod = PodBuilder::new("stuck")
            .restart_policy("Never")
            .init_container(container(cluster, "one", "exit 9"))
            .container(container(cluster, "main", "exec sleep 1000000"))
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "stuck", "failed", |pod: &Pod| {
            is_phase(pod, "Failed")
        })
        .await?;
        let one = container_state(&pod, "one")
            .and_then(|state| state.terminated.as_ref())
            .context("init container is terminated")?;
        ensure!(one.exit_code == 9, "{one:?}");
        let main = container_state(&pod, "main").context("main has a state")?;
        ensure!(
            main.running.is_none() && main.terminated.is_none(),
            "main ran: {main:?}"
        );
        Ok(())
    });
}

#[test]
fn a_failing_one_is_tried_again() {
    Scope::run(|scope| async move {
        let cluster = &scope.cluster;
        let pod = PodBuilder::new("retry")
            .init_container(container(
                cluster,
                "one",
                "test -e /data/again && exit 0; touch /data/again; exit 1",
            ))
            .container(container(cluster, "main", "exec sleep 1000000"))
            .shared_folder("/data")
            .build();
        let pod = scope.ready_pod(&pod).await?;
        let status = pod.status.context("status")?;
        let one = &status
            .init_container_statuses
            .context("initContainerStatuses")?[0];
        ensure!(one.restart_count == 1, "{one:?}");
        Ok(())
    });
}
