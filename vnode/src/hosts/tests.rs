//! The life of a connection, with a host that does what the test says and a
//! clock that only moves when nothing else can.

use std::collections::VecDeque;
use std::sync::Mutex;

use async_trait::async_trait;
use futures::StreamExt;
use prometheus_client::registry::Registry;
use sandman_protocol::v1::host_client::HostClient;
use sandman_protocol::v1::watch_response::Item;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;

use super::*;
use crate::view::StreamError;

type Feed = mpsc::UnboundedSender<Result<v1::WatchResponse, HostError>>;

/// A host whose connections succeed as often as there are streams for them.
#[derive(Default)]
struct Scripted {
    streams: Mutex<VecDeque<Updates>>,
}

impl Scripted {
    /// The next connection succeeds and is fed by what is returned.
    fn accept(&self) -> Feed {
        let (feed, stream) = mpsc::unbounded_channel();
        self.streams
            .lock()
            .unwrap()
            .push_back(UnboundedReceiverStream::new(stream).boxed());
        feed
    }
}

#[async_trait]
impl Host for Scripted {
    async fn connect(&self) -> Result<(v1::Inventory, Updates), HostError> {
        let stream = self.streams.lock().unwrap().pop_front();
        let stream = stream.ok_or_else(|| HostError::Unreachable("refused".into()))?;
        Ok((v1::Inventory::default(), stream))
    }
    async fn apply(&self, _: v1::SandboxSpec) -> Result<(), HostError> {
        Ok(())
    }
    async fn remove(&self, _: &str, _: Duration, _: &str) -> Result<(), HostError> {
        Ok(())
    }
    async fn forget(&self, _: &str) -> Result<(), HostError> {
        Ok(())
    }
    async fn set_cluster_network(&self, _: v1::ClusterNetworkRequest) -> Result<(), HostError> {
        Ok(())
    }
    async fn stats(&self) -> Result<v1::Stats, HostError> {
        Ok(v1::Stats::default())
    }
    async fn streams(&self) -> Result<HostClient<Channel>, StreamError> {
        Err(StreamError::Unsupported("host".into()))
    }
}

/// Passes on what it is told.
struct Recorder(mpsc::UnboundedSender<Told>);

#[derive(Debug, PartialEq, Eq)]
enum Told {
    Sandboxes(Vec<Uid>),
    Connection,
    Inventory,
}

impl Observer for Recorder {
    fn sandboxes_changed(&self, _: &HostName, uids: &[Uid]) {
        let mut uids = uids.to_vec();
        uids.sort();
        self.0.send(Told::Sandboxes(uids)).unwrap();
    }
    fn connection_changed(&self, _: &HostName) {
        self.0.send(Told::Connection).unwrap();
    }
    fn inventory_changed(&self, _: &HostName) {
        self.0.send(Told::Inventory).unwrap();
    }
    fn event(&self, _: &HostName, _: v1::SandboxEvent) {}
}

struct Setup {
    host: Arc<Scripted>,
    hosts: Arc<Hosts>,
    told: mpsc::UnboundedReceiver<Told>,
}

const NAME: &str = "host-0";

impl Setup {
    fn start() -> Self {
        let host = Arc::new(Scripted::default());
        let metrics = Metrics::register(&mut Registry::default());
        let config = crate::config::tests::minimal();
        let mut hosts = Hosts::new(&config.hosts[..1], None, 1, &metrics);
        for entry in hosts.entries.values_mut() {
            Arc::get_mut(entry).unwrap().host = Arc::clone(&host) as _;
        }
        let hosts = Arc::new(hosts);
        let (sender, told) = mpsc::unbounded_channel();
        let observer: Arc<dyn Observer> = Arc::new(Recorder(sender));
        let tasks = TaskTracker::new();
        hosts.start(
            &observer,
            Duration::from_secs(40),
            &tasks,
            &CancellationToken::new(),
        );
        Self { host, hosts, told }
    }

    fn view(&self) -> HostView {
        self.hosts.view(&NAME.into()).unwrap()
    }

    async fn next(&mut self) -> Told {
        self.told.recv().await.unwrap()
    }
}

fn send(feed: &Feed, item: Item) {
    feed.send(Ok(v1::WatchResponse { item: Some(item) }))
        .unwrap();
}

fn report(uid: &str) -> Item {
    Item::Report(v1::SandboxReport {
        uid: uid.into(),
        ..Default::default()
    })
}

fn uids(uids: &[&str]) -> Told {
    Told::Sandboxes(uids.iter().map(|uid| Uid::from(*uid)).collect())
}

#[tokio::test(start_paused = true)]
async fn a_host_is_lost_after_its_time_and_found_again() {
    let mut setup = Setup::start();
    let feed = setup.host.accept();
    send(&feed, report("a"));
    send(&feed, Item::Synced(v1::Synced {}));
    assert_eq!(setup.next().await, Told::Inventory);
    assert_eq!(setup.next().await, Told::Connection);
    assert_eq!(setup.next().await, uids(&["a"]));
    assert_eq!(
        (setup.view().connection, setup.view().epoch),
        (Connection::Synced, 1)
    );

    let down_at = tokio::time::Instant::now();
    drop(feed);
    assert_eq!(setup.next().await, Told::Connection);
    assert!(setup.view().connection == Connection::Down && !setup.view().lost);
    assert_eq!(setup.next().await, Told::Connection);
    assert!(setup.view().lost);
    assert_eq!(down_at.elapsed().as_secs(), 40);
    assert!(
        setup.hosts.report(&NAME.into(), "a").is_some(),
        "the last word stays known"
    );

    let feed = setup.host.accept();
    send(&feed, report("a"));
    send(&feed, report("b"));
    send(&feed, Item::Synced(v1::Synced {}));
    assert_eq!(setup.next().await, Told::Inventory);
    assert_eq!(setup.next().await, Told::Connection);
    assert_eq!(setup.next().await, uids(&["b"]));
    assert_eq!(setup.next().await, Told::Connection, "found again");
    assert!(!setup.view().lost);
    assert_eq!(setup.view().epoch, 2);
}

#[tokio::test(start_paused = true)]
async fn a_host_that_breaks_the_protocol_is_cut_off() {
    let mut setup = Setup::start();
    let feed = setup.host.accept();
    send(&feed, Item::Synced(v1::Synced {}));
    assert_eq!(setup.next().await, Told::Inventory);
    assert_eq!(setup.next().await, Told::Connection);
    assert_eq!(setup.next().await, uids(&[]));
    send(&feed, report(""));
    assert_eq!(setup.next().await, Told::Connection);
    assert_eq!(setup.view().connection, Connection::Down);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_never_ends_is_no_connection() {
    let mut setup = Setup::start();
    let feed = setup.host.accept();
    send(&feed, report("a"));
    assert_eq!(setup.next().await, Told::Inventory);
    assert_eq!(setup.view().connection, Connection::Listing);
    // Lost on time, although the host answers: nothing is known for certain.
    assert_eq!(setup.next().await, Told::Connection);
    assert!(setup.view().lost);
    feed.closed().await;
    assert_eq!(setup.view().epoch, 0);
    assert!(setup.hosts.report(&NAME.into(), "a").is_none());
}
