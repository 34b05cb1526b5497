//! All sandboxes of the host: starts a worker for each, passes wishes and hints on, answers
//! questions about them.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use sandman_protocol::v1;
use tokio::sync::{Notify, broadcast};
use tokio::task::JoinSet;
use tracing::{error, info, warn};

use super::adopt;
use super::facts::{Facts, Removal};
use super::identity::Identity;
use super::jobs::Host;
use super::plan::MIN_GRACE;
use super::room::request;
use super::store::Record;
use super::validate::{Refusal, check, is_uid, same_host_port};
use super::view::View;
use super::worker::{Inbox, Shared, Worker};
use crate::runtime::{ContainerRecord, RuntimeEvent};
use crate::spec::resources::{Qos, cpu_shares, qos, shared_cgroup};

const RETRY: Duration = Duration::from_secs(1);

/// Why a wish was not taken.
#[derive(Debug, thiserror::Error)]
pub enum WishError {
    /// The spec is refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The sandbox is being removed, or was; a UID never comes back.
    #[error("sandbox {0} is being removed")]
    Removing(String),
    /// It does not fit.
    #[error("{0}")]
    NoRoom(String),
    /// It could not be written down.
    #[error("cannot write the record: {0}")]
    Store(#[from] std::io::Error),
}

pub(super) struct Entry {
    pub(super) shared: Arc<Shared>,
    /// What the virtual node asked for, with the sizes that this host gives.
    pub(super) spec: v1::SandboxSpec,
    /// What it asked for, if that has other sizes.
    pub(super) ungiven: Option<Ungiven>,
    pub(super) removing: bool,
}

/// A wish for sizes that were not given.
pub(super) struct Ungiven {
    pub(super) wish: v1::SandboxSpec,
    pub(super) since: Timestamp,
}

impl Entry {
    fn new(shared: Arc<Shared>, spec: v1::SandboxSpec, removing: bool) -> Self {
        Self {
            shared,
            spec,
            ungiven: None,
            removing,
        }
    }

    /// What the virtual node asked for last.
    pub(super) fn wish(&self) -> &v1::SandboxSpec {
        self.ungiven.as_ref().map_or(&self.spec, |it| &it.wish)
    }
}

/// The sandboxes of this host.
pub struct Sandboxes {
    pub(super) host: Arc<Host>,
    pub(super) allocatable: v1::Resources,
    entries: Mutex<HashMap<String, Entry>>,
    /// Weight that the cgroup of burstable pods has; 0 before it has one.
    burstable_shares: AtomicU64,
}

impl Sandboxes {
    /// Takes over what is recorded and what runs, then follows the runtime. Returns when every
    /// sandbox has been looked at once.
    ///
    /// # Errors
    /// The records cannot be listed.
    pub async fn start(host: Arc<Host>, allocatable: v1::Resources) -> std::io::Result<Arc<Self>> {
        // Before the look at the states, so that nothing between is missed.
        let events = host.runtime.events();
        let records = host.store.load()?;
        keep_addresses(&host, &records);
        keep_users(&host, &records);
        let found = find(&host).await;
        let sandboxes = Arc::new(Self {
            host,
            allocatable,
            entries: Mutex::new(HashMap::new()),
            burstable_shares: AtomicU64::new(0),
        });
        sandboxes.bound_shared_memory();
        sandboxes.adopt(records, found).await;
        sandboxes.weigh_burstable(&sandboxes.lock());
        tokio::spawn(follow(sandboxes.clone(), events));
        Ok(sandboxes)
    }

