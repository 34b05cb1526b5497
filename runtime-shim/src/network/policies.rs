//! The NetworkPolicies of this host's pods, as the virtual node states them, and pods that wait
//! for theirs: those are closed until they are known.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use sandman_protocol::v1;

use super::netlink::Socket;
use super::nftables::policies::{self, Content, Peers, Policies, Policy, Rule};
use super::services::{ClusterNetworkError, invalid};
use super::{Network, NetworkError, blocking, check_uid, pod, protocol_number};

/// How long the start of a pod is held up for its policies. After that it starts closed, for what
/// it does may not need a network, and policies may be long in coming.
const PATIENCE: Duration = Duration::from_secs(2);
/// Rules of one pod in one direction.
const MAX_RULES: usize = 10_000;

/// What was stated last, and what of it the kernel has.
#[derive(Debug, Default)]
pub(super) struct StatedPolicies {
    /// By UID.
    pods: BTreeMap<String, Policy>,
    peers: BTreeMap<String, Peers>,
    /// UIDs of pods whose policies were not stated yet.
    waiting: BTreeSet<String>,
    /// What the kernel's table holds; of `None` nothing is known.
    installed: Option<Content>,
}

impl Network {
    /// Closes a pod that is about to be made until its policies are stated. One that is made
    /// already keeps what it has. Tells whether the pod is closed.
    ///
    /// # Errors
    /// The kernel refuses.
    pub async fn close(&self, uid: &str) -> Result<bool, NetworkError> {
        check_uid(uid)?;
        let (network, uid) = (self.clone(), uid.to_owned());
        blocking(move || {
            let link = pod::link_name(&uid);
            let made = Socket::route()
                .and_then(|mut socket| socket.link(&link))
                .map_err(NetworkError::io(format!("look for link {link}")))?;
            if made.is_some() {
                return Ok(false);
            }
            let mut stated = network.inner.stated();
            stated
                .policies
                .close(uid)
                .map_err(NetworkError::io("close the pod's link"))
        })
        .await
    }

    /// Waits a moment for the policies of a pod that was closed.
    pub async fn wait_for_policies(&self, uid: &str) {
        let known = async {
            loop {
                let news = self.inner.news.notified();
                tokio::pin!(news);
                // Before the look, so that nothing between is missed.
                news.as_mut().enable();
                if !self.inner.stated().policies.waiting.contains(uid) {
                    return;
                }
                news.await;
            }
        };
        if tokio::time::timeout(PATIENCE, known).await.is_err() {
            tracing::warn!(
                pod_uid = uid,
                "starts closed: its policies are not known yet"
            );
        }
    }

    /// Pods of an earlier run that are subject to policies. They keep the rules that the kernel
    /// has; those that the first statement does not name are closed by it.
    pub fn keep_closed<'a>(&self, uids: impl Iterator<Item = &'a str>) {
        let mut stated = self.inner.stated();
        stated.policies.waiting.extend(uids.map(str::to_owned));
    }
}

impl StatedPolicies {
    /// Takes a statement; what it does not name stays, unless it is the whole.
    pub(super) fn take(
        &mut self,
        request: &v1::ClusterNetworkRequest,
        whole: bool,
    ) -> Result<(), ClusterNetworkError> {
        if !request.enforce_policies {
            self.pods.clear();
            self.peers.clear();
            self.waiting.clear();
            self.installed = None;
            let removed = policies::remove();
            return Ok(removed.map_err(NetworkError::io("remove the rules of policies"))?);
        }
        if whole {
            self.pods.clear();
            self.peers.clear();
        }
        for uid in &request.removed_policies {
            self.pods.remove(uid);
        }
        for id in &request.removed_peers {
            self.peers.remove(id);
        }
        for peers in &request.peers {
            check_id(&peers.id)?;
            self.peers.insert(peers.id.clone(), parse_peers(peers)?);
        }
        for policy in &request.policies {
            check_uid(&policy.uid)?;
            let parsed = Policy {
                ingress: policy.ingress.as_ref().map(rules).transpose()?,
                egress: policy.egress.as_ref().map(rules).transpose()?,
            };
            self.waiting.remove(&policy.uid);
            self.pods.insert(policy.uid.clone(), parsed);
        }
        let installed = self.install();
        Ok(installed.map_err(NetworkError::io("install the rules of policies"))?)
    }

