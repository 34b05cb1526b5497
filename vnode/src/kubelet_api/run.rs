//! `/run`: a command whose whole output is the answer. An old way for people
//! with curl; everything else uses exec.

use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use sandman_protocol::v1;
use sandman_protocol::v1::exec_response::Message as In;
use tonic::Status;

use super::api::Api;
use super::bridge::failure_text;
use super::listener::Peer;
use super::query::Query;
use super::respond::{Body, no_stream, text, typed};
use super::route::ContainerRef;
use super::{target, upgrade};

/// Most output of either kind, as in CRI's ExecSync. What is beyond is left out.
const MAX_OUTPUT: usize = 16 << 20;

/// Answers a run request once the command has ended.
pub(super) async fn respond(
    api: &Arc<Api>,
    peer: &Arc<Peer>,
    wanted: &ContainerRef,
    query: &Query,
) -> Response<Body> {
    let words = query.first("cmd").unwrap_or_default();
    if words.is_empty() {
        return text(
            StatusCode::BAD_REQUEST,
            "query parameter \"cmd\" is required",
        );
    }
    let pod = match target::running_container(&*api.node.pods, wanted) {
        Ok(pod) => pod,
        Err(refused) => return text(refused.status, refused.body),
    };
    let Some(_place) = upgrade::place(api, peer) else {
        return upgrade::crowded();
    };
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let client = match api.node.hosts.client(&uid).await {
        Ok(client) => client,
        Err(error) => return no_stream(&error),
    };
    let mut meter = api.node.metrics.open_stream("run");
    let start = v1::ExecStart {
        uid,
        container: wanted.container.clone(),
        // The kubelet's own way: there are no quotes.
        command: words.split(' ').map(str::to_owned).collect(),
        stdout: true,
        stderr: true,
        ..Default::default()
    };
    let ended = tokio::select! {
        ended = run(client, start) => ended,
        () = api.shutdown.cancelled() => Err("the node agent is shutting down".to_owned()),
    };
    match ended {
        Ok(output) => {
            meter.finish("exited");
            meter.bytes_out.inc_by(output.all().len() as u64);
            answer(output, words)
        }
        Err(reason) => {
            meter.finish("not_started");
            text(StatusCode::INTERNAL_SERVER_ERROR, reason)
        }
    }
}

/// What a command left behind.
#[derive(Debug, Default, PartialEq, Eq)]
struct Output {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    code: i32,
}

impl Output {
    /// Not interleaved, as in the kubelet.
    fn all(&self) -> Vec<u8> {
        [&self.stdout[..], &self.stderr].concat()
    }
}

fn answer(output: Output, words: &str) -> Response<Body> {
    if output.code == 0 {
        // The kubelet says so, whatever it is.
        return typed(StatusCode::OK, "application/json", output.all());
    }
    let Output { stderr, code, .. } = output;
    let stderr = String::from_utf8_lossy(&stderr);
    text(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("command '{words}' exited with {code}: {stderr}"),
    )
}

async fn run(
    mut client: v1::host_client::HostClient<tonic::transport::Channel>,
    start: v1::ExecStart,
) -> Result<Output, String> {
    let container = start.container.clone();
    let request = v1::ExecRequest {
        message: Some(v1::exec_request::Message::Start(start)),
    };
    let lost = |status: Status| format!("the host failed: {}", status.message());
    let responses = client.exec(tokio_stream::once(request)).await;
    let mut responses = responses.map_err(lost)?.into_inner();
    let mut output = Output::default();
    while let Some(response) = responses.message().await.map_err(lost)? {
        match response.message {
            Some(In::Stdout(data)) => keep(&mut output.stdout, &data),
            Some(In::Stderr(data)) => keep(&mut output.stderr, &data),
            Some(In::Exited(exited)) => {
                output.code = exited.exit_code;
                return Ok(output);
            }
            Some(In::Failed(failure)) => return Err(failure_text(&failure, &container)),
            Some(In::Started(_)) | None => {}
        }
    }
    Err("the host ended the stream before the command ended".to_owned())
}

fn keep(output: &mut Vec<u8>, data: &Bytes) {
    let room = MAX_OUTPUT.saturating_sub(output.len());
    output.extend_from_slice(&data[..data.len().min(room)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_bounded() {
        let mut output = vec![0; MAX_OUTPUT - 2];
        keep(&mut output, &Bytes::from_static(b"abc"));
        keep(&mut output, &Bytes::from_static(b"d"));
        assert_eq!(output.len(), MAX_OUTPUT);
        assert!(output.ends_with(b"ab"));
    }
}
