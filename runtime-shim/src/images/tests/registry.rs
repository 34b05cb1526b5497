//! A registry that does what a test tells it to, also the wrong thing.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::images::manifest;

pub(super) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

#[derive(Default)]
pub(super) struct State {
    /// By `repository:tag` or `repository@digest`.
    pub(super) manifests: HashMap<String, (&'static str, Vec<u8>)>,
    /// By `repository@digest`.
    pub(super) blobs: HashMap<String, Vec<u8>>,
    /// User and password that the token service accepts, if tokens are needed.
    pub(super) login: Option<(&'static str, &'static str)>,
    /// Digests whose next transfer breaks in the middle.
    pub(super) break_once: HashSet<String>,
    /// Digests whose content arrives changed.
    pub(super) corrupt: HashSet<String>,
    /// Sends whole blobs to whoever asks for a part, as the protocol allows.
    pub(super) ignore_ranges: bool,
    /// Answers everything with this status.
    pub(super) status: Option<u16>,
    /// `METHOD path [range]` of each request.
    pub(super) log: Vec<String>,
}

#[derive(Clone)]
pub(super) struct Registry {
    pub(super) address: SocketAddr,
    pub(super) state: Arc<Mutex<State>>,
}

impl Registry {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let registry = Self {
            address: listener.local_addr().unwrap(),
            state: Arc::default(),
        };
        let served = registry.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(served.clone().serve(stream));
            }
        });
        registry
    }

    pub(super) fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn name(&self, repository: &str) -> String {
        format!("{}/{repository}", self.address)
    }

    /// How often something whose log line contains `text` was asked for.
    pub(super) fn count(&self, text: &str) -> usize {
        self.state()
            .log
            .iter()
            .filter(|line| line.contains(text))
            .count()
    }

    /// Publishes an image of single-file layers and returns the layers' digests.
    pub(super) fn publish(
        &self,
        repository: &str,
        tag: &str,
        layers: &[(&str, Vec<u8>)],
    ) -> Vec<String> {
        let (manifest, digests) = self.push(repository, layers);
        let mut state = self.state();
        let digest = manifest::digest(&manifest);
        for key in [
            format!("{repository}:{tag}"),
            format!("{repository}@{digest}"),
        ] {
            state.manifests.insert(key, (MANIFEST, manifest.clone()));
        }
        digests
    }

    /// The same behind an index with a manifest for another platform before it.
    pub(super) fn publish_index(&self, repository: &str, tag: &str, layers: &[(&str, Vec<u8>)]) {
        let (manifest, _) = self.push(repository, layers);
        let digest = manifest::digest(&manifest);
        let entry = |digest: &str, architecture: &str| {
            serde_json::json!({"mediaType": MANIFEST, "digest": digest, "size": manifest.len(),
                "platform": {"os": "linux", "architecture": architecture}})
        };
        let other = manifest::digest(b"of another platform, never fetched");
        let index = serde_json::json!({"schemaVersion": 2, "mediaType": INDEX,
            "manifests": [entry(&other, "s390x"), entry(&digest, manifest::architecture())]});
        let index = serde_json::to_vec(&index).unwrap();
        let mut state = self.state();
        let of_index = manifest::digest(&index);
        state
            .manifests
            .insert(format!("{repository}@{digest}"), (MANIFEST, manifest));
        for key in [
            format!("{repository}:{tag}"),
            format!("{repository}@{of_index}"),
        ] {
            state.manifests.insert(key, (INDEX, index.clone()));
        }
    }

    fn push(&self, repository: &str, layers: &[(&str, Vec<u8>)]) -> (Vec<u8>, Vec<String>) {
        let mut state = self.state();
        let mut descriptor = |media_type: &str, bytes: Vec<u8>| {
            let digest = manifest::digest(&bytes);
            let size = bytes.len();
            state.blobs.insert(format!("{repository}@{digest}"), bytes);
            serde_json::json!({"mediaType": media_type, "digest": digest, "size": size})
        };
        let (mut diff_ids, mut descriptors) = (Vec::new(), Vec::new());
        for (path, content) in layers {
            let tar = tar(path, content);
            diff_ids.push(manifest::digest(&tar));
            descriptors.push(descriptor(LAYER, gzip(&tar)));
        }
        let config = serde_json::json!({
            "os": "linux", "architecture": manifest::architecture(),
            "config": {"Cmd": ["/hello"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = descriptor(CONFIG, serde_json::to_vec(&config).unwrap());
        let digests = descriptors
            .iter()
            .map(|layer| layer["digest"].as_str().unwrap().to_owned());
        let digests = digests.collect();
        let manifest = serde_json::json!({"schemaVersion": 2, "mediaType": MANIFEST,
            "config": config, "layers": descriptors});
        (serde_json::to_vec(&manifest).unwrap(), digests)
    }

    async fn serve(self, mut stream: TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else {
                return;
            };
            head.push(byte);
        }
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.lines();
        let mut words = lines.next().unwrap().split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let header = |name: &str| {
            head.lines().find_map(|line| {
                let (key, value) = line.split_once(": ")?;
                key.eq_ignore_ascii_case(name).then(|| value.to_owned())
            })
        };
        let (answer, body, broken) =
            self.answer(method, path, header("authorization"), header("range"));
        let length = format!(
            "content-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        // Clients may hang up early; that is their test.
        let _ = stream
            .write_all(format!("HTTP/1.1 {answer}\r\n{length}").as_bytes())
            .await;
        if method != "HEAD" {
            let sent = if broken {
                &body[..body.len() / 2]
            } else {
                &body[..]
            };
            let _ = stream.write_all(sent).await;
        }
        let _ = stream.shutdown().await;
    }

    /// Status line with headers, body, and whether it breaks off.
    fn answer(
        &self,
        method: &str,
        path: &str,
        authorization: Option<String>,
        range: Option<String>,
    ) -> (String, Vec<u8>, bool) {
        let mut state = self.state();
        state.log.push(format!(
            "{method} {path} {}",
            range.clone().unwrap_or_default()
        ));
        let fail = |status: &str, text: &str| (status.to_owned(), text.as_bytes().to_vec(), false);
        if let Some(status) = state.status {
            let body = r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"slow down"}]}"#;
            return fail(&format!("{status} As Told"), body);
        }
        if let Some((user, password)) = state.login {
            let encode = |text: String| base64::engine::general_purpose::STANDARD.encode(text);
            if path.starts_with("/token?") {
                let expected = format!("Basic {}", encode(format!("{user}:{password}")));
                // The anonymous get a token too; it opens nothing.
                return match authorization {
                    Some(given) if given != expected => fail("401 Unauthorized", ""),
                    Some(_) => fail("200 OK", r#"{"token":"opaque"}"#),
                    None => fail("200 OK", r#"{"access_token":"anonymous"}"#),
                };
            }
            if authorization.as_deref() != Some("Bearer opaque") {
                let realm = format!("http://{}/token", self.address);
                let challenge = format!(
                    "401 Unauthorized\r\nwww-authenticate: Bearer realm=\"{realm}\",service=\"test\""
                );
                let body =
                    r#"{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}"#;
                return fail(&challenge, body);
            }
        }
        let path = path.strip_prefix("/v2/").unwrap_or_default().to_owned();
        if let Some((repository, reference)) = path.split_once("/manifests/") {
            let separator = if reference.contains(':') { '@' } else { ':' };
            let found = state
                .manifests
                .get(&format!("{repository}{separator}{reference}"));
            let Some((media_type, bytes)) = found else {
                return fail("404 Not Found", "");
            };
            let digest = manifest::digest(bytes);
            let headers =
                format!("200 OK\r\ncontent-type: {media_type}\r\ndocker-content-digest: {digest}");
            return (headers, bytes.clone(), false);
        }
        let Some((repository, digest)) = path.split_once("/blobs/") else {
            return fail("404 Not Found", "");
        };
        let Some(bytes) = state.blobs.get(&format!("{repository}@{digest}")) else {
            return fail("404 Not Found", "");
        };
        let mut bytes = bytes.clone();
        if state.corrupt.contains(digest) {
            bytes[20] ^= 1;
        }
        let broken = method == "GET" && state.break_once.remove(digest);
        let range = range.filter(|_| !state.ignore_ranges);
        let start =
            range.and_then(|range| range["bytes=".len()..].trim_end_matches('-').parse().ok());
        match start {
            Some(start) => {
                let status = format!(
                    "206 Partial Content\r\ncontent-range: bytes {start}-{}/{}",
                    bytes.len() - 1,
                    bytes.len()
                );
                (status, bytes.split_off(start), broken)
            }
            None => ("200 OK".to_owned(), bytes, broken),
        }
    }
}

fn tar(path: &str, content: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o755);
    builder.append_data(&mut header, path, content).unwrap();
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
