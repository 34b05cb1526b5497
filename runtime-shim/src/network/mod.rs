//! Network of this host's sandboxes: a namespace per pod, a routed veth pair,
//! addresses, and the nftables rules around them; all by netlink in-process.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use sandman_protocol::v1;

mod cidr;
mod counters;
mod loopback;
mod namespace;
mod netlink;
mod nftables;
mod pod;
mod policies;
mod pool;
mod services;

pub use self::cidr::{CidrError, Ipv4Cidr};
pub use self::loopback::DialError;
use self::namespace::Pins;
use self::netlink::Socket;
use self::netlink::route::by_index;
use self::nftables::ports::{self, Forward, Forwards};
use self::nftables::{LINK_PREFIX, Ruleset};
use self::pool::AddressPool;
pub use self::services::ClusterNetworkError;
use crate::users::{OwnUsers, UserRange};

/// What [`Network`] needs to know.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Pins go to `state_dir/netns/<uid>/{net,uts,ipc}`.
    pub state_dir: PathBuf,
    /// Addresses of this host's pods.
    pub pod_cidr: Ipv4Cidr,
    /// Ranges inside the cluster (pods of all hosts, services, hosts): traffic
    /// to them keeps the pod's address, all other is masqueraded.
    pub cluster_cidrs: Vec<Ipv4Cidr>,
    /// TCP ports of the host itself that sandboxes may not reach.
    pub closed_ports: Vec<u16>,
}

/// Namespaces of one pod, pinned in the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodNetwork {
    /// Path of the network namespace.
    pub netns: PathBuf,
    /// Path of the UTS namespace, in which the pod's hostname is set.
    pub utsns: PathBuf,
    /// Path of the IPC namespace.
    pub ipcns: PathBuf,
    /// `None` in modes NONE and HOST.
    pub ip: Option<IpAddr>,
    /// The user namespace that the others belong to, if that is not the host's.
    pub users: Option<OwnUsers>,
}

/// Why the network of a pod could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// Every address of the pod CIDR is taken.
    #[error("no free address in pod_cidr {0}; give the host a larger pod_cidr")]
    NoFreeAddress(Ipv4Cidr),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The request itself is wrong.
    #[error("{0}")]
    Invalid(String),
}

impl NetworkError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            what: what.into(),
            source,
        }
    }
}

/// The network of this host's pods.
#[derive(Clone)]
pub struct Network {
    inner: Arc<Inner>,
}

struct Inner {
    config: NetworkConfig,
    pins: PathBuf,
    pool: Mutex<AddressPool>,
    /// What the kernel's table of forwarded ports is to say.
    forwards: Mutex<Forwards>,
    /// What the virtual node states of the cluster's network.
    stated: Mutex<services::Stated>,
    /// Something of it was stated.
    news: tokio::sync::Notify,
}

impl Network {
    /// Prepares the host's own namespace (forwarding, nftables) and learns the
    /// addresses that pods of an earlier run hold.
    ///
    /// # Errors
    /// The kernel refuses; the text says which step.
    pub async fn start(config: NetworkConfig) -> Result<Self, NetworkError> {
        blocking(move || {
            let pins = config.state_dir.join("netns");
            std::fs::create_dir_all(&pins).map_err(NetworkError::io(format!("create {pins:?}")))?;
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")
                .map_err(NetworkError::io("enable net.ipv4.ip_forward"))?;
            let rules = Ruleset {
                pod_cidr: config.pod_cidr,
                cluster_cidrs: &config.cluster_cidrs,
                closed_ports: &config.closed_ports,
            };
            rules
                .install()
                .map_err(NetworkError::io("install nftables table sandman"))?;
            let pool = learn(config.pod_cidr).map_err(NetworkError::io("read links and routes"))?;
            Ok(Self {
                inner: Arc::new(Inner {
                    config,
                    pins,
                    pool: Mutex::new(pool),
                    forwards: Mutex::default(),
                    stated: Mutex::default(),
                    news: tokio::sync::Notify::new(),
                }),
            })
        })
        .await
    }

