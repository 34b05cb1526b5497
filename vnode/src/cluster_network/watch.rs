//! Reads the cluster and publishes the state that follows from it, soon after each change and not
//! more often than hosts can take.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, DefaultBackoff, Event};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch as channel;
use tokio::time::Instant;

use super::cluster::{Cluster, Name, Owned, Scope};
use super::policies::{self, KnownPod, Labels};
use super::services::{Known, SERVICE_NAME, Slice};
use super::state::State;
use crate::errors::brief;

/// Changes come in groups: a Service and its slices, the endpoints of a rollout.
const SETTLE: Duration = Duration::from_millis(10);
/// Between two states.
const PAUSE: Duration = Duration::from_millis(100);

/// Something was read.
struct Read {
    /// What was read is all there is of its kind.
    whole: Option<&'static str>,
    apply: Box<dyn FnOnce(&mut Cluster) + Send>,
}

/// Runs until it is dropped.
pub(super) async fn run(
    client: Client,
    node: String,
    scope: Scope,
    newest: channel::Sender<Option<Arc<State>>>,
) {
    let mut kinds = Vec::new();
    if scope.services {
        kinds.extend([
            follow(
                &client,
                "",
                Known::of,
                Cluster::all_services,
                Cluster::service,
            ),
            follow(
                &client,
                SERVICE_NAME,
                owned,
                Cluster::all_slices,
                Cluster::slice,
            ),
        ]);
    }
    if scope.policies.is_some() {
        kinds.extend([
            follow(&client, "", KnownPod::of, Cluster::all_pods, Cluster::pod),
            follow(
                &client,
                "",
                labels,
                Cluster::all_namespaces,
                Cluster::namespace,
            ),
            follow(
                &client,
                "",
                policies::Known::of,
                Cluster::all_policies,
                Cluster::policy,
            ),
        ]);
    }
    let count = kinds.len();
    let mut read = stream::select_all(kinds);
    let mut cluster = Cluster::new(&node);
    let mut listed = BTreeSet::new();
    let mut last: Option<Instant> = None;
    let mut due: Option<Instant> = None;
    loop {
        tokio::select! {
            event = read.next() => {
                let Some(event) = event else { return };
                listed.extend(event.whole);
                (event.apply)(&mut cluster);
            }
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                newest.send_replace(Some(Arc::new(cluster.state(&scope))));
                last = Some(Instant::now());
                due = None;
            }
        }
        // Half of what there is would take endpoints away from those who have them, and open pods
        // that policies close.
        let known = listed.len() == count;
        if known && due.is_none() && (last.is_none() || cluster.is_changed()) {
            let settled = Instant::now() + SETTLE;
            due = Some(last.map_or(settled, |last| settled.max(last + PAUSE)));
        }
    }
}

/// All objects of a kind that have a label, and then each change, as what is kept of them.
fn follow<K, T>(
    client: &Client,
    label: &str,
    keep: fn(&K) -> Option<T>,
    all: fn(&mut Cluster, HashMap<Name, T>),
    one: fn(&mut Cluster, Name, Option<T>),
) -> BoxStream<'static, Read>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    T: Send + 'static,
{
    let config = watcher::Config::default().labels(label);
    let events = watcher::watcher(Api::<K>::all(client.clone()), config);
    let events = events.backoff(DefaultBackoff::default());
    let read = move |name: Name, kept: Option<T>| Read {
        whole: None,
        apply: Box::new(move |cluster| one(cluster, name, kept)),
    };
    let kind = std::any::type_name::<K>();
    let mut listing = HashMap::new();
    let mut failing = false;
    let all_read = events.filter_map(move |event| {
        let read = match event {
            Ok(event) => {
                failing = false;
                match event {
                    Event::Init => {
                        listing = HashMap::new();
                        None
                    }
                    Event::InitApply(object) => {
                        if let Some(kept) = keep(&object) {
                            listing.insert(name(&object), kept);
                        }
                        None
                    }
                    Event::InitDone => {
                        let listed = std::mem::take(&mut listing);
                        Some(Read {
                            whole: Some(kind),
                            apply: Box::new(move |cluster| all(cluster, listed)),
                        })
                    }
                    Event::Apply(object) => Some(read(name(&object), keep(&object))),
                    Event::Delete(object) => Some(read(name(&object), None)),
                }
            }
            Err(error) => {
                // One line until it works again: it is tried for ever.
                if !failing {
                    failing = true;
                    tracing::warn!(
                        kind = %K::kind(&()),
                        error = brief(&error),
                        "cannot read what [cluster_network] needs; its rights are in \
                         manifests/components/services"
                    );
                }
                None
            }
        };
        futures::future::ready(read)
    });
    all_read.boxed()
}

fn name<K: Resource>(object: &K) -> Name {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn owned(slice: &EndpointSlice) -> Option<Owned> {
    let service = slice.labels().get(SERVICE_NAME)?.clone();
    Some(Owned {
        service: (slice.namespace().unwrap_or_default(), service),
        slice: Slice::of(slice)?,
    })
}

fn labels(namespace: &Namespace) -> Option<Labels> {
    Some(namespace.labels().clone())
}
