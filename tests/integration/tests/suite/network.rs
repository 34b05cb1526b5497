//! Services as sandboxes see them: by ClusterIP, on their own host and across hosts.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Container, ContainerPort, Pod, Service};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use sandman_integration::{PodBuilder, Scope, container, images, wait_gone};
use serde_json::json;

/// Runs a shell script in a pod; gives its output.
async fn shell(scope: &Scope, pod: &str, script: &str) -> Result<String> {
    let arguments = ["exec", pod, "--", "sh", "-c", script];
    let output = scope.kubectl().run(&arguments).await?.ok()?;
    Ok(output.text().trim().to_owned())
}

/// A pod that answers on port 8080 with its name, and whose port has a name.
fn server(scope: &Scope, name: &str) -> Pod {
    let script = format!(
        "mkdir -p /tmp/www && echo {name} > /tmp/www/index.html && exec busybox httpd -f -p 8080 -h /tmp/www"
    );
    let main = Container {
        ports: Some(vec![ContainerPort {
            name: Some("web".to_owned()),
            container_port: 8080,
            ..Default::default()
        }]),
        ..container(&scope.cluster, "main", &script)
    };
    PodBuilder::new(name)
        .container(main)
        .metadata(|meta| {
            meta.labels = Some(BTreeMap::from([("app".to_owned(), "server".to_owned())]));
        })
        .build()
}

/// A Service of the servers on port 80; gives its address.
async fn service(scope: &Scope, changes: serde_json::Value) -> Result<String> {
    let mut spec = json!({
        "selector": {"app": "server"},
        "ports": [{"name": "http", "port": 80, "targetPort": "web"}],
    });
    let fields = spec.as_object_mut().context("a map")?;
    fields.extend(changes.as_object().context("a map")?.clone());
    let object = json!({"metadata": {"name": "servers"}, "spec": spec});
    let created = scope
        .api::<Service>()
        .create(&PostParams::default(), &serde_json::from_value(object)?)
        .await?;
    created
        .spec
        .and_then(|spec| spec.cluster_ip)
        .context("the Service has an address")
}

/// Creates pods until each host has one; gives one a host.
async fn one_a_host(scope: &Scope, build: impl Fn(&str) -> Pod, name: &str) -> Result<Vec<String>> {
    let mut by_host = BTreeMap::new();
    for index in 0..8 * scope.cluster.hosts {
        let name = format!("{name}-{index}");
        let pod = scope.ready_pod(&build(&name)).await?;
        let host = pod.status.and_then(|status| status.host_ip);
        by_host.insert(host.context("hostIP")?, name);
        if by_host.len() == scope.cluster.hosts as usize {
            return Ok(by_host.into_values().collect());
        }
    }
    anyhow::bail!("pods came to {} hosts only: {by_host:?}", by_host.len())
}

/// Prints the answer of a server, if there is one. Not by `wget`: the image's is static, and crashes
/// when it resolves.
fn ask(address: &str, port: u16) -> String {
    format!(r"printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 5 {address} {port} 2>/dev/null | tail -n 1")
}

/// The same until there is one.
fn fetch(address: &str, port: u16) -> String {
    let ask = ask(address, port);
    format!("until {ask} | grep .; do sleep 0.2; done")
}

#[test]
fn services_lead_to_their_pods_from_every_host() {
    Scope::run(|scope| async move {
        let servers = one_a_host(&scope, |name| server(&scope, name), "server").await?;
        let client = |name: &str| PodBuilder::sleeper(&scope.cluster, name).build();
        let clients = one_a_host(&scope, client, "client").await?;
        let address = service(&scope, json!({})).await?;
        // Each is reached, by each: from the same host, from others, and from itself.
        let wanted = servers
            .iter()
            .map(|name| format!("grep -qx {name} /tmp/all"));
        let wanted = wanted.collect::<Vec<_>>().join(" && ");
        let ask = ask(&address, 80);
        let script =
            format!("true > /tmp/all; until {wanted}; do {ask} >> /tmp/all; done; echo all");
        for pod in clients.iter().chain(&servers) {
            let heard = shell(&scope, pod, &script).await?;
            ensure!(heard == "all", "{pod}: {heard}");
        }
        // A port that the Service does not have is refused, not silent.
        let script = format!("nc -w 60 {address} 81 < /dev/null 2>&1; true");
        let refused = shell(&scope, &clients[0], &script).await?;
        ensure!(refused.contains("refused"), "{refused:?}");
        Ok(())
    });
}

