//! httpGet: one request from the host, certificates unverified, redirects only to the same host
//! (`pkg/probe/http`, `pkg/kubelet/lifecycle`).

use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::Duration;

use reqwest::redirect::{Attempt, Policy};
use reqwest::{Client, Response};
use sandman_protocol::v1;

use super::{Hooked, MAX_ANSWER, Verdict, host, port};
use crate::images::chain;

/// Redirects followed (`RedirectChecker`).
const MAX_REDIRECTS: usize = 10;
const PROBE_AGENT: &str = "kube-probe/1.36";
const HOOK_AGENT: &str = "kube-lifecycle/1.36";

pub(super) async fn probe(
    action: &v1::HttpGetAction,
    pod_ip: Option<IpAddr>,
    timeout: Duration,
) -> Verdict {
    let url = match url(action, action.https, pod_ip) {
        Ok(url) => url,
        Err(why) => return Verdict::Unknown(why),
    };
    match tokio::time::timeout(timeout, ask(&url, action)).await {
        Ok(verdict) => verdict,
        Err(_) => Verdict::Failure(format!(
            "Get {url:?}: context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        )),
    }
}

async fn ask(url: &str, action: &v1::HttpGetAction) -> Verdict {
    let response = match send(url, action, PROBE_AGENT).await {
        Ok(response) => response,
        Err(why) => return Verdict::Failure(why),
    };
    let status = response.status().as_u16();
    match status {
        200..300 => Verdict::Success,
        300..400 => {
            let body = body(response).await;
            Verdict::Warning(format!("Probe terminated redirects, Response body: {body}"))
        }
        _ => Verdict::Failure(format!("HTTP probe failed with statuscode: {status}")),
    }
}

/// Any answer will do: the kubelet does not look at its code.
pub(super) async fn hook(
    action: &v1::HttpGetAction,
    pod_ip: Option<IpAddr>,
) -> Result<Hooked, String> {
    let secure = url(action, action.https, pod_ip)?;
    let error = match send(&secure, action, HOOK_AGENT).await {
        Ok(response) => {
            body(response).await;
            return Ok(Hooked::Done);
        }
        Err(error) => error,
    };
    if !action.https || !is_plain_answer(&error) {
        return Err(error);
    }
    let mut plain = action.clone();
    plain
        .headers
        .retain(|header| !header.name.eq_ignore_ascii_case("authorization"));
    let response = send(&url(action, false, pod_ip)?, &plain, HOOK_AGENT).await?;
    body(response).await;
    Ok(Hooked::FellBack)
}

/// Whether a server answered a TLS hello with something else. rustls says so only in words, which
/// a test here holds it to.
fn is_plain_answer(error: &str) -> bool {
    error.contains("corrupt message")
}

fn url(action: &v1::HttpGetAction, https: bool, pod_ip: Option<IpAddr>) -> Result<String, String> {
    let scheme = if https { "https" } else { "http" };
    let port = port(action.port.as_ref())?;
    let host = host(&action.host, pod_ip)?;
    let slash = if action.path.starts_with('/') {
        ""
    } else {
        "/"
    };
    Ok(format!("{scheme}://{host}:{port}{slash}{}", action.path))
}

async fn send(url: &str, action: &v1::HttpGetAction, agent: &str) -> Result<Response, String> {
    let mut request = client()?.get(url);
    let has = |name: &str| {
        action
            .headers
            .iter()
            .any(|header| header.name.eq_ignore_ascii_case(name))
    };
    if !has("user-agent") {
        request = request.header(http::header::USER_AGENT, agent);
    }
    for header in &action.headers {
        request = request.header(&header.name, &header.value);
    }
    request
        .send()
        .await
        .map_err(|error| format!("Get {url:?}: {}", chain(&error.without_url())))
}

/// The beginning of a body.
async fn body(mut response: Response) -> String {
    let mut bytes = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        bytes.extend_from_slice(&chunk[..chunk.len().min(MAX_ANSWER - bytes.len())]);
        if bytes.len() >= MAX_ANSWER {
            break;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Made when first needed. Keeps no connection: each probe is a new one.
fn client() -> Result<&'static Client, String> {
    static CLIENT: OnceLock<Result<Client, String>> = OnceLock::new();
    let client = CLIENT.get_or_init(|| {
        Client::builder()
            .no_proxy()
            .pool_max_idle_per_host(0)
            .tls_danger_accept_invalid_certs(true)
            .redirect(Policy::custom(redirect))
            .build()
            .map_err(|error| chain(&error))
    });
    client.as_ref().map_err(Clone::clone)
}

fn redirect(attempt: Attempt<'_>) -> reqwest::redirect::Action {
    let first = attempt.previous().first();
    if first.and_then(|url| url.host_str()) != attempt.url().host_str() {
        attempt.stop()
    } else if attempt.previous().len() >= MAX_REDIRECTS {
        attempt.error("stopped after 10 redirects")
    } else {
        attempt.follow()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    /// A server that answers each path with one fixed text and notes the requests.
    async fn server(
        answers: &'static [(&str, &str)],
    ) -> (v1::Port, Arc<std::sync::Mutex<Vec<String>>>) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let number = u32::from(listener.local_addr().unwrap().port());
        let seen = Arc::new(std::sync::Mutex::new(vec![]));
        let notes = seen.clone();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).await.unwrap();
                let request = String::from_utf8_lossy(&request[..length]).into_owned();
                let path = request.split(' ').nth(1).unwrap_or_default();
                let answer = answers.iter().find(|(known, _)| *known == path).map_or(
                    "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
                    |(_, answer)| answer,
                );
                notes.lock().unwrap().push(request.clone());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let port = v1::Port {
            number,
            ..Default::default()
        };
        (port, seen)
    }

    fn get(port: &v1::Port, path: &str) -> v1::HttpGetAction {
        v1::HttpGetAction {
            port: Some(port.clone()),
            path: path.into(),
            ..Default::default()
        }
    }

    fn here() -> Option<IpAddr> {
        Some("127.0.0.1".parse().unwrap())
    }

    #[tokio::test]
    async fn codes_decide_and_redirects_stay_on_the_host() {
        let (port, seen) = server(&[
            ("/ok", "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
            (
                "/local",
                "HTTP/1.1 302 Found\r\nlocation: /ok\r\ncontent-length: 0\r\n\r\n",
            ),
            (
                "/away",
                "HTTP/1.1 302 Found\r\nlocation: http://example.invalid/\r\ncontent-length: 4\r\n\r\nbody",
            ),
            (
                "/loop",
                "HTTP/1.1 302 Found\r\nlocation: /loop\r\ncontent-length: 0\r\n\r\n",
            ),
        ])
        .await;
        let ask = async |path: &str| probe(&get(&port, path), here(), DEADLINE).await;
        assert_eq!(ask("ok").await, Verdict::Success);
        assert_eq!(ask("/local").await, Verdict::Success);
        assert_eq!(
            ask("/away").await,
            Verdict::Warning("Probe terminated redirects, Response body: body".into())
        );
        assert_eq!(
            ask("/none").await,
            Verdict::Failure("HTTP probe failed with statuscode: 404".into())
        );
        let Verdict::Failure(text) = ask("/loop").await else {
            panic!("a loop")
        };
        assert!(text.contains("stopped after 10 redirects"), "{text}");
        let first = seen.lock().unwrap()[0].to_ascii_lowercase();
        assert!(first.contains("user-agent: kube-probe/1.36"), "{first}");
    }

    #[tokio::test]
    async fn headers_are_the_pods() {
        let (port, seen) = server(&[]).await;
        let mut action = get(&port, "/x");
        for (name, value) in [
            ("Host", "example.com"),
            ("User-Agent", "mine"),
            ("X-A", "1"),
        ] {
            action.headers.push(v1::HttpHeader {
                name: name.into(),
                value: value.into(),
            });
        }
        probe(&action, here(), DEADLINE).await;
        let request = seen.lock().unwrap()[0].to_ascii_lowercase();
        for line in [
            "host: example.com\r\n",
            "user-agent: mine\r\n",
            "x-a: 1\r\n",
        ] {
            assert!(request.contains(line), "{request}");
        }
        assert!(!request.contains("kube-probe"), "{request}");
    }

    #[tokio::test]
    async fn a_hook_falls_back_to_http_and_takes_any_answer() {
        let (port, seen) = server(&[]).await;
        assert_eq!(hook(&get(&port, "/x"), here()).await, Ok(Hooked::Done));
        let mut action = get(&port, "/y");
        action.https = true;
        action.headers.push(v1::HttpHeader {
            name: "Authorization".into(),
            value: "secret".into(),
        });
        assert_eq!(hook(&action, here()).await, Ok(Hooked::FellBack));
        let last = seen.lock().unwrap().last().unwrap().clone();
        assert!(
            last.starts_with("GET /y ") && !last.contains("secret"),
            "{last}"
        );
    }

    #[tokio::test]
    async fn nobody_there_is_a_failure_but_no_port_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let number = u32::from(listener.local_addr().unwrap().port());
        drop(listener);
        let _ = rustls::crypto::ring::default_provider().install_default();
        let port = v1::Port {
            number,
            ..Default::default()
        };
        let verdict = probe(&get(&port, "/"), here(), DEADLINE).await;
        assert!(
            matches!(&verdict, Verdict::Failure(text) if text.starts_with("Get ")),
            "{verdict:?}"
        );
        let nowhere = v1::Port::default();
        assert!(matches!(
            probe(&get(&nowhere, "/"), here(), DEADLINE).await,
            Verdict::Unknown(_)
        ));
    }
}
