//! The controller with null hosts, an API server that cannot be reached, and a
//! clock that only moves when nothing else can.

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

fn controller() -> Arc<PodController> {
    let config = Arc::new(crate::config::tests::minimal());
    let metrics = Metrics::register(&mut Registry::default());
    let hosts = Arc::new(Hosts::new(&config.hosts, None, 1, &metrics));
    let client = unreachable_api();
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
    let key = controller.orphans.take().await;
    assert_eq!(key, (name, Uid::from("left-over")));
    controller.orphans.done(&key, true);
    let more = tokio::time::timeout(lost_after, controller.orphans.take()).await;
    assert!(more.is_err(), "only that one");
}