    /// Keeps for a pod the address that its record says it has, whether or not the kernel still
    /// shows it. False if another pod was given it meanwhile.
    #[must_use]
    pub fn keep(&self, uid: &str, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.inner.pool().learn(uid, address),
            IpAddr::V6(_) => false,
        }
    }

    /// Forwards the host's ports to the pods that had them, and no others.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn keep_ports<'a>(
        &self,
        pods: impl Iterator<Item = (&'a str, Ipv4Addr, &'a [v1::HostPort])>,
    ) -> Result<(), NetworkError> {
        let mut kept = Forwards::new();
        for (uid, address, ports) in pods.filter(|(_, _, ports)| !ports.is_empty()) {
            let ports = ports.iter().map(forward).collect::<Result<Vec<_>, _>>()?;
            kept.insert(uid.to_owned(), (address, ports));
        }
        let mut forwards = self.inner.forwards();
        ports::install(&kept).map_err(NetworkError::io("install nftables table sandman-ports"))?;
        *forwards = kept;
        Ok(())
    }

    /// Makes the pod's namespaces, or finds them as made before and mends the way to them. Calls for one
    /// pod must not overlap with each other or with [`Self::teardown`].
    ///
    /// # Errors
    /// No address is left, or the kernel refuses; nothing stays behind.
    pub async fn setup(
        &self,
        uid: &str,
        mode: v1::NetworkMode,
        hostname: &str,
        ports: &[v1::HostPort],
    ) -> Result<PodNetwork, NetworkError> {
        self.setup_with_users(uid, mode, hostname, ports, None)
            .await
    }

    /// The same; with `users` the namespaces belong to a user namespace with these ids.
    ///
    /// # Errors
    /// As [`Self::setup`].
    pub async fn setup_with_users(
        &self,
        uid: &str,
        mode: v1::NetworkMode,
        hostname: &str,
        ports: &[v1::HostPort],
        users: Option<UserRange>,
    ) -> Result<PodNetwork, NetworkError> {
        check_uid(uid)?;
        if hostname.is_empty() || hostname.len() > 64 {
            return Err(NetworkError::Invalid(format!(
                "hostname {hostname:?} must have 1 to 64 characters"
            )));
        }
        let forwards = ports.iter().map(forward).collect::<Result<Vec<_>, _>>()?;
        let (network, uid, hostname) = (self.clone(), uid.to_owned(), hostname.to_owned());
        blocking(move || {
            let made = network.inner.setup(&uid, mode, &hostname, users)?;
            if let Some(IpAddr::V4(address)) = made.ip
                && !forwards.is_empty()
            {
                network.inner.forward(&uid, Some((address, forwards)))?;
            }
            Ok(made)
        })
        .await
    }

    /// Removes a pod's namespaces, link and address; succeeds if there are none.
    ///
    /// # Errors
    /// The kernel refuses; call again.
    pub async fn teardown(&self, uid: &str) -> Result<(), NetworkError> {
        check_uid(uid)?;
        let (network, uid) = (self.clone(), uid.to_owned());
        blocking(move || {
            network.inner.teardown(&uid)?;
            // Not where a half-made pod is made anew: it stays closed.
            let forgotten = network.inner.stated().policies.forget(&uid);
            forgotten.map_err(NetworkError::io("drop the rules of a closed pod"))
        })
        .await
    }

    /// UIDs that have pins, complete or not.
    ///
    /// # Errors
    /// The folder of pins is unreadable.
    pub async fn list(&self) -> Result<Vec<String>, NetworkError> {
        let pins = self.inner.pins.clone();
        blocking(move || {
            let mut uids = Vec::new();
            let entries = std::fs::read_dir(&pins);
            for entry in entries.map_err(NetworkError::io(format!("list {pins:?}")))? {
                let entry = entry.map_err(NetworkError::io(format!("list {pins:?}")))?;
                uids.extend(entry.file_name().into_string());
            }
            Ok(uids)
        })
        .await
    }
}

impl Inner {
    fn setup(
        &self,
        uid: &str,
        mode: v1::NetworkMode,
        hostname: &str,
        users: Option<UserRange>,
    ) -> Result<PodNetwork, NetworkError> {
        let pins = Pins::new(&self.pins, uid);
        let with_link = mode == v1::NetworkMode::Pod;
        let address = self.pool().get(uid);
        if pins.complete(users.is_some()) {
            // The pins come last: what is behind them was whole once, and processes may run there.
            match (with_link, address) {
                (false, _) => return Ok(pod_network(&pins, None, users)),
                (true, Some(address)) => {
                    reconnect(&pins, uid, address)
                        .map_err(NetworkError::io(format!("reconnect pod {uid}")))?;
                    return Ok(pod_network(&pins, Some(address), users));
                }
                // Neither the kernel nor a record knows it: it had not begun to be used.
                (true, None) => {}
            }
        }
        // Half-made, by a crash: nothing runs in it yet.
        self.teardown(uid)?;
        let made = if mode == v1::NetworkMode::Host {
            pins.create_on_host()
                .map_err(NetworkError::io(format!("create namespaces of pod {uid}")))
                .map(|()| pod_network(&pins, None, None))
        } else {
            self.create(&pins, uid, with_link, hostname, users)
        };
        if made.is_err()
            && let Err(error) = self.teardown(uid)
        {
            tracing::warn!(pod_uid = uid, %error, "half-made network not removed");
        }
        made
    }

    fn create(
        &self,
        pins: &Pins,
        uid: &str,
        with_link: bool,
        hostname: &str,
        users: Option<UserRange>,
    ) -> Result<PodNetwork, NetworkError> {
        let failed = || NetworkError::io(format!("create namespaces of pod {uid}"));
        if !with_link {
            pins.create(hostname, users, |_| Ok(())).map_err(failed())?;
            return Ok(pod_network(pins, None, users));
        }
        let address = self.pool().allocate(uid);
        let address = address.ok_or(NetworkError::NoFreeAddress(self.config.pod_cidr))?;
        pins.create(hostname, users, |inside| pod::connect(inside, uid, address))
            .map_err(failed())?;
        Ok(pod_network(pins, Some(address), users))
    }

