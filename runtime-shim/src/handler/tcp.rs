//! tcpSocket: whether a connection can be made (`pkg/probe/tcp`).

use std::net::IpAddr;
use std::time::Duration;

use sandman_protocol::v1;
use tokio::net::TcpStream;

use super::{Verdict, host, port};

pub(super) async fn probe(
    action: &v1::TcpSocketAction,
    pod_ip: Option<IpAddr>,
    timeout: Duration,
) -> Verdict {
    let address = port(action.port.as_ref())
        .and_then(|port| Ok(format!("{}:{port}", host(&action.host, pod_ip)?)));
    let address = match address {
        Ok(address) => address,
        Err(why) => return Verdict::Unknown(why),
    };
    match tokio::time::timeout(timeout, TcpStream::connect(&address)).await {
        Ok(Ok(_)) => Verdict::Success,
        Ok(Err(error)) => Verdict::Failure(format!("dial tcp {address}: connect: {error}")),
        Err(_) => Verdict::Failure(format!("dial tcp {address}: i/o timeout")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn listening_is_enough() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let number = u32::from(listener.local_addr().unwrap().port());
        let action = v1::TcpSocketAction {
            port: Some(v1::Port {
                number,
                ..Default::default()
            }),
            ..Default::default()
        };
        let here = Some("127.0.0.1".parse().unwrap());
        let ask = || probe(&action, here, Duration::from_secs(20));
        assert_eq!(ask().await, Verdict::Success);
        drop(listener);
        let Verdict::Failure(text) = ask().await else {
            panic!("nobody listens")
        };
        assert!(text.starts_with("dial tcp 127.0.0.1:"), "{text}");
    }
}
