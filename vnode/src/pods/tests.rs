//! The controller with null hosts, an API server that cannot be reached, and a
//! clock that only moves when nothing else can.

use http_body_util::BodyExt;
use kube::client::Body;
use prometheus_client::registry::Registry;
use sandman_protocol::v1;
use serde_json::json;
use tokio::sync::mpsc;

use super::*;

const HOST: &str = "host-0";

/// A client whose every request fails.
pub(crate) fn unreachable_api() -> Client {
    let refuse = |_: http::Request<Body>| async {
        Err::<http::Response<Body>, _>(std::io::Error::other("the API server is away"))
    };
    Client::new(tower::service_fn(refuse), "default")
}

/// A client whose every request is passed on before it fails.
fn recording_api() -> (Client, mpsc::UnboundedReceiver<serde_json::Value>) {
    let (sender, bodies) = mpsc::unbounded_channel();
    let record = move |request: http::Request<Body>| {
        let sender = sender.clone();
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            sender.send(serde_json::from_slice(&body).unwrap()).unwrap();
            Err::<http::Response<Body>, _>(std::io::Error::other("the API server is away"))
        }
    };
    (Client::new(tower::service_fn(record), "default"), bodies)
}

fn controller() -> Arc<PodController> {
    controller_with(unreachable_api())
}

fn controller_with(client: Client) -> Arc<PodController> {
    let config = Arc::new(crate::config::tests::minimal());
    let metrics = Metrics::register(&mut Registry::default());
    let hosts = Arc::new(Hosts::new(&config.hosts, None, 1, &metrics));
    let (events, _) = crate::events::channel(client.clone(), &config.node_name, &metrics);
    PodController::new(config, client, hosts, events, metrics)
}

/// Passes on which sandboxes changed, in place of the controller.
struct Reports(mpsc::UnboundedSender<Uid>);

impl Observer for Reports {
    fn sandboxes_changed(&self, _: &HostName, uids: &[Uid]) {
        for uid in uids {
            self.0.send(Uid::clone(uid)).unwrap();
        }
    }
    fn connection_changed(&self, _: &HostName) {}
    fn inventory_changed(&self, _: &HostName) {}
    fn event(&self, _: &HostName, _: v1::SandboxEvent) {}
}

fn pod(uid: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": uid, "uid": uid, "resourceVersion": "1"},
        "spec": {"containers": [{"name": "main", "image": "i"}]},
    }))
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn sandboxes_left_over_while_a_host_was_away_are_found() {
    let controller = controller();
    let (sender, mut reports) = mpsc::unbounded_channel();
    let observer: Arc<dyn Observer> = Arc::new(Reports(sender));
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let lost_after = Duration::from_secs(40);
    controller.hosts.start(&observer, lost_after, &tasks, &stop);
    controller.hosts.settled(SETTLE).await;
    let name = HostName::from(HOST);
    let host = controller.hosts.host(&name).unwrap();
    for uid in ["kept", "left-over"] {
        let spec = v1::SandboxSpec {
            uid: uid.to_owned(),
            ..Default::default()
        };
        host.apply(spec).await.unwrap();
        assert_eq!(&*reports.recv().await.unwrap(), uid);
    }
    controller.store.observe(pod("kept")).unwrap();

    // In its new list both are as they were before.
    controller.connection_changed(&name);
    let orphans = &controller.orphans[&name];
    let uid = orphans.take().await;
    assert_eq!(&*uid, "left-over");
    orphans.done(&uid, true);
    let more = tokio::time::timeout(lost_after, orphans.take()).await;
    assert!(more.is_err(), "only that one");
}

#[tokio::test(start_paused = true)]
async fn a_patch_leaves_alone_what_others_wrote_meanwhile() {
    let (client, mut bodies) = recording_api();
    let controller = controller_with(client);
    let entry = controller.store.observe(pod("a")).unwrap();
    let seen = entry.api();
    let new = serde_json::from_value(json!({"phase": "Running"})).unwrap();
    let mut newer = pod("a");
    newer.metadata.resource_version = Some("2".to_owned());
    newer.status = serde_json::from_value(json!({
        "conditions": [{"type": "example.com/gate", "status": "True"}],
    }))
    .unwrap();
    assert!(entry.observe(newer));

    let mut work = entry.work.lock().await;
    let written = controller
        .write_status(&entry, &mut work, &seen, &new)
        .await;
    assert!(written.is_err(), "it is tried again");
    assert_eq!(
        bodies.recv().await.unwrap(),
        json!({"metadata": {"uid": "a"}, "status": {"phase": "Running"}})
    );
}

#[tokio::test(start_paused = true)]
async fn pods_that_wait_for_room_are_run_together() {
    let controller = controller();
    let waiting = Uid::from("waiting");
    lock(&controller.unplaced).insert(Uid::clone(&waiting));
    let room = Arc::clone(&controller);
    let room = tokio::spawn(async move { room.follow_room().await });
    let start = Instant::now();
    for wait in [Duration::ZERO, ROOM_INTERVAL] {
        for _ in 0..100 {
            controller.try_unplaced();
        }
        let uid = controller.queue.take().await;
        assert_eq!(
            (&uid, start.elapsed().as_secs()),
            (&waiting, wait.as_secs())
        );
        controller.queue.done(&uid, true);
    }
    let more = tokio::time::timeout(10 * ROOM_INTERVAL, controller.queue.take()).await;
    assert!(more.is_err(), "one run for all that made room");
    room.abort();
}

#[tokio::test(start_paused = true)]
async fn nothing_is_kept_of_a_pod_that_vanishes_in_its_run() {
    let controller = controller();
    let uid = Uid::from("gone");
    // As a run does that began before the pod was gone.
    let requests = resources::requests(&pod("gone"));
    lock(&controller.ledger).book(&uid, &HOST.into(), requests, None);
    lock(&controller.unplaced).insert(Uid::clone(&uid));
    controller.queue.add(Uid::clone(&uid));
    let stop = CancellationToken::new();
    tokio::select! {
        () = controller.work(&stop) => {}
        () = controller.room.notified() => {}
    }
    assert_eq!(lock(&controller.ledger).release(&uid), None);
    assert!(lock(&controller.unplaced).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_stream_waits_for_a_host_that_restarts_and_no_longer() {
    use crate::view::{HostStreams, StreamError};
    let controller = controller();
    let entry = controller.store.observe(pod("a")).unwrap();
    entry.set_host(HOST.into());
    let start = Instant::now();
    let client = HostStreams::client(&*controller, "a").await;
    assert!(matches!(client, Err(StreamError::Unreachable(host)) if host == HOST.into()));
    let waited = start.elapsed();
    assert!(waited > Duration::from_secs(5) && waited < Duration::from_secs(15));
}
