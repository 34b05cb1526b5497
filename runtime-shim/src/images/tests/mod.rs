//! Pulls from a scripted registry into a real containerd; these need root and
//! containerd, and say so when skipped.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use containerd_client::services::v1 as api;

use super::*;

mod registry;

use self::registry::Registry;

/// A containerd of the test's own; it ends with the value.
struct Fixture {
    process: Child,
    _folder: tempfile::TempDir,
    channel: Channel,
    registry: Registry,
    images: Images,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // Ending it is all that can be done here.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Fixture {
    async fn start() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        // One of several tests installs it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
             [grpc]\naddress = {:?}\n",
            at("root"),
            at("state"),
            at("socket")
        );
        std::fs::write(at("config.toml"), config).unwrap();
        let started = Command::new("containerd")
            .arg("--config")
            .arg(at("config.toml"))
            .stderr(Stdio::piped())
            .spawn();
        let Ok(mut process) = started else {
            eprintln!("skipped: needs containerd");
            return None;
        };
        let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
        let booted = log.any(|line| line.unwrap_or_default().contains("successfully booted"));
        assert!(booted, "containerd did not start");
        // Read on, or containerd stops at a full pipe.
        std::thread::spawn(move || log.for_each(drop));

        let channel = containerd_client::connect(at("socket")).await.unwrap();
        let registry = Registry::start().await;
        let plain = RegistryConfig {
            plain_http: true,
            ..RegistryConfig::default()
        };
        let mirrors = vec![format!("http://{}", registry.address)];
        let mirrored = RegistryConfig {
            mirrors,
            ..RegistryConfig::default()
        };
        let config = ImagesConfig {
            namespace: "sandman".to_owned(),
            snapshotter: "overlayfs".to_owned(),
            registries: [
                (registry.address.to_string(), plain),
                ("mirrored.invalid".to_owned(), mirrored),
            ]
            .into(),
            state_dir: folder.path().to_owned(),
        };
        let images = Images::new(channel.clone(), config, None).unwrap();
        Some(Self {
            process,
            _folder: folder,
            channel,
            registry,
            images,
        })
    }

    fn request(&self, image: &str, policy: v1::PullPolicy) -> ImageRequest {
        ImageRequest {
            reference: self.registry.name(image),
            policy,
            credentials: Vec::new(),
        }
    }

    async fn ensure(&self, request: &ImageRequest) -> Result<Image, ImageError> {
        self.images.ensure(request, &Counter::default()).await
    }

    /// Collects all that nothing refers to.
    async fn collect_garbage(&self) {
        let store = Containerd::new(self.channel.clone(), "sandman", "overlayfs".to_owned());
        let leased = store.unwrap().with_lease().await.unwrap();
        leased.release_and_collect().await;
    }

    async fn has_snapshot(&self, image: &Image) -> bool {
        self.images
            .inner
            .store
            .has_snapshot(&image.chain_id)
            .await
            .unwrap()
    }
}

#[derive(Default)]
struct Counter(AtomicU32);