    fn close(&mut self, uid: String) -> io::Result<bool> {
        if self.pods.contains_key(&uid) {
            return Ok(false);
        }
        if self.installed.is_none() {
            // What the kernel has of an earlier run stays.
            policies::close(&pod::link_name(&uid))?;
            self.waiting.insert(uid);
            return Ok(true);
        }
        self.waiting.insert(uid);
        self.install()?;
        Ok(true)
    }

    /// The pod is gone, or will not be.
    pub(super) fn forget(&mut self, uid: &str) -> io::Result<()> {
        if self.waiting.remove(uid) && self.installed.is_some() {
            return self.install();
        }
        Ok(())
    }

    fn content(&self) -> Content {
        let pods = self.pods.iter();
        let waiting = self.waiting.iter();
        Content::of(&Policies {
            pods: pods
                .map(|(uid, policy)| (pod::link_name(uid), policy.clone()))
                .collect(),
            peers: self.peers.clone(),
            unknown: waiting.map(|uid| pod::link_name(uid)).collect(),
        })
    }

    fn install(&mut self) -> io::Result<()> {
        let wanted = self.content();
        if let Some(installed) = self.installed.take() {
            if wanted == installed {
                self.installed = Some(installed);
                return Ok(());
            }
            match wanted.install(Some(&installed)) {
                Ok(()) => {
                    self.installed = Some(wanted);
                    return Ok(());
                }
                // Somebody changed the table: it is made anew.
                Err(error) => tracing::warn!(%error, "rules of policies cannot be changed"),
            }
        }
        wanted.install(None)?;
        self.installed = Some(wanted);
        Ok(())
    }
}

fn parse_peers(peers: &v1::PeerSet) -> Result<Peers, ClusterNetworkError> {
    let mut ranges: Vec<_> = peers.ranges.iter().map(|r| (r.first, r.last)).collect();
    ranges.sort_unstable();
    let apart = ranges.windows(2).all(|pair| pair[0].1 < pair[1].0);
    if !apart || ranges.iter().any(|(first, last)| first > last) {
        return Err(invalid(format!(
            "peers.ranges: those of {} overlap",
            peers.id
        )));
    }
    let address = Ipv4Addr::from_bits;
    Ok(Peers {
        addresses: peers.addresses.iter().copied().map(address).collect(),
        ranges: ranges
            .into_iter()
            .map(|(first, last)| (address(first), address(last)))
            .collect(),
    })
}

fn rules(isolation: &v1::Isolation) -> Result<Vec<Rule>, ClusterNetworkError> {
    if isolation.rules.len() > MAX_RULES {
        return Err(invalid(format!(
            "policies.rules: {} are more than {MAX_RULES}",
            isolation.rules.len()
        )));
    }
    isolation.rules.iter().map(rule).collect()
}

fn rule(rule: &v1::PolicyRule) -> Result<Rule, ClusterNetworkError> {
    for id in &rule.peers {
        check_id(id)?;
    }
    let ports = rule.ports.iter().map(|range| {
        let wrong = || {
            invalid(format!(
                "policies.rules.ports: {range:?} is no range of ports"
            ))
        };
        let protocol = protocol_number(&range.protocol).ok_or_else(wrong)?;
        let number = |port: u32| u16::try_from(port).map_err(|_| wrong());
        let (first, last) = (number(range.first)?, number(range.last)?);
        if first > last {
            return Err(wrong());
        }
        Ok((protocol, first, last))
    });
    Ok(Rule {
        peers: (!rule.anyone).then(|| rule.peers.clone()),
        ports: ports.collect::<Result<_, _>>()?,
    })
}

/// Ids become names of sets.
fn check_id(id: &str) -> Result<(), ClusterNetworkError> {
    if (1..=32).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    Err(invalid(format!(
        "peers.id: {id:?} is not 1 to 32 hex digits"
    )))
}