#[test]
fn a_service_follows_its_pods() {
    Scope::run(|scope| async move {
        let pods = scope.api::<Pod>();
        let first = scope.ready_pod(&server(&scope, "first")).await?;
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "client").build())
            .await?;
        let address = service(&scope, json!({})).await?;
        let fetched = fetch(&address, 80);
        ensure!(shell(&scope, "client", &fetched).await? == "first");

        pods.delete("first", &DeleteParams::default()).await?;
        let uid = first.metadata.uid.context("uid")?;
        wait_gone(&pods, "first", &uid).await?;
        // Without endpoints connections are refused.
        let script = format!(
            "until nc -w 60 {address} 80 < /dev/null 2>&1 | grep -q refused; do sleep 0.2; done; echo refused"
        );
        ensure!(shell(&scope, "client", &script).await? == "refused");

        scope.ready_pod(&server(&scope, "second")).await?;
        ensure!(shell(&scope, "client", &fetched).await? == "second");
        // Another port of the same Service.
        let patch =
            json!({"spec": {"ports": [{"name": "http", "port": 8000, "targetPort": "web"}]}});
        scope
            .api::<Service>()
            .patch("servers", &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        let fetched = fetch(&address, 8000);
        ensure!(shell(&scope, "client", &fetched).await? == "second");
        Ok(())
    });
}

#[test]
fn a_client_with_affinity_stays_with_its_pod() {
    Scope::run(|scope| async move {
        for name in ["one", "two", "three"] {
            scope.ready_pod(&server(&scope, name)).await?;
        }
        scope
            .ready_pod(&PodBuilder::sleeper(&scope.cluster, "client").build())
            .await?;
        let address = service(&scope, json!({"sessionAffinity": "ClientIP"})).await?;
        let fetch = fetch(&address, 80);
        let script = format!("for i in $(seq 40); do {fetch}; done | sort | uniq | wc -l");
        // Endpoints come one by one, so that the first draws may be among fewer: the draw stays.
        ensure!(shell(&scope, "client", &script).await? == "1");
        Ok(())
    });
}

#[test]
fn the_api_server_is_reached_as_in_cluster_configuration_says() {
    Scope::run(|scope| async move {
        let main = Container {
            image: Some(images::python(&scope.cluster)),
            ..container(&scope.cluster, "main", "exec sleep 1000000")
        };
        let pod = PodBuilder::new("inside").container(main).build();
        scope.ready_pod(&pod).await?;
        // What `load_incluster_config` of every client library does.
        let program = r#"
import json, os, ssl, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
read = lambda name: open(folder + name).read()
host = os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
trust = ssl.create_default_context(cafile=folder + "ca.crt")
def get(path):
    request = urllib.request.Request("https://" + host + path)
    request.add_header("Authorization", "Bearer " + read("token"))
    return urllib.request.urlopen(request, context=trust, timeout=60).read()
print(json.loads(get("/version"))["major"])
try:
    get("/api/v1/namespaces/" + read("namespace") + "/pods")
except urllib.error.HTTPError as error:
    print(json.loads(error.read())["message"])
"#;
        let output = scope
            .kubectl()
            .run(&["exec", "inside", "--", "python3", "-c", program])
            .await?
            .ok()?
            .text();
        let account = format!("system:serviceaccount:{}:default", scope.namespace);
        ensure!(output.starts_with("1\n"), "{output}");
        ensure!(output.contains(&account), "{output}");
        Ok(())
    });
}

#[test]
fn names_of_services_and_pods_are_resolved() {
    Scope::run(|scope| async move {
        scope.ready_pod(&server(&scope, "server")).await?;
        let address = service(&scope, json!({})).await?;
        let main = Container {
            image: Some(images::python(&scope.cluster)),
            ..container(&scope.cluster, "main", "exec sleep 1000000")
        };
        scope
            .ready_pod(&PodBuilder::new("client").container(main).build())
            .await?;
        let namespace = &scope.namespace;
        // By each of the search domains, and a name that is not there.
        let program = format!(
            r#"
import socket, urllib.request
for name in ["servers", "servers.{namespace}", "servers.{namespace}.svc.cluster.local"]:
    while True:
        try:
            print(socket.gethostbyname(name))
            break
        except socket.gaierror:
            pass
print(urllib.request.urlopen("http://servers/", timeout=60).read().decode().strip())
print(socket.gethostbyname("kubernetes.default.svc"))
try:
    print(socket.gethostbyname("nobody.{namespace}.svc.cluster.local"))
except socket.gaierror:
    print("unknown")
"#
        );
        let output = scope
            .kubectl()
            .run(&["exec", "client", "--", "python3", "-c", &program])
            .await?
            .ok()?
            .text();
        let lines: Vec<_> = output.lines().collect();
        ensure!(lines[..3] == [&address; 3], "{output}");
        ensure!(lines[3..] == ["server", "10.96.0.1", "unknown"], "{output}");
        Ok(())
    });
}