impl PullObserver for Counter {
    fn pulling(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn layers() -> Vec<(&'static str, Vec<u8>)> {
    vec![("hello", b"#!/bin/true".to_vec()), ("data", noise(300_000))]
}

/// Bytes that do not compress.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

#[tokio::test]
async fn an_image_is_pulled_once_and_stays() {
    let Some(host) = Fixture::start().await else {
        return;
    };
    host.registry.publish_index("app", "v1", &layers());
    let request = host.request("app:v1", v1::PullPolicy::IfNotPresent);
    let absent = host
        .ensure(&host.request("app:v1", v1::PullPolicy::Never))
        .await
        .unwrap_err();
    assert_eq!(absent.reason(), "ErrImageNeverPull");

    let counter = Counter::default();
    let image = host.images.ensure(&request, &counter).await.unwrap();
    assert_eq!(counter.0.load(Ordering::SeqCst), 1);
    assert_eq!(image.name, host.registry.name("app:v1"));
    assert!(
        image
            .image_id
            .starts_with(&host.registry.name("app@sha256:"))
    );
    assert!(image.pulled.is_some() && image.size > 300_000);
    assert_eq!(
        image
            .config
            .config()
            .as_ref()
            .unwrap()
            .cmd()
            .as_ref()
            .unwrap()[0],
        "/hello"
    );

    host.collect_garbage().await;
    assert!(host.has_snapshot(&image).await);
    let requests = host.registry.state().log.len();
    for policy in [v1::PullPolicy::IfNotPresent, v1::PullPolicy::Never] {
        let again = host
            .images
            .ensure(&host.request("app:v1", policy), &counter)
            .await
            .unwrap();
        assert!(again.pulled.is_none());
        assert_eq!(
            (again.image_id, again.size),
            (image.image_id.clone(), image.size)
        );
    }
    assert_eq!(counter.0.load(Ordering::SeqCst), 1);
    assert_eq!(host.registry.state().log.len(), requests);

    // A snapshot that is lost is made again from what is here.
    host.images
        .inner
        .store
        .remove_snapshot(&image.chain_id)
        .await;
    assert!(!host.has_snapshot(&image).await);
    let never = host.request("app:v1", v1::PullPolicy::Never);
    host.images.ensure(&never, &counter).await.unwrap();
    host.collect_garbage().await;
    assert!(host.has_snapshot(&image).await);
    assert_eq!(host.registry.state().log.len(), requests);

    // Always asks whether the tag moved, and fetches nothing if not.
    let always = host
        .ensure(&host.request("app:v1", v1::PullPolicy::Always))
        .await
        .unwrap();
    assert!(always.pulled.is_some());
    assert_eq!(
        host.registry.count("GET"),
        5,
        "{:?}",
        host.registry.state().log
    );

    let list = host.images.list().await.unwrap();
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].names, [image.name, image.image_id]);
    assert_eq!(list[0].size_bytes, image.size);
}

#[tokio::test]
async fn many_requests_share_one_pull_and_layers_are_shared() {
    let Some(host) = Fixture::start().await else {
        return;
    };
    let layers = layers();
    let digests = host.registry.publish("app", "v1", &layers);
    host.registry.publish("other", "v1", &layers);
    let mut requests = Vec::new();
    for image in ["app:v1", "other:v1"].repeat(20) {
        requests.push(host.request(image, v1::PullPolicy::Always));
    }
    let all = futures::future::join_all(requests.iter().map(|request| host.ensure(request))).await;
    let chains: HashSet<_> = all
        .into_iter()
        .map(|image| image.unwrap().chain_id)
        .collect();
    assert_eq!(chains.len(), 1);
    for digest in digests {
        // One transfer and one proof; a request that comes after the others' pull has ended asks
        // once more, which few of forty do.
        let asked = host.registry.count(&format!("/blobs/{digest}"));
        assert!((2..10).contains(&asked), "{asked}");
        // A repository that comes later only proves that it has the layer too; two that begin at the
        // same time do not wait for each other, for one may be slow. None transfers it twice.
        let [app, other] = ["app", "other"].map(|name| {
            host.registry
                .count(&format!("GET /v2/{name}/blobs/{digest}"))
        });
        assert!(app <= 1 && other <= 1 && app + other > 0, "{app} {other}");
    }
}

#[tokio::test]
async fn a_broken_transfer_is_resumed() {
    let Some(host) = Fixture::start().await else {
        return;
    };
    for (tag, ignore_ranges) in [("v1", false), ("v2", true)] {
        let layer = (tag, noise(5_000_000));
        let digests = host.registry.publish("app", tag, &[layer]);
        host.registry.state().ignore_ranges = ignore_ranges;
        host.registry.state().break_once.insert(digests[0].clone());
        let request = host.request(&format!("app:{tag}"), v1::PullPolicy::IfNotPresent);
        let image = host.ensure(&request).await.unwrap();
        assert!(host.has_snapshot(&image).await);
        let log = host.registry.state().log.clone();
        let asked = |line: &String| line.contains(&digests[0]) && line.contains("bytes=");
        assert!(log.iter().any(asked), "{log:?}");
    }
}

#[tokio::test]
async fn a_mirror_serves_in_place_of_the_registry() {
    let Some(host) = Fixture::start().await else {
        return;
    };
    host.registry.publish("app", "v1", &layers());
    let mut request = host.request("app:v1", v1::PullPolicy::Always);
    request.reference = "mirrored.invalid/app:v1".to_owned();
    let image = host.ensure(&request).await.unwrap();
    assert_eq!(image.name, request.reference);
    assert!(image.image_id.starts_with("mirrored.invalid/app@sha256:"));
    // What the mirror lacks is asked of the registry itself, whose answer counts.
    request.reference = "mirrored.invalid/other:v1".to_owned();
    let error = host.ensure(&request).await.unwrap_err();
    assert!(
        error.message().contains("registry mirrored.invalid"),
        "{error}"
    );
}

