//! What probes and lifecycle hooks do: run a command in a container, or speak to its pod from the
//! host's network (the kubelet's `pkg/probe` and `pkg/kubelet/lifecycle`).
//!
//! Whatever answers is a sandbox's: every answer has a limit in size and time.

mod command;
mod grpc;
mod http;
mod tcp;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use oci_spec::runtime::Process;
use sandman_protocol::v1;
use tokio::sync::OnceCell;
use v1::handler::Action;

pub use self::command::CommandError;
use crate::runtime::Runtime;

/// Most of an answer that is kept, in bytes (`maxRespBodyLength`, `maxReadLength`).
const MAX_ANSWER: usize = 10 << 10;
/// Most of an answer that is told, in bytes: what an event holds.
const MAX_TOLD: usize = 1024;

/// Whom a handler is about.
#[derive(Clone)]
pub struct Target {
    /// Runs commands.
    pub runtime: Arc<dyn Runtime>,
    /// Folder of FIFOs.
    pub fifo_dir: PathBuf,
    /// containerd id of the attempt.
    pub container_id: String,
    /// Its main process as the runtime was given it, once somebody asked.
    pub process: Arc<OnceCell<Process>>,
    /// Address of the sandbox.
    pub pod_ip: Option<IpAddr>,
}

/// What a probe found (`pkg/probe`, `Result`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is well.
    Success,
    /// It is well, but somebody should know this.
    Warning(String),
    /// It is not well.
    Failure(String),
    /// It could not be asked; nothing follows from that.
    Unknown(String),
}

/// Asks once. `timeout` bounds the whole of it.
pub async fn probe(handler: &v1::Handler, target: &Target, timeout: Duration) -> Verdict {
    let verdict = match &handler.action {
        Some(Action::Exec(exec)) => command::probe(target, &exec.command, timeout).await,
        Some(Action::HttpGet(get)) => http::probe(get, target.pod_ip, timeout).await,
        Some(Action::TcpSocket(tcp)) => tcp::probe(tcp, target.pod_ip, timeout).await,
        Some(Action::Grpc(grpc)) => grpc::probe(grpc, target.pod_ip, timeout).await,
        Some(Action::Sleep(_)) | None => Verdict::Unknown("missing probe handler".to_owned()),
    };
    verdict.clipped()
}

/// What came of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hooked {
    /// It was run.
    Done,
    /// It was run over HTTP, because the server does not speak HTTPS.
    FellBack,
}

/// Runs a hook, as long as that takes.
///
/// # Errors
/// Why it failed, for the log: the text may hold what a server or a command said.
pub async fn hook(handler: &v1::Handler, target: &Target) -> Result<Hooked, String> {
    match &handler.action {
        Some(Action::Exec(exec)) => command::hook(target, &exec.command).await,
        Some(Action::HttpGet(get)) => http::hook(get, target.pod_ip).await,
        Some(Action::Sleep(sleep)) => {
            tokio::time::sleep(Duration::from_secs(sleep.seconds.into())).await;
            Ok(Hooked::Done)
        }
        Some(Action::TcpSocket(_) | Action::Grpc(_)) | None => Err("invalid handler".to_owned()),
    }
}

/// Number of a port, or the kubelet's words for one that there is not (`ResolveContainerPort`).
fn port(port: Option<&v1::Port>) -> Result<u16, String> {
    let port = port.cloned().unwrap_or_default();
    if !port.unknown_name.is_empty() {
        return Err(format!("port {} not found", port.unknown_name));
    }
    u16::try_from(port.number)
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("invalid port number: {}", port.number))
}

/// The host that was named, else the sandbox; an IPv6 address in brackets.
fn host(named: &str, pod_ip: Option<IpAddr>) -> Result<String, String> {
    let address = match (named.is_empty(), pod_ip) {
        (false, _) => match named.parse::<IpAddr>() {
            Ok(address) => address,
            Err(_) => return Ok(named.to_owned()),
        },
        (true, Some(address)) => address,
        (true, None) => return Err("the pod has no address".to_owned()),
    };
    Ok(match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    })
}

impl Verdict {
    fn clipped(self) -> Self {
        let clip = |mut text: String| {
            text.truncate(text.floor_char_boundary(MAX_TOLD));
            text
        };
        match self {
            Self::Success => Self::Success,
            Self::Warning(text) => Self::Warning(clip(text)),
            Self::Failure(text) => Self::Failure(clip(text)),
            Self::Unknown(text) => Self::Unknown(clip(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_refused_in_the_kubelets_words() {
        let number = |number| v1::Port {
            number,
            ..Default::default()
        };
        assert_eq!(port(Some(&number(8080))), Ok(8080));
        assert_eq!(port(Some(&number(0))), Err("invalid port number: 0".into()));
        assert_eq!(
            port(Some(&number(70_000))),
            Err("invalid port number: 70000".into())
        );
        let named = v1::Port {
            unknown_name: "web".into(),
            ..Default::default()
        };
        assert_eq!(port(Some(&named)), Err("port web not found".into()));
    }

    #[test]
    fn hosts_default_to_the_pod() {
        let four = Some("10.64.0.5".parse().unwrap());
        let six = Some("fd00::5".parse().unwrap());
        assert_eq!(host("", four).unwrap(), "10.64.0.5");
        assert_eq!(host("", six).unwrap(), "[fd00::5]");
        assert_eq!(host("::1", four).unwrap(), "[::1]");
        assert_eq!(host("example.com", four).unwrap(), "example.com");
        assert!(host("", None).is_err());
    }

    #[test]
    fn long_answers_are_cut_between_characters() {
        let long = Verdict::Failure("ü".repeat(MAX_TOLD)).clipped();
        assert_eq!(long, Verdict::Failure("ü".repeat(MAX_TOLD / 2)));
    }
}