    async fn adopt(
        &self,
        mut records: BTreeMap<String, Record>,
        mut found: HashMap<String, Vec<Identity>>,
    ) {
        for (uid, identities) in &found {
            if !records.contains_key(uid)
                && let Some(spec) = adopt::skeleton(identities)
            {
                warn!(pod_uid = uid, "found containers without a record");
                records.insert(
                    uid.clone(),
                    Record {
                        spec,
                        facts: Facts::default(),
                    },
                );
            }
        }
        let mut workers = JoinSet::new();
        for (uid, record) in records {
            let shared = new_shared(&record.spec);
            let removing = record.facts.removal.is_some() || record.facts.removed;
            let entry = Entry::new(shared.clone(), record.spec.clone(), removing);
            self.lock().insert(uid.clone(), entry);
            let identities = found.remove(&uid).unwrap_or_default();
            let mut worker =
                Worker::new(self.host.clone(), shared, record.spec, record.facts, false);
            workers.spawn(async move {
                worker.adopt(identities).await;
                tokio::spawn(worker.run());
            });
        }
        let count = workers.len();
        while let Some(done) = workers.join_next().await {
            if let Err(error) = done {
                error!(%error, "a sandbox could not be taken over");
            }
        }
        info!(sandboxes = count, "took over what was here");
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What all sandboxes share.
    #[must_use]
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// States what should be true of a sandbox. Returns its address, once known.
    ///
    /// # Errors
    /// See [`WishError`].
    pub fn apply(&self, spec: v1::SandboxSpec) -> Result<String, WishError> {
        check(&spec, &self.host.access, |handler| {
            self.host.runtime_types.contains_key(handler)
        })?;
        if let (true, Err(why)) = (spec.own_users, &self.host.users) {
            let text = format!("spec.hostUsers: false is not possible on this host: {why}");
            return Err(Refusal::Invalid(text).into());
        }
        let uid = spec.uid.clone();
        let mut entries = self.lock();
        if let Some(entry) = entries.get(&uid) {
            if entry.removing {
                return Err(WishError::Removing(uid));
            }
            if *entry.wish() != spec {
                self.change(&mut entries, &uid, spec, Timestamp::now())?;
            }
        } else {
            self.check_room(&entries, &spec)?;
            self.check_ports(&entries, &spec)?;
            self.host.store.write_spec(&spec)?;
            let shared = new_shared(&spec);
            let worker = Worker::new(
                self.host.clone(),
                shared.clone(),
                spec.clone(),
                Facts::default(),
                true,
            );
            tokio::spawn(worker.run());
            entries.insert(uid.clone(), Entry::new(shared, spec, false));
        }
        self.weigh_burstable(&entries);
        drop(entries);
        Ok(self
            .host
            .board
            .report(&uid)
            .map(|report| report.pod_ip.clone())
            .unwrap_or_default())
    }

    /// Pods without limits share a memory cgroup: together they have what the host gives to pods.
    fn bound_shared_memory(&self) {
        let path = shared_cgroup(&self.host.limits.cgroup_parent);
        let bytes = self.allocatable.memory_bytes;
        let bounded = self.host.stats.limit_memory(&path.to_string_lossy(), bytes);
        if let Err(error) = bounded {
            warn!(cgroup = %path.display(), %error, "cannot bound the memory of pods without limits");
        }
    }

    /// Burstable pods together weigh what they requested, and so stand up to guaranteed ones
    /// (`setCPUCgroupConfig` of the kubelet).
    pub(super) fn weigh_burstable(&self, entries: &HashMap<String, Entry>) {
        let burstable = entries
            .values()
            .filter(|entry| entry.spec.schema > 0 && qos(&entry.spec) == Qos::Burstable);
        let millis = burstable.fold(0_u64, |sum, entry| {
            sum.saturating_add(request(&entry.spec).cpu_millis)
        });
        let shares = cpu_shares(millis);
        if self.burstable_shares.swap(shares, Ordering::Relaxed) == shares {
            return;
        }
        let parent = &self.host.limits.cgroup_parent;
        for (class, shares) in [(Qos::Burstable, shares), (Qos::BestEffort, cpu_shares(0))] {
            let path = parent.join(class.cgroup().unwrap_or_default());
            if let Err(error) = self.host.stats.weigh(&path.to_string_lossy(), shares) {
                warn!(cgroup = %path.display(), %error, "cannot set the weight of a class of pods");
            }
        }
    }

    /// A port of the host belongs to one pod, and those of this service to none.
    fn check_ports(
        &self,
        entries: &HashMap<String, Entry>,
        spec: &v1::SandboxSpec,
    ) -> Result<(), WishError> {
        for port in &spec.host_ports {
            let taken = |text: String| {
                Refusal::Invalid(format!(
                    "ports[].hostPort: {} {} {text}",
                    port.protocol, port.host_port
                ))
            };
            if port.protocol == "TCP"
                && self
                    .host
                    .own_ports
                    .iter()
                    .any(|own| u32::from(*own) == port.host_port)
            {
                return Err(taken("is this host's own".to_owned()).into());
            }
            let holder = entries.values().find(|entry| {
                let removed = self
                    .host
                    .board
                    .report(&entry.spec.uid)
                    .is_some_and(|report| report.lifecycle() == v1::Lifecycle::Removed);
                let ports = &entry.spec.host_ports;
                !removed && ports.iter().any(|other| same_host_port(port, other))
            });
            if let Some(holder) = holder {
                let (namespace, name) = (&holder.spec.namespace, &holder.spec.name);
                return Err(taken(format!("belongs to pod {namespace}/{name}")).into());
            }
        }
        Ok(())
    }

    /// Starts or hastens the end of a sandbox.
    ///
    /// # Errors
    /// Only [`WishError::Store`] and a UID that cannot be one.
    pub fn remove(
        &self,
        uid: &str,
        grace: SignedDuration,
        reason: String,
    ) -> Result<(), WishError> {
        if !is_uid(uid) {
            return Err(Refusal::Invalid(format!("uid: {uid:?} is not a pod UID")).into());
        }
        let now = Timestamp::now();
        let deadline = now.saturating_add(grace.max(MIN_GRACE)).unwrap_or(now);
        let removal = Removal { deadline, reason };
        let mut entries = self.lock();
        if let Some(entry) = entries.get_mut(uid) {
            entry.removing = true;
            entry.shared.send(|inbox| {
                if inbox
                    .removal
                    .as_ref()
                    .is_none_or(|old| removal.deadline < old.deadline)
                {
                    inbox.removal = Some(removal);
                }
            });
            return Ok(());
        }
        // Never seen here: written down as removed, so that a late Apply cannot bring it back.
        let spec = v1::SandboxSpec {
            uid: uid.to_owned(),
            ..Default::default()
        };
        let facts = Facts {
            removal: Some(removal),
            removed: true,
            ..Default::default()
        };
        self.host.store.write_spec(&spec)?;
        self.host.store.write_facts(uid, &facts)?;
        let shared = new_shared(&spec);
        let worker = Worker::new(
            self.host.clone(),
            shared.clone(),
            spec.clone(),
            facts,
            false,
        );
        tokio::spawn(worker.run());
        entries.insert(uid.to_owned(), Entry::new(shared, spec, true));
        Ok(())
    }

    /// Drops the record of a removed sandbox. One that is still there is removed first; asking
    /// again is right.
    ///
    /// # Errors
    /// [`WishError::Removing`] while something of it is left; [`WishError::Store`].
    pub fn forget(&self, uid: &str) -> Result<(), WishError> {
        let mut entries = self.lock();
        if !entries.contains_key(uid) {
            return Ok(());
        }
        let report = self.host.board.report(uid);
        if report.is_none_or(|report| report.lifecycle() != v1::Lifecycle::Removed) {
            return Err(WishError::Removing(uid.to_owned()));
        }
        self.host.store.remove(uid)?;
        let gone = entries.remove(uid);
        self.weigh_burstable(&entries);
        if let Some(entry) = gone {
            // The worker takes its report back itself, so that none follows.
            entry.shared.send(|inbox| inbox.stop = true);
        }
        Ok(())
    }

    /// What all sandboxes should be that are not being removed.
    #[must_use]
    pub fn specs(&self) -> Vec<v1::SandboxSpec> {
        let entries = self.lock();
        let wanted = entries.values().filter(|entry| !entry.removing);
        wanted.map(|entry| entry.spec.clone()).collect()
    }

    /// Ends a sandbox for the sake of the others. One that has ended already stays as it is.
    pub fn evict(&self, uid: &str, message: &str) {
        if let Some(entry) = self.lock().get(uid) {
            let message = message.to_owned();
            entry.shared.send(|inbox| inbox.eviction = Some(message));
        }
    }

    /// A sandbox as of its last step.
    #[must_use]
    pub fn view(&self, uid: &str) -> Option<Arc<View>> {
        let shared = self.lock().get(uid)?.shared.clone();
        let view = shared
            .view
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        Some(view)
    }

    /// All sandboxes as of their last steps, by UID.
    #[must_use]
    pub fn views(&self) -> Vec<(String, Arc<View>)> {
        let entries = self.lock();
        let view = |shared: &Shared| {
            shared
                .view
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone()
        };
        entries
            .iter()
            .map(|(uid, entry)| (uid.clone(), view(&entry.shared)))
            .collect()
    }

    fn look(&self, uid: &str) {
        if let Some(entry) = self.lock().get(uid) {
            entry.shared.send(|inbox| inbox.look = true);
        }
    }

    fn look_everywhere(&self) {
        for entry in self.lock().values() {
            entry.shared.send(|inbox| inbox.look = true);
        }
    }
}

fn new_shared(spec: &v1::SandboxSpec) -> Arc<Shared> {
    let view = View {
        namespace: spec.namespace.clone(),
        name: spec.name.clone(),
        cgroup: std::path::PathBuf::new(),
        lifecycle: v1::Lifecycle::Active,
        containers: BTreeMap::new(),
    };
    Arc::new(Shared {
        inbox: Mutex::new(Inbox::default()),
        wake: Notify::new(),
        view: Mutex::new(Arc::new(view)),
    })
}

/// Before any is handed out: the addresses of sandboxes whose link the host lost.
fn keep_addresses(host: &Host, records: &BTreeMap<String, Record>) {
    let with_ports = records.iter().filter(|(_, record)| {
        // Schema 0 is the record of nothing but a removal.
        record.spec.schema > 0 && !record.facts.removed
    });
    let ports = with_ports.filter_map(|(uid, record)| {
        let IpAddr::V4(address) = record.facts.pod_ip? else {
            return None;
        };
        Some((uid.as_str(), address, record.spec.host_ports.as_slice()))
    });
    if let Err(error) = host.network.keep_ports(ports) {
        warn!(%error, "cannot forward the host's ports to the sandboxes that had them");
    }
    host.network
        .keep_closed(records.iter().filter_map(|(uid, record)| {
            let under = record.spec.await_policies && !record.facts.removed;
            (under && record.spec.network() == v1::NetworkMode::Pod).then_some(uid.as_str())
        }));
    for (uid, record) in records {
        // A pod in the host's network has the host's address, which is not of the pool.
        let own = !record.facts.removed && record.spec.network() != v1::NetworkMode::Host;
        if let Some(address) = record.facts.pod_ip.filter(|_| own)
            && !host.network.keep(uid, address)
        {
            warn!(pod_uid = uid, %address, "the address of a sandbox is in use by another");
        }
    }
}

fn keep_users(host: &Host, records: &BTreeMap<String, Record>) {
    let Ok(users) = &host.users else { return };
    let holding = records.iter().filter(|(_, record)| !record.facts.removed);
    for (uid, range) in holding.filter_map(|(uid, record)| Some((uid, record.facts.users?))) {
        if !users.keep(uid, range) {
            warn!(
                pod_uid = uid,
                first = range.first,
                "the ids of a sandbox are another's"
            );
        }
    }
}

/// Containers of ours in containerd, by pod UID; asked until it answers.
async fn find(host: &Host) -> HashMap<String, Vec<Identity>> {
    let records: Vec<ContainerRecord> = loop {
        match host.runtime.list().await {
            Ok(records) => break records,
            Err(error) => {
                warn!(%error, "waiting for containerd");
                tokio::time::sleep(RETRY).await;
            }
        }
    };
    let mut found: HashMap<String, Vec<Identity>> = HashMap::new();
    for identity in records
        .iter()
        .filter_map(|r| Identity::from_labels(&r.labels))
    {
        // Labels are ours, but a UID becomes part of paths.
        if is_uid(&identity.uid) {
            found
                .entry(identity.uid.clone())
                .or_default()
                .push(identity);
        }
    }
    found
}

/// Passes the runtime's hints on to the workers they concern.
async fn follow(sandboxes: Arc<Sandboxes>, mut events: broadcast::Receiver<RuntimeEvent>) {
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = sandboxes.host.room.notified() => {
                sandboxes.retry_ungiven();
                continue;
            }
        };
        match event {
            Ok(RuntimeEvent::Exited { container_id }) => {
                // Ids begin with the UID of the pod, as a rule 36 characters long.
                match container_id
                    .get(..36)
                    .filter(|uid| sandboxes.view(uid).is_some())
                {
                    Some(uid) => sandboxes.look(uid),
                    None => sandboxes.look_everywhere(),
                }
            }
            Ok(RuntimeEvent::Resync) | Err(broadcast::error::RecvError::Lagged(_)) => {
                sandboxes.look_everywhere();
            }
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}
