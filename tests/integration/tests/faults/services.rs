//! The host service killed while Services change: their rules stay, and the next one catches up.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::api::{Patch, PatchParams, PostParams};
use sandman_integration::{Component, PodBuilder, Scope, container};
use serde_json::json;

#[test]
fn services_work_while_the_host_service_is_down_and_are_right_after() {
    Scope::run(|scope| async move {
        let serve = "mkdir -p /tmp/www && echo here > /tmp/www/index.html && exec busybox httpd -f -p 8080 -h /tmp/www";
        let server = PodBuilder::new("server")
            .container(container(&scope.cluster, "main", serve))
            .metadata(|meta| meta.labels = Some([("app".to_owned(), "server".to_owned())].into()))
            .build();
        scope.ready_pod(&server).await?;
        let services = scope.api::<Service>();
        let object = json!({"metadata": {"name": "s"}, "spec": {
            "selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]}});
        let created = services
            .create(&PostParams::default(), &serde_json::from_value(object)?)
            .await?;
        let address = created.spec.and_then(|spec| spec.cluster_ip);
        let address = address.context("clusterIP")?;
        // Asks all the time, and remembers every answer that it did not get.
        let once = |port: u16| {
            let request = r"printf 'GET / HTTP/1.0\r\n\r\n'";
            format!("{request} | nc -w 20 {address} {port} 2>/dev/null | tail -n 1 | grep -x here")
        };
        let first = once(80);
        let ask = format!(
            "until {first}; do sleep 0.2; done; while true; do {first} >> /tmp/heard || \
             echo lost >> /tmp/heard; sleep 0.1; done"
        );
        let client = PodBuilder::new("client").container(container(&scope.cluster, "main", &ask));
        scope.ready_pod(&client.build()).await?;
        let run = async |script: String| {
            let arguments = ["exec", "client", "--", "sh", "-c", &script];
            scope.kubectl().run(&arguments).await?.ok()
        };
        run("until grep -q here /tmp/heard; do sleep 0.2; done".to_owned()).await?;

        for host in 0..scope.cluster.hosts {
            scope.cluster.kill(Component::RuntimeShim(host)).await?;
        }
        // Meanwhile the Service moves to another port, and a new one comes.
        let patch = json!({"spec": {"ports": [{"port": 81, "targetPort": 8080}]}});
        let both = json!({"spec": {"ports": [
            {"name": "a", "port": 80, "targetPort": 8080},
            {"name": "b", "port": 81, "targetPort": 8080}]}});
        let params = PatchParams::default();
        services.patch("s", &params, &Patch::Merge(both)).await?;
        for host in 0..scope.cluster.hosts {
            scope.cluster.start(Component::RuntimeShim(host)).await?;
        }
        run(format!("until {}; do sleep 0.2; done", once(81))).await?;
        let heard = run("wc -l < /tmp/heard; grep -c lost /tmp/heard; true".to_owned()).await?;
        let text = heard.text();
        let (count, lost) = text.trim().split_once('\n').context("two numbers")?;
        ensure!(count.trim().parse::<u32>()? > 1, "{text}");
        ensure!(lost.trim() == "0", "connections were lost: {text}");

        // What is no port any more is none on the hosts either.
        services.patch("s", &params, &Patch::Merge(patch)).await?;
        let refused = format!(
            "until nc -w 60 {address} 80 < /dev/null 2>&1 | grep -q refused; do sleep 0.2; done"
        );
        run(refused).await?;
        Ok(())
    });
}