#[tokio::test]
async fn failures_say_what_is_wrong() {
    let Some(host) = Fixture::start().await else {
        return;
    };
    let ask = async |image: &str| {
        let request = host.request(image, v1::PullPolicy::IfNotPresent);
        let error = host.ensure(&request).await.unwrap_err();
        assert_eq!(error.reason(), "ErrImagePull");
        error.message().to_owned()
    };
    let text = ask("no/such:v1").await;
    assert!(text.contains("no/such:v1: not found"), "{text}");

    let layers = layers();
    let digests = host.registry.publish("app", "v1", &layers);
    host.registry.state().corrupt.insert(digests[1].clone());
    let text = ask("app:v1").await;
    assert!(text.contains("failed verification"), "{text}");
    host.registry.state().corrupt.clear();

    host.registry.state().status = Some(429);
    let text = ask("app:v1").await;
    assert!(text.contains("toomanyrequests"), "{text}");
    host.registry.state().status = Some(503);
    let text = ask("app:v1").await;
    assert!(text.contains("503"), "{text}");
    host.registry.state().status = None;

    // And it heals.
    let request = host.request("app:v1", v1::PullPolicy::IfNotPresent);
    host.ensure(&request).await.unwrap();

    let mut request = host.request("app:v1", v1::PullPolicy::IfNotPresent);
    request.reference = "127.0.0.1:1/app:v1".to_owned();
    let error = host.ensure(&request).await.unwrap_err();
    assert!(error.message().contains("127.0.0.1:1"), "{error}");
    request.reference = "UPPER CASE".to_owned();
    assert_eq!(
        host.ensure(&request).await.unwrap_err().reason(),
        "InvalidImageName"
    );
}

#[tokio::test]
async fn a_private_image_is_only_for_those_who_may_pull_it() {
    let Some(host) = Fixture::start().await else {
        return;
    };
    host.registry.publish("secret", "v1", &layers());
    host.registry.state().login = Some(("alice", "right"));
    let credential = |password: &str| v1::RegistryCredential {
        registry: host.registry.address.to_string(),
        username: "alice".to_owned(),
        password: password.to_owned(),
        identity_token: String::new(),
    };
    let anonymous = host.request("secret:v1", v1::PullPolicy::IfNotPresent);
    let error = host.ensure(&anonymous).await.unwrap_err();
    assert!(error.message().contains("pull access denied"), "{error}");

    let mut alice = anonymous.clone();
    // A wrong one before the right one is no obstacle.
    alice.credentials = vec![credential("wrong"), credential("right")];
    assert!(host.ensure(&alice).await.unwrap().pulled.is_some());

    // The image is here now; that opens it to nobody else.
    assert!(host.ensure(&anonymous).await.is_err());
    let mut mallory = anonymous.clone();
    mallory.credentials = vec![credential("guess")];
    assert!(host.ensure(&mallory).await.is_err());
    mallory.policy = v1::PullPolicy::Never;
    assert_eq!(
        host.ensure(&mallory).await.unwrap_err().reason(),
        "ErrImageNeverPull"
    );

    // Alice's own next pod does not even ask.
    let requests = host.registry.state().log.len();
    assert!(host.ensure(&alice).await.unwrap().pulled.is_none());
    assert_eq!(host.registry.state().log.len(), requests);

    // Nor does a repository of the enemy's own lend the layers.
    let mut copied = None;
    for (key, (_, bytes)) in &host.registry.state().manifests {
        copied = key.ends_with(":v1").then(|| bytes.clone()).or(copied);
    }
    host.registry.state().login = None;
    let copied = (
        "stolen:v1".to_owned(),
        (registry::MANIFEST, copied.unwrap()),
    );
    host.registry.state().manifests.extend([copied]);
    let stolen = host.request("stolen:v1", v1::PullPolicy::IfNotPresent);
    let error = host.ensure(&stolen).await.unwrap_err();
    assert!(error.message().contains("not found"), "{error}");
}

impl Containerd {
    /// Ends the lease and collects garbage before returning.
    async fn release_and_collect(&self) {
        let id = self.lease_id().unwrap().to_owned();
        let mut client = api::leases_client::LeasesClient::new(self.channel());
        let message = api::DeleteRequest { id, sync: true };
        client
            .delete(self.request(message, Duration::from_secs(60)))
            .await
            .unwrap();
    }
}
