//! grpc: the standard health service, in clear text (`pkg/probe/grpc`).

use std::net::IpAddr;
use std::time::Duration;

use http::uri::PathAndQuery;
use sandman_protocol::v1;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::{Verdict, host, port};

const CHECK: &str = "/grpc.health.v1.Health/Check";
const SERVING: i32 = 1;
/// Largest answer; a true one takes two bytes.
const MAX_MESSAGE: usize = 4096;

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct CheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct CheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

pub(super) async fn probe(
    action: &v1::GrpcAction,
    pod_ip: Option<IpAddr>,
    timeout: Duration,
) -> Verdict {
    let address =
        port(action.port.as_ref()).and_then(|port| Ok(format!("{}:{port}", host("", pod_ip)?)));
    let address = match address {
        Ok(address) => address,
        Err(why) => return Verdict::Unknown(why),
    };
    let deadline = tokio::time::Instant::now() + timeout;
    let channel = match tokio::time::timeout_at(deadline, connect(&address)).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(error)) => {
            let text = format!("error: failed to connect service at {address:?}: {error}");
            return Verdict::Failure(text);
        }
        Err(_) => {
            return Verdict::Failure(format!(
                "timeout: failed to connect service {address:?} within {timeout:?}: context deadline exceeded"
            ));
        }
    };
    match tokio::time::timeout_at(deadline, check(channel, &action.service)).await {
        Ok(answer) => judge(answer),
        Err(_) => Verdict::Failure(format!(
            "timeout: health rpc did not complete within {timeout:?}"
        )),
    }
}

async fn connect(address: &str) -> Result<Channel, String> {
    let chain = |error: tonic::transport::Error| crate::images::chain(&error);
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .and_then(|endpoint| endpoint.user_agent("kube-probe/1.36"))
        .map_err(chain)?;
    endpoint.connect().await.map_err(chain)
}

async fn check(channel: Channel, service: &str) -> Result<i32, Status> {
    let mut client = Grpc::new(channel).max_decoding_message_size(MAX_MESSAGE);
    client
        .ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    let request = Request::new(CheckRequest {
        service: service.to_owned(),
    });
    let codec = ProstCodec::<CheckRequest, CheckResponse>::default();
    let answer = client
        .unary(request, PathAndQuery::from_static(CHECK), codec)
        .await?;
    Ok(answer.into_inner().status)
}

fn judge(answer: Result<i32, Status>) -> Verdict {
    match answer {
        Ok(SERVING) => Verdict::Success,
        Ok(status) => {
            let name = match status {
                0 => "UNKNOWN",
                2 => "NOT_SERVING",
                3 => "SERVICE_UNKNOWN",
                _ => {
                    return Verdict::Failure(format!(
                        "service unhealthy (responded with \"{status}\")"
                    ));
                }
            };
            Verdict::Failure(format!("service unhealthy (responded with {name:?})"))
        }
        Err(status) if status.code() == Code::Unimplemented => Verdict::Failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Err(status) => Verdict::Failure(format!(
            "error: health rpc probe failed: rpc error: code = {:?} desc = {}",
            status.code(),
            status.message()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_as_the_kubelet_tells_them() {
        assert_eq!(judge(Ok(1)), Verdict::Success);
        for (answer, text) in [
            (Ok(2), "responded with \"NOT_SERVING\""),
            (Ok(9), "responded with \"9\""),
            (
                Err(Status::unimplemented("no")),
                "does not implement the grpc health protocol",
            ),
            (Err(Status::not_found("x")), "code = NotFound desc = x"),
        ] {
            let Verdict::Failure(told) = judge(answer) else {
                panic!("{text}")
            };
            assert!(told.contains(text), "{told}");
        }
    }
}