    fn teardown(&self, uid: &str) -> Result<(), NetworkError> {
        self.forward(uid, None)?;
        let mut socket = Socket::route().map_err(NetworkError::io("open netlink"))?;
        let link = pod::link_name(uid);
        socket
            .delete_link(&link)
            .map_err(NetworkError::io(format!("delete link {link}")))?;
        let pins = Pins::new(&self.pins, uid);
        pins.remove().map_err(NetworkError::io(format!(
            "remove namespace pins of pod {uid}"
        )))?;
        // Last: an address is free once nothing answers to it.
        self.pool().release(uid);
        Ok(())
    }

    /// Says which ports of the host are the pod's, and has the kernel do so.
    fn forward(
        &self,
        uid: &str,
        wish: Option<(Ipv4Addr, Vec<Forward>)>,
    ) -> Result<(), NetworkError> {
        let mut forwards = self.forwards();
        if forwards.get(uid) == wish.as_ref() {
            return Ok(());
        }
        let mut wanted = forwards.clone();
        match wish {
            Some(wish) => wanted.insert(uid.to_owned(), wish),
            None => wanted.remove(uid),
        };
        // Under the lock: of two changes at once the later must know the earlier.
        ports::install(&wanted)
            .map_err(NetworkError::io("install nftables table sandman-ports"))?;
        *forwards = wanted;
        Ok(())
    }

    fn forwards(&self) -> std::sync::MutexGuard<'_, Forwards> {
        self.forwards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stated(&self) -> std::sync::MutexGuard<'_, services::Stated> {
        self.stated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(&self) -> std::sync::MutexGuard<'_, AddressPool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes the host's side of a pod's link true again, and the link itself if it is gone.
fn reconnect(pins: &Pins, uid: &str, address: Ipv4Addr) -> io::Result<()> {
    let mut socket = Socket::route()?;
    let name = pod::link_name(uid);
    if socket.link(&name)?.is_some() {
        return pod::host_end(&mut socket, &name, uid, address);
    }
    pins.enter(|inside| pod::connect(inside, uid, address))
}

fn forward(port: &v1::HostPort) -> Result<Forward, NetworkError> {
    let wrong = || {
        NetworkError::Invalid(format!(
            "host port {} {} cannot be forwarded",
            port.protocol, port.host_port
        ))
    };
    let any = port.host_ip.is_empty() || port.host_ip == "0.0.0.0";
    Ok(Forward {
        host_ip: match any {
            true => None,
            false => Some(port.host_ip.parse().map_err(|_| wrong())?),
        },
        protocol: protocol_number(&port.protocol).ok_or_else(wrong)?,
        host_port: u16::try_from(port.host_port).map_err(|_| wrong())?,
        port: u16::try_from(port.container_port).map_err(|_| wrong())?,
    })
}

/// `IPPROTO_*` of Kubernetes' name.
fn protocol_number(name: &str) -> Option<u8> {
    match name {
        "TCP" => Some(6),
        "UDP" => Some(17),
        "SCTP" => Some(132),
        _ => None,
    }
}

fn pod_network(pins: &Pins, address: Option<Ipv4Addr>, users: Option<UserRange>) -> PodNetwork {
    PodNetwork {
        users: users.map(|range| OwnUsers {
            namespace: pins.path(namespace::USER),
            range,
        }),
        netns: pins.path("net"),
        utsns: pins.path("uts"),
        ipcns: pins.path("ipc"),
        ip: address.map(IpAddr::V4),
    }
}

/// The kernel's links and routes are the record of who has which address. The
/// route is the last step of making a pod's network: a link without is half-made.
fn learn(cidr: Ipv4Cidr) -> io::Result<AddressPool> {
    let mut socket = Socket::route()?;
    let links = by_index(socket.links()?);
    let mut pool = AddressPool::new(cidr);
    for route in socket.routes()? {
        let link = route.link.and_then(|index| links.get(&index));
        let uid = link.filter(|link| link.name.starts_with(LINK_PREFIX));
        if let Some(uid) = uid.and_then(|link| link.alias.as_deref())
            && route.destination.prefix() == 32
            && !pool.learn(uid, route.destination.network())
        {
            tracing::warn!(pod_uid = uid, address = %route.destination, "address is another pod's");
        }
    }
    Ok(pool)
}

/// UIDs become file names.
fn check_uid(uid: &str) -> Result<(), NetworkError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !uid.is_empty() && uid.len() <= 128 && uid.bytes().all(fits) {
        return Ok(());
    }
    Err(NetworkError::Invalid(format!(
        "uid {uid:?} must be 1 to 128 letters, digits, '-' or '_'"
    )))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NetworkError> + Send + 'static,
) -> Result<T, NetworkError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(NetworkError::io("network thread")(io::Error::other(error))))
}

#[cfg(test)]
mod policies_tests;
#[cfg(test)]
mod services_tests;
#[cfg(test)]
mod tests;
