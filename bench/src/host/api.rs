//! Commands over a host's API, as the virtual node asks for them: its certificate, its network,
//! one connection for all.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use nix::sched::{CloneFlags, setns};
use sandman_protocol::transport::{FleetTls, connect};
use sandman_protocol::v1;
use sandman_protocol::v1::exec_failed::Kind;
use sandman_protocol::v1::exec_request::Message as In;
use sandman_protocol::v1::exec_response::Message as Out;
use sandman_protocol::v1::host_client::HostClient;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::cluster::Session;
use crate::pod::CONTAINER;

/// A command that takes longer has failed.
const EXEC_WITHIN: Duration = Duration::from_secs(30);
/// Commands before the first that is measured.
const WARM_UP: usize = 5;
/// A container that no pod has: the host refuses the command, and has done nothing else.
const NO_CONTAINER: &str = "none";

/// One host of the dev cluster.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// Its name in the fleet.
    pub(super) name: String,
    /// Its network namespace.
    pub(super) netns: PathBuf,
    /// Its containerd's socket.
    pub(super) containerd: PathBuf,
    api: SocketAddr,
    fleet: String,
    tls: PathBuf,
}

impl Place {
    /// The host that a pod is on.
    pub(super) fn of(session: &Session, pod: &Pod) -> anyhow::Result<Self> {
        let apis = session.variable("SANDMAN_HOST_API")?;
        let namespaces = session.variable("SANDMAN_HOST_NETNS")?;
        let places = apis.split(',').zip(namespaces.split(':'));
        let places = places.zip(&session.containerd.1);
        for ((named, netns), containerd) in places {
            let (name, api) = named.split_once('=').context("SANDMAN_HOST_API")?;
            let place = Self {
                name: name.to_owned(),
                netns: netns.into(),
                containerd: containerd.clone(),
                api: api.parse().context("SANDMAN_HOST_API")?,
                fleet: session.variable("SANDMAN_FLEET")?.to_owned(),
                tls: session.variable("SANDMAN_FLEET_TLS")?.into(),
            };
            if place.has(pod) {
                return Ok(place);
            }
        }
        bail!("a Ready pod is on none of the cluster's hosts");
    }

    /// Whether a pod is there.
    pub(super) fn has(&self, pod: &Pod) -> bool {
        let address = pod.status.as_ref().and_then(|s| s.host_ip.as_deref());
        address == Some(&*self.api.ip().to_string())
    }
}

/// What came of the commands.
#[derive(Debug, Default)]
pub(super) struct Execs {
    /// Of the successes, in milliseconds.
    pub(super) milliseconds: Vec<f64>,
    /// Of requests on the same way that run nothing.
    pub(super) floors: Vec<f64>,
    /// The other commands.
    pub(super) failed: usize,
}

/// Does something inside a network namespace, on a thread of its own.
pub(super) async fn inside<T, F>(
    namespace: PathBuf,
    work: impl FnOnce() -> F + Send + 'static,
) -> anyhow::Result<T>
where
    T: Send + 'static,
    F: Future<Output = anyhow::Result<T>>,
{
    let (done, result) = oneshot::channel();
    let run = move || -> anyhow::Result<T> {
        let file = std::fs::File::open(&namespace)
            .with_context(|| format!("cannot open {}", namespace.display()))?;
        setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter a host's network")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(work())
    };
    std::thread::Builder::new()
        .name("inside".to_owned())
        .spawn(move || {
            // Nobody waits any more when the bench is interrupted.
            let _ = done.send(run());
        })?;
    result.await.context("the thread died")?
}

/// Runs `true` in these pods in turn, each followed by a request of the floor.
pub(super) async fn run(place: Place, pods: Vec<String>, count: usize) -> anyhow::Result<Execs> {
    let tls = FleetTls::load(&place.tls, &place.fleet)?;
    let mut client = HostClient::new(connect(&tls, &place.name, place.api).await?);
    let mut execs = Execs::default();
    for (number, uid) in pods.iter().cycle().take(WARM_UP + count).enumerate() {
        let measured = number >= WARM_UP;
        match timed(exec(&mut client, uid, CONTAINER)).await {
            Ok((took, Out::Exited(v1::ExecExited { exit_code: 0 }))) if measured => {
                execs.milliseconds.push(took);
            }
            Ok((_, Out::Exited(v1::ExecExited { exit_code: 0 }))) => {}
            Ok((_, end)) => {
                execs.failed += 1;
                tracing::warn!(?end, "a command failed");
            }
            Err(error) => {
                execs.failed += 1;
                tracing::warn!(error = format!("{error:#}"), "a command failed");
            }
        }
        let (took, end) = timed(exec(&mut client, uid, NO_CONTAINER)).await?;
        ensure!(
            matches!(&end, Out::Failed(failed) if failed.kind() == Kind::ContainerNotFound),
            "a command in no container gives {end:?}"
        );
        if measured {
            execs.floors.push(took);
        }
    }
    Ok(execs)
}

async fn timed(work: impl Future<Output = anyhow::Result<Out>>) -> anyhow::Result<(f64, Out)> {
    let begun = Instant::now();
    match tokio::time::timeout(EXEC_WITHIN, work).await {
        Ok(end) => Ok((begun.elapsed().as_secs_f64() * 1e3, end?)),
        Err(_) => bail!("no end after {EXEC_WITHIN:?}"),
    }
}

/// From the request to the last message, with the streams that `kubectl exec` asks for.
async fn exec(client: &mut HostClient<Channel>, uid: &str, container: &str) -> anyhow::Result<Out> {
    // Open until the end, as a client's is.
    let (requests, receiver) = mpsc::channel(1);
    let start = v1::ExecStart {
        uid: uid.to_owned(),
        container: container.to_owned(),
        command: vec!["true".to_owned()],
        stdout: true,
        stderr: true,
        ..Default::default()
    };
    let message = Some(In::Start(start));
    requests.send(v1::ExecRequest { message }).await?;
    let answer = client.exec(ReceiverStream::new(receiver)).await?;
    let mut answers = answer.into_inner();
    while let Some(answer) = answers.message().await? {
        if let Some(end @ (Out::Exited(_) | Out::Failed(_))) = answer.message {
            return Ok(end);
        }
    }
    bail!("the host ended the stream without an end of the command")
}
